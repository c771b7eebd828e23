"""Whether the text side of a folder (tokenizer, its configuration, chat template) can be used, found out before
anything is built on it."""

from __future__ import annotations

from pathlib import Path

from trtpd.build.chat_template import chat_template, tokenizer_config
from trtpd.errors import CheckpointError

TOKENIZER = "tokenizer.json"


def tokenizer_fault(folder: Path) -> str | None:
    """Why the text side of `folder` can't be used, in one line; None if it can."""
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    if not path.is_file():
        return f"{folder}: {TOKENIZER} is missing"
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 the library raises no narrower type
        return f"{path}: not a whole tokenizer ({' '.join(str(error).split())})"
    try:
        chat_template(tokenizer_config(folder), folder)
    except CheckpointError as error:
        return " ".join(str(error).split())
    return None


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError, in one line with the mend, for a model's tokenizer that can't be used."""
    if fault := tokenizer_fault(folder):
        raise CheckpointError(f"{fault}; download it with the model")
