"""The tokenizer inside a GGUF file, as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_sentencepiece import sentencepiece_tokenizer
from trtpd.errors import CheckpointError

_Value = TypeVar("_Value", str, int, float)

TEMPLATE_FIELD = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _SPLIT.replace("DIGITS", r"\p{N}{1,3}"), "qwen2": _SPLIT.replace("DIGITS", r"\p{N}")}


def _pre_tokenizer(kind: str, where: Path) -> Any:
    """Byte-level BPE differs between models in how text is cut before merging; GGUF names the way."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("gpt-2", "gpt2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise CheckpointError(
        f"{where}: tokenizer.ggml.pre is {kind!r}; smollm, gpt-2, llama-bpe and qwen2 can be rebuilt: "
        "use the model's Hugging Face folder instead"
    )


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (its kind is "gpt2") or SentencePiece BPE ("llama"). Raises
    CheckpointError for another kind, and for one that contradicts itself."""
    kind = gguf.field("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers:
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.model is {str(kind)[:80]!r}; byte-level BPE (gpt2) and SentencePiece BPE "
            "(llama) can be rebuilt: use the model's Hugging Face folder instead"
        )
    tokens = _listed(gguf, "tokenizer.ggml.tokens", str)
    types = _listed(gguf, "tokenizer.ggml.token_type", int, [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{gguf.path}: its tokenizer has {len(tokens)} tokens and {len(types)} token types")
    try:
        tokenizer = makers[kind](gguf, tokens, types)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"{gguf.path}: its tokenizer is contradictory ({error})") from error
    for of_type, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, types, strict=True) if kind == of_type]
        added = [AddedToken(token, special=special, normalized=False) for token in found]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(gguf: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    halves = (merge.partition(" ") for merge in _listed(gguf, "tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in halves]
    pre = _pre(gguf)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, gguf.path)
    tokenizer.decoder = decoders.ByteLevel()
    bos = _bos(gguf, tokens)
    byte_level = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = byte_level if bos is None else processors.Sequence([byte_level, bos])
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _listed(gguf, "tokenizer.ggml.scores", float)
    unknown = special_ids(gguf).get("unk")
    tokenizer = sentencepiece_tokenizer(
        tokens,
        scores,
        unknown=None if unknown is None else tokens[unknown],
        space_in_front=bool(gguf.field("tokenizer.ggml.add_space_prefix", True)),
        plain=[kind not in (_CONTROL, _USER_DEFINED) for kind in types],
    )
    bos = _bos(gguf, tokens)
    if bos is not None:
        tokenizer.post_processor = bos
    return tokenizer


def _listed(gguf: GgufFile, key: str, of: type[_Value], default: list[_Value] | None = None) -> list[_Value]:
    value = gguf.field(key, default)
    if not isinstance(value, list) or not all(isinstance(entry, of) for entry in value):
        raise CheckpointError(f"{gguf.path}: {key} is no list of {of.__name__}; download it again")
    return value


def _pre(gguf: GgufFile) -> str:
    return str(gguf.field("tokenizer.ggml.pre", "gpt-2"))


def _adds_bos(gguf: GgufFile) -> bool:
    by_default = _pre(gguf) == "llama-bpe" or gguf.field("tokenizer.ggml.model") == "llama"
    return bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", by_default))


def _bos(gguf: GgufFile, tokens: list[str]) -> Any:
    """What puts the first token in front, None if there is none to put."""
    bos_id = special_ids(gguf).get("bos")
    if bos_id is None or not _adds_bos(gguf):
        return None
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )


def special_ids(gguf: GgufFile) -> dict[str, int]:
    """bos, eos, pad and unk ids, as far as the file gives them. Raises CheckpointError for one that is no token."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", ())
    found: dict[str, int] = {}
    for theirs, ours in names.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        token_id = gguf.metadata.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{gguf.path}: {key} is {token_id!r}; it must be one of {len(tokens)} tokens")
        found[ours] = token_id
    return found


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `folder`."""
    tokenizer = build_tokenizer(gguf)
    tokens = gguf.field("tokenizer.ggml.tokens")
    ids = special_ids(gguf)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": _adds_bos(gguf),
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.architecture.max_position_embeddings,
    }
    config |= {f"{name}_token": tokens[token_id] for name, token_id in ids.items()}
    if template := gguf.metadata.get(TEMPLATE_FIELD):
        config["chat_template"] = template
    generation = {f"{name}_token_id": token_id for name, token_id in ids.items() if name != "unk"}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
