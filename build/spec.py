"""PipelineSpec: the YAML file a user writes. Every key has a default or is named when it is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from trtpd.build.engines import EngineName
from trtpd.build.files import expanded
from trtpd.build.gpus import GPUS
from trtpd.build.manifest import Manifest, Precision, RoleName
from trtpd.build.spec_errors import SpecFile, describe, shown
from trtpd.errors import InputError, SpecError, TransferError
from trtpd.kv_transfer.host import network_of
from trtpd.kv_transfer.layout import KVDtype

ROLES: tuple[RoleName, ...] = ("prefill", "decode", "mixed")
NO_PROFILE = "none"


def _auto_is_none(value: Any) -> Any:
    return None if value == "auto" else value


def _number_is_text(value: Any) -> Any:
    """YAML reads `version: 1.2` as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _network(value: str) -> str:
    try:
        network_of(value)
    except TransferError as error:
        raise ValueError(f"is {value[:60]!r}; it must be an IP address, or a network such as 10.0.0.0/8") from error
    return value


Auto = BeforeValidator(_auto_is_none)
"""Marks a field in which the file may say `auto`; inside, auto is None until `resolve` fills it in."""

MOST = 1 << 40
"""Above any count that means something: what is beyond is a slip of the pen."""

Count = Annotated[int, Field(ge=1, le=MOST)]
AutoCount = Annotated[Count | None, Auto]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,6})?")


def _hosts(value: Any) -> Any:
    """Checked here as a whole: of a union the library would tell what is wrong with each of its kinds."""
    if not isinstance(value, str | list) or not value:
        raise ValueError("must be the name of a hostfile, or a list of hosts like [here:2, there:2]")
    for host in value if isinstance(value, list) else ():
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise ValueError(f"has {shown(host)} in it; a host is written NAME or NAME:RANKS")
    return value


