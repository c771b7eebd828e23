from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from trtpd_testing.fake_servers import FakeServer, fake_openai, fake_triton, fixed

from trtpd.errors import InputError, ServeError
from trtpd.perf.client import Client, Run
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.openai_transport import OpenAiTransport
from trtpd.perf.records import Record
from trtpd.perf.transport import Ending, Question, Transport
from trtpd.perf.triton_transport import TritonTransport, ending_of_error

SCRIPT = fixed(0.02, 0.01, 5)


def drive(transport: Transport, requests: int = 30) -> Run:
    return asyncio.run(Client(make(Wanted(name="chat", requests=requests, rate=100.0)), transport).run())


def one(transport: Transport, *, leave_after_s: float | None = None) -> Ending:
    async def run() -> Ending:
        await transport.open()
        try:
            question = Question(prompt=" hello", kv_tokens=9, max_tokens=5, timeout_s=5.0, ttft_s=1.0)
            async with asyncio.timeout(leave_after_s):
                return await transport.send(transport.prepare(question), lambda tokens: None)
        finally:
            await transport.close()

    return asyncio.run(run())


def tokens_came_after_they_were_sent(run: Run, server: FakeServer) -> None:
    assert sum(len(sent) for sent in server.sent_s.values()) == sum(record.output_tokens for record in run.records)
    for record in run.records:
        assert record.state == "finished"
        assert list(record.at_s) == sorted(record.at_s)
        assert record.at_s[0] >= record.sent_s + 0.02
        assert record.at_s[-1] >= record.sent_s + 0.06
        assert (record.output_tokens, record.served_prompt_tokens) == (5, 7)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_kserve_server_is_measured_over_real_grpc(channels):
    with fake_triton(SCRIPT) as server:
        run = drive(TritonTransport(server.address, channels=channels))
        tokens_came_after_they_were_sent(run, server)
    told = run.records[0].server
    assert (told.ttft_s, told.exposed_s, told.prefill, told.decode) == (0.003, 0.0005, "prefill_0", "decode_0")
    inputs = {tensor.name for tensor in server.bodies[0].inputs}
    assert inputs == {"text_input", "max_tokens", "end_id", "stream", "return_num_input_tokens", "deadline_ms"}


def test_an_openai_server_is_measured_over_real_http():
    with fake_openai(SCRIPT) as server:
        run = drive(OpenAiTransport(server.address, extra={"ignore_eos": None, "top_k": 1}))
        tokens_came_after_they_were_sent(run, server)
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["top_k"]) == ("toy", True, 1)
    assert "ignore_eos" not in body


def test_refusals_and_failures_are_told_apart():
    errors = {0: "code=saturated retry_after_s=2 full", 1: "code=transfer_failed gone", 2: "what"}
    with fake_triton(SCRIPT, errors=errors) as server:
        records = drive(TritonTransport(server.address), requests=4).records
    found = sorted((r.state, r.reason, r.message) for r in records)
    assert found == [
        ("failed", "server_error", "what"),
        ("failed", "transfer_failed", "gone"),
        ("finished", "length", ""),
        ("refused", "saturated", "full"),
    ]
    with fake_openai(SCRIPT, statuses={0: 429, 1: 503, 2: 500, 3: 400}) as server:
        records = drive(OpenAiTransport(server.address), requests=4).records
    assert sorted((r.state, r.reason) for r in records) == [
        ("failed", "http_500"),
        ("refused", "http_400"),
        ("refused", "no_instance"),
        ("refused", "saturated"),
    ]


def test_a_stream_that_is_cut_has_failed():
    with fake_openai(SCRIPT, cut=True) as server:
        ending = one(OpenAiTransport(server.address))
    assert (ending.state, ending.reason) == ("failed", "no_end")
    with fake_triton(lambda number, now_s: []) as server:
        ending = one(TritonTransport(server.address))
    assert (ending.state, ending.reason) == ("failed", "no_end")


EVENTS = [
    (b'{"error":"out of memory"}', "server_error", "out of memory"),
    (b'{"error":{"code":"oom","message":"no room"}}', "oom", "no room"),
    (b'{"error":["a"]}', "server_error", "['a']"),
    (b'{"choices":["x"]}', "protocol", "got `str`"),
    (b'{"choices":{"a":1}}', "protocol", "Expected `array"),
    (b'{"choices":[{"delta":"x"}]}', "protocol", "choices[0].delta"),
    (b'{"usage":{"completion_tokens":"12"}}', "protocol", '{"usage":{"completion_tokens":"12"}}'),
    (b'{"usage":{"completion_tokens":-1}}', "protocol", ">= 0"),
    (b'{"usage":{"completion_tokens":99999999999999999999}}', "protocol", "completion_tokens"),
    (b'{"error":' + b"[" * 100_000, "protocol", "nested too deeply"),
    (b"[]", "protocol", "got `array`"),
    (b"out of memory", "protocol", "'out of memory'"),
    (b'"' + b"x" * (3 << 20) + b'"', "protocol", "can't be read"),
]


