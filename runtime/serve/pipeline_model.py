"""What the shim of the model `pd` calls: clients' requests in, the router behind, readiness that means something."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from msgspec import structs

from trtpd.build.manifest import Manifest, is_elastic, read_engine_config, read_manifest, settings_as
from trtpd.errors import NoInstanceError, ServeError, TrtpdError
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.core.score import Weights
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.prefix import BlockHasher
from trtpd.runtime.engine.sampling import mix
from trtpd.runtime.serve import rundir
from trtpd.runtime.serve.answer import failure_of
from trtpd.runtime.serve.driver import Driver
from trtpd.runtime.serve.emitter import End
from trtpd.runtime.serve.measured_costs import MeasuredCosts
from trtpd.runtime.serve.metrics import Metrics, TritonMetrics
from trtpd.runtime.serve.orders import Prepared
from trtpd.runtime.serve.request import Asked, ModelLimits, parse, query_of, tokenise
from trtpd.runtime.serve.sampling_inputs import with_words
from trtpd.runtime.serve.sinks import Answers, CollectSink, Responder, TritonSink, Wanted
from trtpd.runtime.serve.stage_model import build_of
from trtpd.runtime.serve.text import TextLayer
from trtpd.runtime.worker.garbage import set_aside
from trtpd.runtime.worker.link import RouterLink
from trtpd.runtime.worker.session import fresh_id

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 60.0
PROBE_TOKENS = 3
DRAIN_LOOK_S = 0.2
TOKENISERS = 2
ROUTER_FAILED_EXIT = 70


class PipelineModel:
    """The model `pd`. `pb_utils` is Any: it exists only inside a Triton stub."""

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        """Returns once a request has crossed the instances. Raises TrtpdError if none can."""
        self._pb = pb_utils
        build = build_of(args)
        self._run_dir = Path(os.environ["TRTPD_RUN_DIR"])
        rundir.note_stub(self._run_dir, args["model_name"])
        self._manifest = read_manifest(build)
        self._text = TextLayer(build / "tokenizer")
        self._limits = limits_of(build, self._manifest, self._text)
        self._sharing = Sharing.of(self._manifest)
        self._metrics = Metrics(TritonMetrics(pb_utils), self._manifest.model)
        self._costs = MeasuredCosts.of_build(build, self._manifest)
        for remark in self._costs.status["remarks"]:
            log.warning("%s", remark)
        self._driver = Driver(
            RouterCore(
                policy_of(self._manifest),
                seed=secrets.randbits(32),
                step_times=self._costs.step_times,
                fingerprint=self._costs.fingerprint,
                near_bytes_per_s=self._costs.near_bytes_per_s,
            ),
            _link_maker(),
            self._text,
            self._metrics,
            on_fatal=_exit_for_restart,
            interval_tokens=_settings(self._manifest).streaming.interval_tokens,
        )
        self._tokenisers = ThreadPoolExecutor(TOKENISERS, thread_name_prefix="tokenise")
        self._closing = threading.Event()
        self._driver.start()
        try:
            self._await_instances()
            with self._driver.uncounted():
                probe(self._driver, self._manifest, self._limits)
        except TrtpdError:
            self._driver.stop()
            raise
        set_aside()
        threading.Thread(target=self._watch_drain, name="drain", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Answers each through its response sender, now or later; never blocks on an instance."""
        for request in requests:
            self._tokenisers.submit(self._take, request)

    def finalize(self) -> None:
        """Triton calls this when the last stream has ended."""
        self._closing.set()
        self._tokenisers.shutdown(wait=True)
        self._driver.stop()

    def _take(self, request: Any) -> None:
        try:
            self._admit(request)
        except TrtpdError as error:
            self._refuse(request, error.code, str(error))
        except Exception as error:  # whatever it was, the client must get its last response
            log.exception("a request could not be taken")
            self._refuse(request, "internal", repr(error))

    def _admit(self, request: Any) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if query_of(tensors) is not None:
            self._driver.reply(TritonSink(self._pb, request), End(), text=self._status())
            return
        parameters = json.loads(request.parameters() or "{}")
        asked = parse(tensors, parameters, self._limits, drawn_seed=secrets.randbits(63))
        prepared = prepare(asked, self._text, self._limits, self._sharing)
        wanted = Wanted(
            log_probs=asked.sampling.log_probs,
            top_log_probs=asked.sampling.top_log_probs,
            input_tokens=asked.count_input,
            output_tokens=asked.count_output,
        )
        if asked.answers == 1:
            self._driver.submit(prepared, TritonSink(self._pb, request, wanted), stream=asked.stream)
            return
        answers = Answers(Responder(self._pb, request, wanted), asked.answers, stream=asked.stream)
        self._driver.submit_all(variants(prepared, asked.answers), answers.sinks, stream=asked.stream)

    def _refuse(self, request: Any, code: str, message: str) -> None:
        self._metrics.count("trtpd_requests_total", state="refused", reason=code)
        self._driver.reply(TritonSink(self._pb, request), End(failure=failure_of(code, message)))

    def _status(self) -> str:
        about = {
            "model": self._manifest.model,
            "fingerprint": self._manifest.pair_fingerprint,
            "trtpd": self._manifest.trtpd,
            "max_seq_tokens": self._limits.max_seq_tokens,
            "slo": {"ttft_ms": _ms(self._limits.ttft_s), "tpot_ms": _ms(self._limits.tpot_s)},
            "profile": self._costs.status,
        }
        return json.dumps(about | self._driver.status())

    def _await_instances(self) -> None:
        """All that are expected, or after a while those that suffice. Raises NoInstanceError."""
        expected = [name for name in os.environ.get("TRTPD_EXPECT", "").split(",") if name]
        if not expected:
            expected = [name for role in self._manifest.roles.values() for name in role.instances]
        there = self._driver.wait_for(expected, REGISTER_TIMEOUT_S)
        roles = {hello.role for hello in there.values()}
        missing = ", ".join(name for name in expected if name not in there)
        if "mixed" not in roles and not {"prefill", "decode"} <= roles:
            raise NoInstanceError(
                f"within {REGISTER_TIMEOUT_S:g} s no prefill and decode (or mixed) instance has registered at "
                f"{os.environ['TRTPD_ROUTER']}; missing: {missing}"
            )
        if missing:
            log.warning("serving without %s for now", missing)

    def _watch_drain(self) -> None:
        """Passes the launcher's word on to the driver."""
        while not self._closing.wait(DRAIN_LOOK_S):
            until_s = rundir.drain_until_s(self._run_dir)
            if until_s is not None:
                self._driver.drain(until_s)
                return


