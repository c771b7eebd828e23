"""The text side of a build: its tokenizer, its chat template, and the text stream of each answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import Tokenizer

from trtpd.build.chat_template import chat_template, tokenizer_config
from trtpd.build.manifest import rebuild
from trtpd.errors import CheckpointError, EngineError, RequestError
from trtpd.runtime.serve.detokenize import (
    ByteLevelDetokenizer,
    Detokenizer,
    TextStream,
    WindowDetokenizer,
)

MAX_MESSAGES = 4096


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str


class TextLayer:
    """Reads BUILD/tokenizer. Thread-safe: nothing is written after construction.

    Raises EngineError if tokenizer.json is missing or unreadable, or the chat template has a syntax error.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"tokenizer {path} can't be read ({error}); {rebuild(directory.parent)}") from error
        try:
            self._config = tokenizer_config(directory)
            self._template = chat_template(self._config, directory)
        except CheckpointError as error:
            raise EngineError(f"{error}; {rebuild(directory.parent)}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = _is_byte_level(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text than this."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """A raw prompt, with whatever the tokenizer itself puts around it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_word(self, word: str) -> tuple[int, ...]:
        """A piece of text within an answer, nothing put around it."""
        return tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A chat through the model's template, which brings its own special tokens."""
        return tuple(self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The chat as the model reads it, up to where its answer begins. Raises RequestError."""
        if self._template is None:
            raise RequestError("messages: this model has no chat template; send the whole prompt as text_input")
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                bos_token=_token_text(self._config.get("bos_token")),
                eos_token=_token_text(self._config.get("eos_token")),
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """All of it at once, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self, stops: Sequence[str], *, hidden: Sequence[int] = (), min_tokens: int = 0) -> TextStream:
        """For one answer; `hidden` tokens give no text, as special ones don't. `min_tokens` as in TextStream."""
        return TextStream(self._detokenizer(), stops, self.special_ids.union(hidden), min_tokens=min_tokens)

    def _detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode)

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        """Of every token, made at once: filled one by one it would be memory that grows for hours."""
        return [self._made_bytes(token) for token in range(self.vocab_size)]

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes_of
        return known[token] if 0 <= token < len(known) else self._made_bytes(token)

    def _made_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        return b"" if text is None else _byte_level_bytes(text)


def parse_messages(text: str) -> tuple[Message, ...]:
    """The JSON list of {"role", "content"} in the input `messages`. Raises RequestError."""
    try:
        messages = msgspec.json.decode(text, type=tuple[Message, ...])
    except msgspec.MsgspecError as error:
        raise RequestError(
            f'messages: {error}; it must be a JSON list such as [{{"role": "user", "content": "Hello"}}]'
        ) from error
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages: {len(messages)} messages; send 1 to {MAX_MESSAGES}")
    if not messages[-1].content:
        raise RequestError("messages: the last one is empty; send a question of at least one character")
    return messages


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    return bool(json.loads(tokenizer.to_str())["decoder"].get("type") == "ByteLevel")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 bytes as themselves and the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    """An added token may hold characters outside that alphabet: it stands for itself then."""
    table = _byte_of_char()
    values = [table.get(char) for char in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _token_text(entry: Any) -> str:
    """Special tokens are written as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
