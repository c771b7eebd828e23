"""How far weights of a precision are from f32: measured by the build on a fixed text, kept in the manifest.

Both are computed by the same engine, one rank, fed the same tokens; the figures compare its logits at every position.
The computing is handed in: this room knows no engine. Where it can't be done the reason is kept instead.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trtpd.build.accuracy_text import KL_BOUND_NATS as KL_BOUND_NATS  # checks.py takes it from here
from trtpd.build.accuracy_text import PASSAGES
from trtpd.build.backends import backend_of
from trtpd.build.backends.base import Backend, Job, Progress
from trtpd.build.checkpoint import Checkpoint
from trtpd.build.engines import weights_bytes
from trtpd.build.files import digest_of
from trtpd.build.machine import Machine
from trtpd.build.manifest import (
    ENGINE_CONFIG,
    Accuracy,
    EngineConfig,
    Precision,
    PrecisionError,
    RoleProfile,
    write_json,
)
from trtpd.errors import EngineError, TrtpdError

Passages = Sequence[Sequence[int]]
"""Token ids."""

ComputeLogits = Callable[[Path, Passages, Path], None]
"""Loads an engine directory, feeds it the passages, and writes its logits into a file as numpy saves an array: a row
for each token but the last of each passage, in order. Raises EngineError if it can't, or not in time."""

MOST_PASSAGE_TOKENS = 64
_LEAST_TOKENS = 3
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the engines that are compared come from: `roles` are engine directories whose weights are linked if they
    are the right ones, `work` a folder for what is made besides, which the caller removes."""

    work: Path
    roles: Sequence[Path]
    tokenizer: Path


class AccuracyMeter:
    """Measures precisions of one model, each once. `digest` names its weights, `known` is what was found before."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        machine: Machine,
        place: Place,
        compute: ComputeLogits,
        *,
        digest: str,
        progress: Progress,
        known: Mapping[str, Accuracy],
    ) -> None:
        self._config, self._checkpoint, self._machine, self._place = config, checkpoint, machine, place
        self._compute, self._progress, self._digest = compute, progress, digest
        self._found = dict(known)

    def of(self, precision: Precision) -> Accuracy:
        """The figures of a precision against f32, or why there are none."""
        key = accuracy_key(self._config, self._digest, precision)
        found = self._found.get(precision)
        if found is None or found.key != key:
            try:
                found = Accuracy(key=key, figures=self._measured(precision))
            except (TrtpdError, OSError) as error:
                found = Accuracy(key=key, skipped=str(error))
            self._found[precision] = found
        return found

    def engine(self, precision: Precision) -> Path:
        """An engine directory of one rank with such weights. Raises BuildError, CheckpointError, OSError."""
        directory = self._place.work / precision
        if (directory / ENGINE_CONFIG).exists():
            return directory
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        config, backend, digest = self._settings(precision), _backend(self._config), self._digest
        key = backend.key(digest, config)
        source = next((role for role in self._place.roles if backend.found_key(role, config) == key), None)
        if source is not None:
            backend.link(source, config, directory)
        else:
            job = Job(config=config, directory=directory, key=key, digest=digest)
            backend.write(self._checkpoint, [job], work=self._place.work, progress=self._progress)
        write_json(directory / ENGINE_CONFIG, config)
        return directory

    def _measured(self, precision: Precision) -> PrecisionError:
        _backend(self._config)
        needed = weights_bytes("openvino", self._config.architecture, "f32", 1)
        if needed > _MEMORY_SHARE * self._machine.memory_free_bytes:
            raise EngineError(
                f"its f32 weights are {needed >> 20} MiB, and {self._machine.memory_free_bytes >> 20} MiB are free here"
            )
        passages = self._passages()
        exact, found = (self._logits(one, passages) for one in ("f32", precision))
        return compare(exact, found, passages)

    def _logits(self, precision: Precision, passages: Passages) -> npt.NDArray[np.float32]:
        path = self._place.work / f"{precision}.npy"
        if not path.exists():
            self._progress(f"error of {precision} weights", 0, 0)
            self._compute(self.engine(precision), passages, path)
        logits: npt.NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        if logits.shape != (sum(len(one) - 1 for one in passages), self._config.architecture.vocab_size):
            raise EngineError(f"the {precision} engine gave logits of shape {logits.shape}, which do not fit the text")
        return logits

    def _passages(self) -> list[list[int]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._place.tokenizer))
        most = min(MOST_PASSAGE_TOKENS, self._config.max_seq_tokens)
        passages = [tokenizer.encode(text).ids[:most] for text in PASSAGES]
        passages = [ids for ids in passages if len(ids) >= _LEAST_TOKENS]
        vocabulary = self._config.architecture.vocab_size
        if not passages or max(max(ids) for ids in passages) >= vocabulary:
            raise EngineError(f"the tokenizer makes no text of the model's {vocabulary} tokens")
        return passages

    def _settings(self, precision: Precision) -> EngineConfig:
        """An engine that computes all passages side by side."""
        config, count = self._config, len(PASSAGES)
        layout = replace(config.layout, tp=1, dtype="f32" if precision == "f32" else config.layout.dtype)
        profile = RoleProfile(
            max_step_tokens=max(count, layout.tokens_per_block),
            chunk_tokens=layout.tokens_per_block,
            max_batch=count,
            kv_blocks=count * layout.blocks_for(MOST_PASSAGE_TOKENS),
            threads=len(self._machine.cores),
        )
        return msgspec.structs.replace(
            config, tp=1, precision=precision, layout=layout, profile=profile, fingerprint="", pair_fingerprint=""
        )