class _Scheduler(msgspec.Struct, frozen=True):
    """What follows `max_queue` is absent in builds made before it was known."""

    deadline_s: float
    max_queue: int
    refuse_late: bool = True
    local_prompt_tokens: int = 0
    short_prompt_tokens: int = 256
    held_kv: float = 0.5
    tenants: dict[str, float] = {}
    weights: dict[str, float] = {}


class _KV(msgspec.Struct, frozen=True):
    prefix_cache: str = "none"


class _Slo(msgspec.Struct, frozen=True):
    """A target that the pipeline file leaves open is left out of the manifest."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class _Streaming(msgspec.Struct, frozen=True):
    interval_tokens: int = 1


class _Settings(msgspec.Struct, frozen=True):
    """What a manifest's settings say of the router; what else they say is for others."""

    scheduler: _Scheduler
    slo: _Slo
    kv: _KV = _KV()
    streaming: _Streaming = _Streaming()


def _settings(manifest: Manifest) -> _Settings:
    return settings_as(manifest.settings, _Settings)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which requests share KV of prompts that begin alike: `kv.prefix_cache` of the pipeline file."""

    prefix_cache: str
    hasher: BlockHasher

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        layout = next(iter(manifest.roles.values())).layout
        return cls(
            prefix_cache=_settings(manifest).kv.prefix_cache,
            hasher=BlockHasher(manifest.pair_fingerprint, layout.tokens_per_block),
        )

    def shares(self, answers: int) -> bool:
        """Whether a request with so many answers does."""
        return self.prefix_cache == "all" or (self.prefix_cache == "answers" and answers > 1)


def policy_of(manifest: Manifest) -> Policy:
    """The router's constants as the pipeline file sets them."""
    scheduler = _settings(manifest).scheduler
    return Policy(
        queue_limit=scheduler.max_queue,
        refuse_late=scheduler.refuse_late,
        local_tokens=scheduler.local_prompt_tokens,
        short_tokens=scheduler.short_prompt_tokens,
        held_watermark=scheduler.held_kv,
        tenant_weights=scheduler.tenants,
        elastic=is_elastic(manifest),
        weights=Weights(**scheduler.weights),
    )


