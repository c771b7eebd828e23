"""llama.cpp (the PyPI package xllamacpp) as a side of a comparison.

    python -m trtpd.perf.llama_cpp SETUP      (started by engine_bench)

Its server runs inside this process and is called without HTTP. A prefill is timed from the calls to the last answer
of one token; a decode step from the server's own timing of each slot, all slots starting from a cached context at
once.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from trtpd.errors import EngineError
from trtpd.perf.measured import Cell, answer

DECODE_TOKENS = 24


class LlamaSetup(msgspec.Struct, frozen=True, kw_only=True):
    """`slots` sequences of up to `context_tokens` each; `cores` are the CPUs it keeps to."""

    gguf: str
    vocab_size: int
    threads: int
    slots: int
    context_tokens: int
    cores: tuple[int, ...] = ()
    seed: int = 0


class LlamaCpp:
    """A model loaded in llama.cpp's server. Raises EngineError if xllamacpp isn't installed or can't load it."""

    def __init__(self, setup: LlamaSetup) -> None:
        self._setup = setup
        self._rng = np.random.default_rng(setup.seed)
        self._server = _server(setup)

    def __call__(self, cell: Cell) -> float:
        """See Measure."""
        prompts = [self._rng.integers(0, self._setup.vocab_size, cell.tokens).tolist() for _ in range(cell.batch)]
        if cell.kind == "prefill":
            began_s = time.perf_counter()
            self._complete(prompts, 1)
            return time.perf_counter() - began_s
        self._complete(prompts, 1)
        answers = self._complete(prompts, DECODE_TOKENS)
        rates = [float(each["timings"]["predicted_per_second"]) for each in answers]
        return len(rates) / sum(rates)

    def _complete(self, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
        """One request for each slot, all at once."""
        answers: list[Any] = [None] * len(prompts)

        def ask(slot: int) -> None:
            request = {
                "prompt": prompts[slot],
                "n_predict": tokens,
                "id_slot": slot,
                "cache_prompt": True,
                "ignore_eos": True,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "return_tokens": True,
            }
            try:
                answers[slot] = self._server.handle_completions(request)
            except Exception as error:  # noqa: BLE001  the library raises whatever its server says
                answers[slot] = error

        threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in answers:
            if not isinstance(found, dict) or "timings" not in found:
                raise EngineError(f"llama.cpp did not answer: {found}")
        return answers


def start(gguf: str, *, context_tokens: int, slots: int, threads: int, batch_tokens: int, **more: Any) -> Any:
    """A running xllamacpp.Server with room for `context_tokens` in each of its slots; `more`: further
    parameters. Raises EngineError if it is not installed or can't load the file."""
    try:
        import xllamacpp
    except ImportError as error:
        mend = "pip install '.[bench]' in trtpd's source folder"
        raise EngineError(f"llama.cpp is not here ({error}): {mend}") from error
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = context_tokens * slots
    params.n_parallel = slots
    params.n_batch = batch_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    params.verbosity = 0
    for name, value in more.items():
        setattr(params, name, value)
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise EngineError(f"llama.cpp can't load {gguf} ({error})") from error


def _server(setup: LlamaSetup) -> Any:
    return start(
        setup.gguf,
        context_tokens=setup.context_tokens,
        slots=setup.slots,
        threads=setup.threads,
        batch_tokens=max(2048, setup.context_tokens * setup.slots),
        n_ubatch=512,
        cache_ram_mib=0,
        slot_prompt_similarity=0.0,
    )


def main() -> int:
    setup = msgspec.json.decode(sys.argv[1], type=LlamaSetup)
    return answer(lambda: LlamaCpp(setup), setup.cores)


if __name__ == "__main__":
    raise SystemExit(main())