def accuracy_key(config: EngineConfig, digest: str, precision: Precision) -> str:
    """Names what the figures depend on; `digest` names the model's weights."""
    parts = (config.architecture, config.layout.dtype, config.versions, config.cpu_features)
    return digest_of(digest, precision, PASSAGES, MOST_PASSAGE_TOKENS, *parts)


def compare(exact: npt.NDArray[np.float32], found: npt.NDArray[np.float32], passages: Passages) -> PrecisionError:
    """Figures over all positions; row by row, since a vocabulary is large."""
    following = [token for ids in passages for token in ids[1:]]
    sums = np.zeros(6)
    for wide, narrow, token in zip(exact, found, following, strict=True):
        if not np.isfinite(narrow).all():
            raise EngineError("its logits are not all finite numbers")
        p, q = _log_softmax(wide), _log_softmax(narrow)
        error = (p - p.mean()) - (q - q.mean())
        kl = float((np.exp(p) * (p - q)).sum())
        sums += (kl, abs(p[token] - q[token]), np.square(error).mean(), p.argmax() == q.argmax(), -p[token], -q[token])
    kl, log_prob, square, same, exact_loss, loss = (sums / len(following)).tolist()
    return PrecisionError(
        tokens=len(following),
        kl_nats=max(0.0, kl),
        log_prob_error=log_prob,
        logit_error=square**0.5,
        same_best=same,
        perplexity=float(np.exp(loss)),
        f32_perplexity=float(np.exp(exact_loss)),
    )


def accuracy_words(precision: str, accuracy: Accuracy) -> str:
    """One line for people."""
    figures = accuracy.figures
    if figures is None:
        return f"{precision} against f32: not measured, {accuracy.skipped}"
    return (
        f"{precision} against f32: KL {figures.kl_nats:.4f} nats, logits off by {figures.logit_error:.3f}, same best "
        f"token {figures.same_best:.1%}, perplexity {figures.perplexity:.2f} to {figures.f32_perplexity:.2f} "
        f"({figures.tokens} tokens)"
    )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _backend(config: EngineConfig) -> Backend:
    backend = backend_of("openvino") if config.engine == "openvino" else None
    if backend is None:
        raise EngineError(f"{config.engine} computes nothing while it is built; compare it on its GPU")
    return backend