def limits_of(build: Path, manifest: Manifest, text: TextLayer) -> ModelLimits:
    """What every role of the build can take."""
    configs = [read_engine_config(build / role.directory) for role in manifest.roles.values()]
    settings = _settings(manifest)
    ttft_ms, tpot_ms = settings.slo.ttft_ms, settings.slo.tpot_ms
    return ModelLimits(
        max_seq_tokens=min(config.max_seq_tokens for config in configs),
        vocab_size=min(configs[0].architecture.vocab_size, max(text.vocab_size, 1)),
        end_ids=configs[0].end_ids,
        deadline_s=settings.scheduler.deadline_s,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
    )


def prepare(asked: Asked, text: TextLayer, limits: ModelLimits, sharing: Sharing) -> Prepared:
    """Tokenises. Raises RequestError for a prompt that is empty or too long."""
    prompt_ids = tokenise(asked, text, limits)
    reuse = sharing.shares(asked.answers)
    return Prepared(
        prompt_ids=prompt_ids,
        max_tokens=asked.max_tokens,
        sampling=with_words(asked.sampling, asked.words, text, vocab_size=limits.vocab_size),
        block_hashes=sharing.hasher.summary(prompt_ids) if reuse else (),
        reuse=reuse,
        deadline_s=asked.deadline_s,
        stops=asked.stops,
        echo=asked.echo,
        ttft_s=asked.ttft_s,
        tpot_s=asked.tpot_s,
        priority=asked.priority,
        tenant=asked.tenant,
    )


def variants(prepared: Prepared, answers: int) -> list[Prepared]:
    """The same request as often as answers are wanted, each with a seed of its own: the first with the given one."""
    sampling = prepared.sampling
    others = mix(np.arange(1, answers, dtype=np.uint64) + np.uint64(sampling.seed & (2**64 - 1))).tolist()
    return [replace(prepared, sampling=structs.replace(sampling, seed=seed)) for seed in (sampling.seed, *others)]


def probe(driver: Driver, manifest: Manifest, limits: ModelLimits) -> None:
    """One request through the instances: prefill, transfer, decode. Raises ServeError if it doesn't come back."""
    layout = next(iter(manifest.roles.values())).layout
    length = min(layout.tokens_per_block + 1, limits.max_seq_tokens - PROBE_TOKENS)
    sink = CollectSink()
    began_s = time.monotonic()
    prepared = Prepared(
        prompt_ids=tuple(1 + i % (limits.vocab_size - 1) for i in range(length)),
        max_tokens=PROBE_TOKENS,
        sampling=Sampling(),
        deadline_s=PROBE_TIMEOUT_S,
    )
    driver.submit(prepared, sink, stream=False)
    outcome = sink.wait(PROBE_TIMEOUT_S + 5.0)
    if outcome is None:
        raise ServeError(f"the probe request did not come back within {PROBE_TIMEOUT_S:g} s")
    if outcome.end.failure is not None:
        raise ServeError(f"the probe request failed: {outcome.end.failure.message}")
    if len(outcome.ids) != PROBE_TOKENS:
        raise ServeError(f"the probe request gave {len(outcome.ids)} tokens of {PROBE_TOKENS}")
    log.info("probe crossed in %.0f ms: %s", (time.monotonic() - began_s) * 1e3, outcome.end.timeline)


def _link_maker() -> Any:
    keys = os.environ.get("TRTPD_KEYS")
    epoch = fresh_id(time.time_ns(), secrets.token_hex(4))

    def make(wake: Any) -> RouterLink:
        return RouterLink(os.environ["TRTPD_ROUTER"], epoch=epoch, wake=wake, keys=Path(keys) if keys else None)

    return make


def _exit_for_restart(error: BaseException) -> None:
    """The launcher sees the stub gone and loads the model again, with a fresh router."""
    print(f"pd: the router failed ({error!r}); ending this stub", file=sys.stderr, flush=True)
    os._exit(ROUTER_FAILED_EXIT)
