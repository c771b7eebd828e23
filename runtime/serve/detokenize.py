"""From token ids to text, one token at a time: incremental decoding and stop strings.

For every split of the same ids the concatenated output is the same text; half a character is never given out.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16
"""More tokens than one character can take: past this, what looks incomplete is taken to be broken text."""


class Detokenizer(Protocol):
    """Text of a growing sequence of ids. One per request."""

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete."""

    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""


class ByteLevelDetokenizer:
    """For byte-level vocabularies: every token is a byte string, so decoding is UTF-8 decoding."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window of ids and gives out by how much its text grew.

    The window starts where the text given out before last ended, so that decoders which treat the start of a
    text or its spaces specially see the same left neighbour each time.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0
        """Ids of the window whose text was given out already."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._given]), self._decode(self._ids)
        held = len(self._ids) - self._given
        if (now.endswith(REPLACEMENT) and held <= MAX_HELD_TOKENS) or len(now) <= len(before):
            return ""
        self._ids = self._ids[self._given :]
        self._given = held
        return now[len(before) :]

    def finish(self) -> str:
        before, now = self._decode(self._ids[: self._given]), self._decode(self._ids)
        self._given = len(self._ids)
        return now[len(before) :]


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces, and cuts the text right before it.

    "First" is the match that ends earliest, then the longest: so the result does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to be no part of a stop string. Once `stopped`, always ""."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        ends = [(start + len(s), start) for s in self._stops if (start := buffer.find(s)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return buffer[: min(ends)[1]]
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """What was held back in case it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Where the longest suffix begins that a stop string begins with; the buffer's end if none does."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(buffer) - longest), len(buffer)):
            if any(stop.startswith(buffer[start:]) for stop in self._stops):
                return start
        return len(buffer)


class TextStream:
    """The text of one answer: detokenised, special tokens left out, cut before a stop string. In the text of its first
    `min_tokens` tokens nothing is looked for."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], hidden: frozenset[int], *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._hidden = hidden
        self._free_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, token: int) -> str:
        """Text that became certain with this token. `stopped` turns true if a stop string ended in it."""
        free, self._free_tokens = self._free_tokens > 0, max(0, self._free_tokens - 1)
        if token in self._hidden:
            return ""
        text = self._detokenizer.push(token)
        return text if free else self._stops.push(text)

    def finish(self) -> str:
        """The rest, at the end of the answer. May itself meet a stop string."""
        rest = self._stops.push(self._detokenizer.finish())
        return rest + self._stops.finish()
