"""A SentencePiece BPE vocabulary of a GGUF file (tokens with scores, no merges) as a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "▁"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    unknown: str | None,
    space_in_front: bool,
    plain: Sequence[bool],
) -> Tokenizer:
    """`plain` says which tokens text is merged into: not the control and user-defined ones, which are found before.
    Raises what the library raises for a contradictory vocabulary."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(_merges(tokens, scores, plain)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(map(_BYTE.fullmatch, tokens)),
        )
    )
    spaces = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if space_in_front else spaces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if space_in_front else back)
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float], plain: Sequence[bool]) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two, the token with the best score first: SentencePiece merges in that order."""
    known = {token for token, is_plain in zip(tokens, plain, strict=True) if is_plain}
    order = sorted((index for index, is_plain in enumerate(plain) if is_plain), key=lambda at: -scores[at])
    for index in order:
        token = tokens[index]
        if _BYTE.fullmatch(token):
            continue
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]
