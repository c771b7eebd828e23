"""Prompts of a wanted length: text of which every word is one token.

Words are frequent English ones, each with the space before it a single token of the byte-pair vocabularies in use.
What a tokenizer makes of them is not taken on trust: servers report the prompt's true length, and the report shows
both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

import msgspec

_TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
us left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year
mother light parts country father let night following picture being study second eyes soon times story boys since
white days ever paper hard near sentence better best across during
"""
WORDS = tuple(_TEXT.split())


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` words drawn from `seed`. Segments of one seed begin alike, so prompts that begin with equal segments
    share a prefix."""

    seed: int
    tokens: int


def segment_text(segment: Segment) -> str:
    """The same text for the same segment, on every machine and version of Python."""
    return "".join(" " + word for word in random.Random(segment.seed).choices(WORDS, k=segment.tokens))


class Renderer:
    """Turns segments into text and keeps those that come again, up to `keep` of them."""

    def __init__(self, *, keep: int = 4096) -> None:
        self._keep = keep
        self._texts: dict[Segment, str] = {}

    def text(self, segments: Sequence[Segment]) -> str:
        return "".join(self._segment(segment) for segment in segments)

    def _segment(self, segment: Segment) -> str:
        found = self._texts.get(segment)
        if found is None:
            found = segment_text(segment)
            if len(self._texts) < self._keep:
                self._texts[segment] = found
        return found


def digest(prompts: Iterable[Sequence[Segment]]) -> str:
    """Names the bytes of these prompts: what a saved workload is held to when it is replayed."""
    renderer, found = Renderer(), hashlib.sha256()
    for segments in prompts:
        found.update(renderer.text(segments).encode())
        found.update(b"\n")
    return found.hexdigest()