Hosts = Annotated[str | list[str], BeforeValidator(_hosts)]
"""A hostfile, or hosts as mpirun's --host takes them: a name or address, and how many ranks it takes."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PoolSpec(_Section):
    """One pool: instances of one role, all alike."""

    instances: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=1, description="how many instances run; 0 (mixed only) builds the engine and starts none"
    )
    tp: Count = Field(default=1, description="tensor-parallel ranks of one instance, started by mpirun if more than 1")
    hosts: Annotated[Hosts | None, Auto] = Field(
        default=None,
        description="hosts the ranks of one instance run on, the first being this one: a hostfile for mpirun (relative "
        "to this file), or a list like [here:2, there:2]; auto: all on this one",
    )
    precision: Annotated[Precision | None, Auto] = Field(
        default=None, description="weights of this role; auto: as `precision` above"
    )
    kv_dtype: Annotated[KVDtype | None, Auto] = Field(
        default=None, description="auto: as kv.dtype; roles that exchange KV must agree"
    )
    cores: Annotated[Annotated[list[Annotated[int, Field(ge=0, le=MOST)]], Field(min_length=1)] | None, Auto] = Field(
        default=None,
        description="CPUs of this pool, e.g. [0, 1], shared out among its instances; auto: an even split",
    )
    threads: AutoCount = Field(default=None, description="compute threads of one instance; auto: its cores")
    max_batch: AutoCount = Field(default=None, description="sequences that run at once in one instance")
    max_step_tokens: AutoCount = Field(default=None, description="tokens one step may compute, over all sequences")
    chunk_tokens: AutoCount = Field(default=None, description="tokens of one prompt computed in one step")
    kv_tokens: AutoCount = Field(default=None, description="tokens the KV pool of one instance holds; auto: by memory")
    widen_weights: Annotated[bool | None, Auto] = Field(
        default=None,
        description="openvino: turn bf16, f16 and int8 weights into f32 at load, the same values: prefills faster, "
        "takes f32's memory twice, decodes slower; auto: no, or what --tune measures",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="tensorrt_llm: flags of trtllm-build (from 1.3 on: LLM arguments) in place of ours",
    )


class PoolsSpec(_Section):
    """The pools. Either prefill and decode, or mixed, or all three."""

    prefill: PoolSpec | None = Field(default=None, description="reads prompts")
    decode: PoolSpec | None = Field(default=None, description="writes answers from KV that prefill made")
    mixed: PoolSpec | None = Field(default=None, description="does both; stands in when the others can't")
    elastic: bool = Field(
        default=False,
        description="whether the router may have an instance load the other role's engine when the load turns: it "
        "drains, and comes back in the other pool under its name",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.prefill is None) != (self.decode is None):
            absent = "prefill" if self.prefill is None else "decode"
            raise ValueError(f"{absent} is missing; a pipeline has prefill and decode, or mixed, or all three")
        if self.prefill is None and self.mixed is None:
            raise ValueError("is empty; give prefill and decode, or mixed")
        for role in ("prefill", "decode"):
            pool = getattr(self, role)
            if pool is not None and pool.instances == 0:
                raise ValueError(f"{role}.instances is 0; only mixed may have none")
        if self.prefill is None and self.mixed is not None and self.mixed.instances == 0:
            raise ValueError("mixed.instances is 0 and there is no other pool; it must be at least 1")
        return self

    def given(self) -> dict[RoleName, PoolSpec]:
        """The pools the file names, in the order of ROLES."""
        pools: dict[RoleName, PoolSpec | None] = {
            "prefill": self.prefill, "decode": self.decode, "mixed": self.mixed
        }  # fmt: skip
        return {role: pool for role, pool in pools.items() if pool is not None}


class KVSpec(_Section):
    """The KV cache, alike in all roles."""

    dtype: Annotated[KVDtype | None, Auto] = Field(
        default=None,
        description="f32, bf16, f16, fp8; auto: as wide as the engine computes here",
    )
    tokens_per_block: AutoCount = Field(default=None, description="tokens in one KV block; auto: what the engine does")
    max_seq_tokens: AutoCount = Field(
        default=None,
        description="longest prompt and answer together; auto: the model's, as far as the KV pool holds it",
    )
    growth_kept: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.5,
        description="share of what a running sequence may still grow by that is kept free for it; below 1 one may be "
        "preempted (its KV computed anew), at 1 none is and fewer run at once",
    )
    prefix_cache: Annotated[Literal["all", "answers", "none"] | None, Auto] = Field(
        default=None,
        description="all: prompts that begin alike share KV; answers: only those of one request; none; auto: all where "
        "that can't change a token (f32), else answers",
    )
    prefix_cache_tokens: AutoCount = Field(
        default=None, description="tokens whose KV is kept for later prompts; auto: what the KV pool has free"
    )


class TransferSpec(_Section):
    """How KV moves from prefill to decode."""

    path: Literal["auto", "shm", "nixl", "tcp"] = Field(
        default="auto",
        description="auto: shm on one host, else nixl where it is installed, else tcp; or one of them by name",
    )
    listen: Annotated[str, AfterValidator(_network)] = Field(
        default="127.0.0.1",
        description="where nixl and tcp listen: an address, or a network (10.0.0.0/8) each host has one in",
    )
    digests: bool = Field(default=True, description="verify blocks after their copy")
    digest_every: Count = Field(default=1, description="with digests: one block in so many is verified; 1 verifies all")
    convert_dtype: bool = Field(
        default=False, description="let f32 and bf16 pools (pools.*.kv_dtype) pair; KV is converted on its way"
    )
    lease_s: Positive = Field(default=10.0, description="how long prefill keeps KV for a decode that doesn't renew")
    one_piece_tokens: Annotated[int, Field(ge=0, le=MOST)] = Field(
        default=128, description="shorter prompts move in one piece after their seal"
    )


class SloSpec(_Section):
    """Targets a request is judged by unless it brings its own."""

    ttft_ms: Annotated[Positive | None, Auto] = Field(default=None, description="time to first token; auto: no target")
    tpot_ms: Annotated[Positive | None, Auto] = Field(
        default=None, description="time per further token; auto: no target"
    )


class WeightsSpec(_Section):
    """What placement weighs, each in seconds of regret: a request goes where the sum is least."""

    ttft_s: Cost = Field(default=1.0, description="per second of predicted time to the first token")
    tpot_s: Cost = Field(default=0.5, description="for a step as long as the TPOT target, by the square of the ratio")
    kv_s: Cost = Field(default=0.5, description="for a KV pool that will be full, by the square of the part")
    batch_s: Cost = Field(default=0.1, description="for a batch that is promised in full, by the part")
    transfer_s: Cost = Field(default=1.0, description="per second of the hand-off that the client waits for")
    disturb_s: Cost = Field(default=0.5, description="per second that a local prefill makes decoding sequences wait")
    fallback_s: Cost = Field(default=0.5, description="for an instance that does the other role's work")
    prefix_s: Cost = Field(default=0.25, description="per second of prefill that cached blocks save the pool")


class SchedulerSpec(_Section):
    """Router."""

    deadline_s: Positive = Field(default=120.0, description="a request that takes longer ends with an error")
    max_queue: Count = Field(default=256, description="requests that may wait; further ones are refused")
    refuse_late: bool = Field(
        default=True, description="refuse a request at once if load would make it miss its targets"
    )
    local_prompt_tokens: Annotated[int, Field(ge=0, le=MOST)] = Field(
        default=0,
        description="prompts up to this size may stay on decode if moving costs more than it saves; 0: under load only",
    )
    short_prompt_tokens: Annotated[int, Field(ge=0, le=MOST)] = Field(
        default=256,
        description="prompts up to this size don't wait for longer ones, and are prefilled on decode under load",
    )
    held_kv: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5, description="part of a prefill KV pool that offers without a decode place may hold"
    )
    tenants: dict[str, Positive] = Field(
        default_factory=dict, description="shares of the tenants that requests name, e.g. {gold: 3}; others have 1"
    )
    profile: Annotated[Annotated[str, Field(min_length=1)] | None, Auto] = Field(
        default=None,
        description="what `trtpd profile` measured, to predict by: a file, relative to this one; auto: profile.json in "
        "the build, if it is there; none: learned while serving",
    )
    weights: WeightsSpec = Field(default_factory=lambda: WeightsSpec(), description="what placement weighs, in seconds")


class StreamingSpec(_Section):
    """How answers go out."""

    interval_tokens: Count = Field(
        default=1, description="tokens of a response, the first and last aside; more of them cost the router less"
    )


class EmulatedSpec(_Section):
    """Cost model of `engine: emulated`: what a step takes is the sum of these."""

    prefill_tokens_per_s: Positive = Field(default=8000.0, description="prompt tokens computed in a second")
    step_ms: Cost = Field(default=2.0, description="added by any step")
    decode_step_ms: Cost = Field(default=8.0, description="added by a step that decodes")
    decode_sequence_ms: Cost = Field(default=0.05, description="added by each decoding sequence")
    decode_kv_token_us: Cost = Field(default=0.01, description="added by each token of their KV")


class TensorRTSpec(_Section):
    """What only `engine: tensorrt_llm` needs to know."""

    version: Annotated[str | None, Auto, BeforeValidator(_number_is_text)] = Field(
        default=None, description="release to build for, e.g. 1.2; auto: the installed one, else 1.2"
    )
    gpu: Annotated[str | None, Auto] = Field(
        default=None, description=f"{', '.join(GPUS)}; auto: the one here, else h100"
    )
    transceiver: Literal["UCX", "NIXL", "MOONCAKE", "MPI", "DEFAULT"] = Field(
        default="UCX", description="what moves KV between engines: UCX or NIXL (see docs/tensorrt-llm.md)"
    )
    max_prompt_tokens: AutoCount = Field(
        default=None, description="longest prompt; auto: as long as its transfer buffers are small beside the KV cache"
    )
    max_tokens_in_buffer: AutoCount = Field(
        default=None, description="tokens of KV in a transfer buffer; auto: the longest prompt in whole blocks"
    )
    kv_transfer_timeout_ms: AutoCount = Field(
        default=None, description="engine's own limit on a transfer (from 1.2 on); auto: the release's default"
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.9, description="share of the GPU memory left after loading that becomes KV cache"
    )
    prompt_tokens: Count = Field(default=1024, description="a usual prompt: sizes the batch of prefill")
    answer_tokens: Count = Field(default=256, description="a usual answer: with the prompt, sizes the batch of decode")
    speculative_decoding_mode: Annotated[Literal["draft_tokens_external", "lookahead_decoding"] | None, Auto] = Field(
        default=None, description="draft_tokens_external or lookahead_decoding, on decode; auto: none"
    )
    max_draft_len: AutoCount = Field(default=None, description="draft tokens of one step; auto: 0, or 7 with a mode")

    @model_validator(mode="after")
    def _known_gpu(self) -> Self:
        if self.gpu is not None and self.gpu not in GPUS:
            raise ValueError(f"gpu is {self.gpu!r}; it must be one of {', '.join(GPUS)} or auto")
        return self


class PipelineSpec(_Section):
    """A pipeline: one model, its pools and how they work together."""

    model: Annotated[str, Field(min_length=1)] = Field(
        description="Hugging Face folder or .gguf file; relative to this file"
    )
    name: Annotated[Annotated[str, Field(min_length=1)] | None, Auto] = Field(
        default=None, description="what the model is called; auto: the folder's name"
    )
    engine: EngineName = Field(default="openvino", description="openvino, tensorrt_llm or emulated (no model computed)")
    precision: Annotated[Precision | None, Auto] = Field(
        default=None,
        description="weights: f32, bf16, f16, int8, int4 (tensorrt_llm: fp8 and no int4); auto: bf16 if fast, else f32",
    )
    pools: PoolsSpec = Field(description="the pools: prefill and decode, or mixed, or all three")
    kv: KVSpec = Field(default_factory=lambda: KVSpec(), description="the KV cache, alike in all roles")
    transfer: TransferSpec = Field(
        default_factory=lambda: TransferSpec(), description="how KV moves from prefill to decode"
    )
    slo: SloSpec = Field(
        default_factory=lambda: SloSpec(),
        description="targets a request is judged by unless it brings its own",
    )
    scheduler: SchedulerSpec = Field(default_factory=lambda: SchedulerSpec(), description="the router")
    streaming: StreamingSpec = Field(default_factory=lambda: StreamingSpec(), description="how answers go out")
    emulated: EmulatedSpec = Field(
        default_factory=lambda: EmulatedSpec(), description="cost model of `engine: emulated`"
    )
    tensorrt_llm: TensorRTSpec = Field(
        default_factory=lambda: TensorRTSpec(), description="what only `engine: tensorrt_llm` needs to know"
    )


def load_spec(path: Path) -> PipelineSpec:
    """Reads a pipeline file; the files it names come back absolute. Raises SpecError: file, line, key, fault."""
    file = SpecFile(path)
    spec = parse_spec(file.data, file)
    pools: dict[str, PoolSpec] = {
        role: pool.model_copy(update={"hosts": _beside(path, pool.hosts)})
        for role, pool in spec.pools.given().items()
        if isinstance(pool.hosts, str)
    }
    scheduler = spec.scheduler
    if scheduler.profile not in (None, NO_PROFILE):
        scheduler = scheduler.model_copy(update={"profile": _beside(path, str(scheduler.profile))})
    return spec.model_copy(
        update={
            "model": _beside(path, spec.model),
            "pools": spec.pools.model_copy(update=pools),
            "scheduler": scheduler,
        }
    )


def _beside(path: Path, named: str) -> str:
    """The absolute path of what the file at `path` names. Raises SpecError."""
    try:
        return str((path.parent / expanded(named)).resolve())
    except (InputError, OSError, ValueError) as error:
        raise SpecError(f"{path}: {named[:60]!r} can't be a path ({error})") from error


def settings_fault(manifest: Manifest) -> str | None:
    """What is wrong with a build's settings, as somebody may have edited them by hand; None if nothing is."""
    try:
        parse_spec(manifest.settings)
    except SpecError as error:
        return f"its settings: {error}"
    return None


def parse_spec(data: Any, file: SpecFile | None = None) -> PipelineSpec:
    """As load_spec, from plain data."""
    if not isinstance(data, dict):
        raise SpecError(f"{file.path if file else 'pipeline'}: must hold keys like `model:` and `pools:`")
    try:
        return PipelineSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(describe(error, PipelineSpec, file)) from error