def one_after_the_other(transport: Transport, requests: int) -> tuple[Record, ...]:
    return asyncio.run(Client(make(Wanted(name="chat", requests=requests, concurrency=1)), transport).run()).records


def test_an_event_that_cannot_be_read_fails_its_own_request_and_no_other():
    events = {2 * number + 1: event for number, (event, _, _) in enumerate(EVENTS)}
    with fake_openai(fixed(0.0, 0.001, 2), events=events) as server:
        records = one_after_the_other(OpenAiTransport(server.address), 2 * len(EVENTS) + 1)
    assert {record.state for record in records[0::2]} == {"finished"}
    for record, (event, reason, message) in zip(records[1::2], EVENTS, strict=True):
        assert (record.state, record.reason) == ("failed", reason), event[:80]
        assert message in record.message


def _with_output(name: str, kind: str, raw: bytes, shape: list[int]) -> Any:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name=name, datatype=kind, shape=shape)
    response.infer_response.raw_output_contents.append(raw)
    return response


def test_a_response_that_cannot_be_read_fails_its_own_request_and_no_other():
    wrong = [
        (_with_output("finish_reason", "BYTES", b"\1\0\0\0\xff", [1]), "finish_reason is no UTF-8"),
        (_with_output("output_ids", "INT32", b"", [-5]), "output_ids has the shape [-5]"),
        (_with_output("output_ids", "INT32", b"", [1 << 40, 1 << 40]), "output_ids has the shape"),
    ]
    lasts = {2 * number + 1: response for number, (response, _) in enumerate(wrong)}
    with fake_triton(fixed(0.0, 0.001, 2), lasts=lasts) as server:
        records = one_after_the_other(TritonTransport(server.address), 7)
    assert {record.state for record in records[0::2]} == {"finished"}
    for record, (_, message) in zip(records[1::2], wrong, strict=True):
        assert (record.state, record.reason) == ("failed", "protocol")
        assert message in record.message


def test_leaving_cancels_the_request_at_the_server():
    with fake_triton(fixed(0.01, 30.0, 2)) as server, pytest.raises(TimeoutError):
        one(TritonTransport(server.address), leave_after_s=0.2)
    assert server.cancelled == 1


def test_a_server_that_is_not_there_or_serves_something_else_is_named():
    with fake_triton(SCRIPT) as server:
        with pytest.raises(InputError, match="no model 'absent'; --model takes decode_0, pd"):
            one(TritonTransport(server.address, model="absent"))
        gone = server.address
    with pytest.raises(ServeError, match="no OpenAI server"):
        one(OpenAiTransport(f"http://{gone}"))
    with pytest.raises(InputError, match="write http://"):
        OpenAiTransport(gone)


@pytest.mark.parametrize(
    ("model", "names"),
    [("prefill_0", {"text_input"}), ("decode_1", {"kv_tokens", "max_tokens"})],
)
def test_a_stage_is_asked_for_its_stage(model, names):
    from tritonclient.grpc import service_pb2

    question = Question(prompt=" hello", kv_tokens=9, max_tokens=5, timeout_s=5.0)
    raw = TritonTransport("127.0.0.1:1", model=model).prepare(question)
    request = service_pb2.ModelInferRequest.FromString(raw)
    assert {tensor.name for tensor in request.inputs} == names
    assert all(list(tensor.shape) == [1, 1] for tensor in request.inputs)


def test_a_stages_answer_has_ended_with_its_timeline():
    with fake_triton(SCRIPT) as server:
        ending = one(TritonTransport(server.address, model="decode_0"))
    assert (ending.state, ending.output_tokens, ending.server) == ("finished", 5, None)


def test_an_error_without_a_code_is_a_failure_of_the_server():
    assert ending_of_error("boom").state == "failed"
    assert ending_of_error("code=no_instance none").state == "refused"
    assert json.dumps(ending_of_error("code=internal x\ny").message) == '"x\\ny"'


def test_the_stream_of_an_error_is_read_to_its_end_and_not_cancelled():
    with fake_triton(SCRIPT, errors={0: "code=saturated retry_after_s=1.0 full"}) as server:
        assert one(TritonTransport(server.address)).state == "refused"
        assert server.cancelled == 0
