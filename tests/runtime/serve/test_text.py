from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from trtpd.errors import EngineError, RequestError
from trtpd.runtime.serve.text import Message, TextLayer, parse_messages

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write(directory, config: dict[str, object] | None):
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_chat_is_rendered_up_to_where_the_answer_begins(tmp_path):
    layer = TextLayer(write(tmp_path, {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}))
    assert layer.render_chat([Message("user", "你好")]) == "<s>user\n你好</s>\n<s>assistant\n"


def test_the_default_of_several_named_templates_is_used(tmp_path):
    named = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "D{{ messages[0].content }}"},
    ]
    layer = TextLayer(write(tmp_path, {"chat_template": named}))
    assert layer.render_chat([Message("user", "q")]) == "Dq"


def test_a_template_that_refuses_is_the_requests_fault(tmp_path):
    layer = TextLayer(write(tmp_path, {"chat_template": TEMPLATE}))
    with pytest.raises(RequestError, match="unknown role wizard"):
        layer.render_chat([Message("wizard", "x")])


def test_a_template_reaches_no_python_internals(tmp_path):
    layer = TextLayer(write(tmp_path, {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}))
    with pytest.raises(RequestError):
        layer.render_chat([Message("user", "x")])


def test_messages_without_a_template_are_refused(tmp_path):
    with pytest.raises(RequestError, match="text_input"):
        TextLayer(write(tmp_path, None)).render_chat([Message("user", "x")])


def test_a_broken_template_or_tokenizer_is_told_at_load(tmp_path):
    write(tmp_path, {"chat_template": "{% for %}"})
    with pytest.raises(EngineError, match="chat template"):
        TextLayer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        TextLayer(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[1]", '[{"role": "user"}]', '[{"role": "u", "content": "c", "x": 1}]', "[[["]
)
def test_malformed_messages_are_refused_by_name(text):
    with pytest.raises(RequestError, match="messages"):
        parse_messages(text)
