from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trtpd.runtime.serve.detokenize import StopMatcher, TextStream, WindowDetokenizer
from trtpd.runtime.serve.text import TextLayer

CORPUS = [
    "the quick brown fox, the lazy dog; 你好世界 你好 🙂🙃👩‍👩‍👧 naïve café",
    "def f(x):\n    return x + 1\n",
] * 8


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["tøken 文"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for word in ("▁the", "▁dog", "▁", "s", "你", "好", "a", "b"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level().save(str(directory / "tokenizer.json"))
    return TextLayer(directory)


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(text=st.text(max_size=60))
def test_streamed_pieces_make_the_whole_text(layer, text):
    ids = list(layer.encode(text))
    assert "".join(streamed(layer.stream(()), ids)) == layer.decode(ids)


@given(data=st.data())
def test_any_ids_stream_to_what_decoding_them_at_once_gives(layer, data):
    ids = data.draw(st.lists(st.integers(0, layer.vocab_size - 1), max_size=40))
    assert "".join(streamed(layer.stream(()), ids)) == layer.decode(ids)


@pytest.mark.parametrize("text", ["🙂🙃 family 👩‍👩‍👧!", "你好，世界。", "naïve café\n\tdef f(x): return x"])
def test_no_piece_holds_half_a_character(layer, text):
    ids = list(layer.encode(text))
    assert all("\ufffd" not in piece for piece in streamed(layer.stream(()), ids))


def test_ids_beyond_the_vocabulary_give_no_text(layer):
    assert "".join(streamed(layer.stream(()), [layer.vocab_size, layer.vocab_size + 7])) == ""


def test_special_tokens_are_not_printed(layer):
    ids = [*layer.encode("fox"), *layer.encode("<|im_end|>")]
    assert "".join(streamed(layer.stream(()), ids)) == "fox"


@given(words=st.lists(st.sampled_from(["the", " dog", "你", "好", "🙂", "ø", "ab", " "]), max_size=12))
def test_a_vocabulary_with_byte_fallback_streams_whole_characters(words):
    tokenizer = byte_fallback()
    ids: list[int] = []
    for word in words:
        token = tokenizer.token_to_id("▁" + word.strip() if word in ("the", " dog") else word)
        ids += [token] if token is not None else [b + 1 for b in word.encode()]
    window = WindowDetokenizer(lambda part: tokenizer.decode(list(part), skip_special_tokens=True))
    pieces = [window.push(i) for i in ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + window.finish() == tokenizer.decode(ids)


def test_broken_bytes_are_not_held_for_ever():
    tokenizer = byte_fallback()
    window = WindowDetokenizer(lambda part: tokenizer.decode(list(part)))
    assert any(window.push(0x80 + 1) for _ in range(40))


def reference_cut(text: str, stops: list[str]) -> str:
    for end in range(1, len(text) + 1):
        hits = [end - len(s) for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: min(hits)]
    return text


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_the_cut_does_not_depend_on_how_the_text_arrives(text, stops, data):
    matcher = StopMatcher(stops)
    out, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += matcher.push(rest[:size])
        rest = rest[size:]
    assert out + matcher.finish() == reference_cut(text, stops)


def test_a_stop_string_across_tokens_is_cut_and_its_last_token_known(layer):
    stream = layer.stream(["lazy d"])
    ids = list(layer.encode("the lazy dog"))
    out, stopped_at = "", None
    for index, token in enumerate(ids):
        out += stream.push(token)
        if stream.stopped and stopped_at is None:
            stopped_at = index
    assert out == "the "
    assert stopped_at is not None
    assert "lazy d" in layer.decode(ids[: stopped_at + 1])
    assert "lazy d" not in layer.decode(ids[:stopped_at])


def test_text_held_for_a_stop_string_that_never_comes_is_given_at_the_end(layer):
    stream = layer.stream(["fox, the end"])
    pieces = streamed(stream, list(layer.encode("brown fox, the")))
    assert "".join(pieces) == "brown fox, the"
    assert pieces[-1].endswith("fox, the")
