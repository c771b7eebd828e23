"""Requests through real Triton: what is refused, in one line and by name, and what TensorRT-LLM's clients rely on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from trtpd_testing.harness import Server, ask

pytestmark = pytest.mark.e2e

TEXT = "Once upon a time"


def generate(server: Server, body: dict | bytes, *, path: str = "generate") -> tuple[int, str]:
    """One POST to Triton's generate extension: status and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/pd/{path}", data=data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt": ({"text_input": ""}, "empty"),
    "no prompt": ({}, "text_input"),
    "both prompts": ({"text_input": TEXT, "messages": "[]"}, "messages"),
    "an empty question": ({"messages": '[{"role": "user", "content": ""}]'}, "empty"),
    "a conversation that is not JSON": ({"messages": "hello"}, "messages"),
    "max_tokens 0": ({"text_input": TEXT, "max_tokens": 0}, "max_tokens"),
    "max_tokens below 0": ({"text_input": TEXT, "max_tokens": -4}, "max_tokens"),
    "max_tokens beyond the engine": ({"text_input": TEXT, "max_tokens": 1_000_000}, "max_tokens"),
    "a negative temperature": ({"text_input": TEXT, "temperature": -1.0}, "temperature"),
    "top_p above 1": ({"text_input": TEXT, "top_p": 1.5}, "top_p"),
    "top_p below 0": ({"text_input": TEXT, "top_p": -0.1}, "top_p"),
    "a negative top_k": ({"text_input": TEXT, "top_k": -3}, "top_k"),
    "a bad word of 300 letters": ({"text_input": TEXT, "bad_words": ["x" * 300]}, "bad_words"),
    "two beams": ({"text_input": TEXT, "beam_width": 2}, "beam_width"),
    "a repetition penalty of 0": ({"text_input": TEXT, "repetition_penalty": 0.0}, "repetition_penalty"),
    "a prompt longer than the engine": ({"text_input": "word " * 9_000}, "tokens"),
    "a prompt of 10 MB": ({"text_input": "x" * 10_000_000}, "bytes"),
    "text that is not UTF-8": ({"text_input": b"caf\xe9 \xff\xfe"}, "UTF-8"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_in_one_clear_line(pair: Server, fault: str) -> None:
    inputs, named = BAD[fault]
    answer = ask(pair, **{"max_tokens": 8, **inputs})
    assert answer.error is not None
    assert named in answer.error
    assert "Traceback" not in answer.error
    assert len(answer.error) < 400
    assert answer.ids == []


def test_bad_input_harms_no_other_request(pair: Server, golden: dict) -> None:
    expected = golden["prompts"]["story"]["output_ids"][:16]
    for inputs, _ in list(BAD.values())[:6]:
        ask(pair, **{"max_tokens": 8, **inputs})
    assert ask(pair, text_input=golden["prompts"]["story"]["text_input"], max_tokens=16).ids == expected


def test_http_generate_answers_with_the_whole_text(pair: Server, golden: dict) -> None:
    story = golden["prompts"]["story"]
    status, body = generate(
        pair,
        {
            "text_input": story["text_input"],
            "max_tokens": 64,
            "stream": False,
            "exclude_input_in_output": True,
        },
    )
    assert status == 200, body
    assert json.loads(body)["text_output"] == story["text_output"]


def test_http_generate_stream_sends_the_text_in_pieces(pair: Server, golden: dict) -> None:
    story = golden["prompts"]["story"]
    status, body = generate(
        pair,
        {
            "text_input": story["text_input"],
            "max_tokens": 64,
            "stream": True,
            "exclude_input_in_output": True,
        },
        path="generate_stream",
    )
    assert status == 200
    pieces = [json.loads(line[5:])["text_output"] for line in body.splitlines() if line.startswith("data:")]
    assert "".join(pieces) == story["text_output"]
    assert len(pieces) > 3


def test_a_form_encoded_body_of_10_mb_is_refused_and_the_server_lives(pair: Server) -> None:
    request = urllib.request.Request(
        f"http://{pair.http}/v2/models/pd/generate",
        data=json.dumps({"text_input": "x" * 10_000_000, "max_tokens": 4}).encode(),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    assert refused.value.code in (400, 500)  # Triton's parser may give up on it before we see it
    assert ask(pair, text_input=TEXT, max_tokens=1).error is None


def test_http_maps_bad_input_to_400(pair: Server) -> None:
    status, body = generate(pair, {"text_input": TEXT, "max_tokens": 0})
    assert status == 400
    assert "max_tokens" in body


def test_a_stop_string_ends_the_answer_before_it(pair: Server, golden: dict) -> None:
    story = golden["prompts"]["story"]
    stop = story["text_output"][40:48]
    answer = ask(pair, text_input=story["text_input"], max_tokens=64, stop_words=[stop], exclude_input_in_output=True)
    assert answer.text == story["text_output"][: story["text_output"].index(stop)]
    assert answer.finish_reason == "stop"


def test_an_answer_of_one_token_moves_no_kv(pair: Server, golden: dict) -> None:
    story = golden["prompts"]["story"]
    answer = ask(pair, text_input=story["text_input"], max_tokens=1)
    assert answer.ids == story["output_ids"][:1]
    assert answer.finish_reason == "length"
    assert answer.timeline["transfer"] is None


def test_an_end_id_of_the_clients_choice_ends_the_answer(pair: Server, golden: dict) -> None:
    story = golden["prompts"]["story"]
    end = story["output_ids"][5]
    answer = ask(pair, text_input=story["text_input"], max_tokens=64, end_id=end)
    assert answer.ids == story["output_ids"][: story["output_ids"].index(end) + 1]
    assert answer.finish_reason == "stop"


def test_stage_models_answer_on_their_own(pair: Server) -> None:
    prefill = ask(pair, model="prefill_0", text_input=TEXT, stream=None)
    assert prefill.error is None
    assert len(prefill.ids) == 1
    decode = ask(pair, model="decode_0", kv_tokens=100, max_tokens=8, stream=None)
    assert decode.error is None
    assert len(decode.ids) == 8


@pytest.mark.parametrize("path", ["models/prefill_0/unload", "models/pd/load", "index"])
def test_who_may_ask_for_answers_may_not_change_the_server(pair: Server, path: str) -> None:
    request = urllib.request.Request(f"http://{pair.http}/v2/repository/{path}", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value:
        assert refused.value.code == 403
    client = triton.InferenceServerClient(pair.grpc)
    with pytest.raises(InferenceServerException, match="restricted"):
        client.get_model_repository_index()
    client.close()
