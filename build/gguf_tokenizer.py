"""The tokenizer inside a GGUF file, as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from trtpd.build.gguf_model import GgufFile
from trtpd.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(kind: str, where: Path) -> Any:
    """Byte-level BPE differs between models in how text is cut before merging; GGUF names the way."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in ("gpt-2", "gpt2"):
        return byte_level
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise CheckpointError(
        f"{where}: tokenizer.ggml.pre is {kind!r}; smollm, gpt-2 and llama-bpe can be rebuilt: "
        "use the model's Hugging Face folder instead"
    )


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file. Raises CheckpointError for another kind of tokenizer."""
    kind = gguf.field("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r}; only byte-level BPE (gpt2) can be rebuilt: "
            "use the model's Hugging Face folder instead"
        )
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.field("tokenizer.ggml.merges")]
    pre = gguf.field("tokenizer.ggml.pre", "gpt-2")
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=pre == "llama-bpe",
            )
        )
    except Exception as error:  # the library raises no narrower type
        raise CheckpointError(f"{gguf.path}: its tokenizer is contradictory ({error})") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, gguf.path)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(gguf, pre, tokens)
    types: list[int] = gguf.field("tokenizer.ggml.token_type", [1] * len(tokens))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, of_type in zip(tokens, types, strict=True)
            if of_type == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, of_type in zip(tokens, types, strict=True)
            if of_type == _USER_DEFINED
        ]
    )
    return tokenizer


def _adds_bos(gguf: GgufFile, pre: str) -> bool:
    return bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"))


def _post_processor(gguf: GgufFile, pre: str, tokens: list[str]) -> Any:
    byte_level = processors.ByteLevel(trim_offsets=True)
    bos_id = gguf.metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not _adds_bos(gguf, pre):
        return byte_level
    bos = tokens[int(bos_id)]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, int(bos_id))]
    )
    return processors.Sequence([byte_level, template])


def special_ids(gguf: GgufFile) -> dict[str, int]:
    """bos, eos, pad and unk ids, as far as the file gives them."""
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    found = {ours: gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {name: int(token_id) for name, token_id in found.items() if token_id is not None}


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `folder`."""
    tokenizer = build_tokenizer(gguf)
    tokens = gguf.field("tokenizer.ggml.tokens")
    ids = special_ids(gguf)
    pre = gguf.field("tokenizer.ggml.pre", "gpt-2")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": _adds_bos(gguf, pre),
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.architecture.max_position_embeddings,
    }
    config |= {f"{name}_token": tokens[token_id] for name, token_id in ids.items()}
    if template := gguf.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    generation = {f"{name}_token_id": token_id for name, token_id in ids.items() if name != "unk"}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
