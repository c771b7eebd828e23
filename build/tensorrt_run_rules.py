"""What can't work in how one TensorRT-LLM engine is run: its transceiver, ranks and environment. Pure.

A rule is silent where a descriptor doesn't know. The numbers of public reports stand beside rules that come from
them (NVIDIA/TensorRT-LLM unless named otherwise).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trtpd.build.backends.tensorrt_llm.descriptor import Descriptor
from trtpd.build.backends.tensorrt_llm.release import parse_release
from trtpd.build.findings import Finding, error, warning

_BUFFER_MEND = "leave it at auto, or give whole blocks of at least the longest prompt"
_SWITCHES = (
    "TRTLLM_USE_UCX_KVCACHE", "TRTLLM_USE_NIXL_KVCACHE", "TRTLLM_USE_MOONCAKE_KVCACHE", "TRTLLM_USE_MPI_KVCACHE",
    "TRTLLM_REQUEST_KV_CACHE_CONCURRENT", "TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP",
    "TRTLLM_ENABLE_KVCACHE_RECEIVE_PARALLEL", "TRTLLM_DISAGG_LAYERWISE", "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER",
    "TRTLLM_KVCACHE_POOL_USE_FABRIC_MEMORY", "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL",
)  # fmt: skip
_BROKEN = ("TRTLLM_DISAGG_LAYERWISE", "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER")
_CANCEL = "TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL"
_TIMEOUT_MS = 600_000
_BUFFER_SIZE = "TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE"
_SIZE = re.compile(r"\d+(?:\.\d+)?\s*(?:B|KB|MB|GB|TB)")


def check_run(found: Descriptor) -> Iterator[Finding]:
    """Findings on how one engine is run."""
    for rule in _RULES:
        yield from rule(found)


def _transceiver(d: Descriptor) -> Iterator[Finding]:
    if not d.transceiver_given:
        return
    release = parse_release(d.version) if d.version is not None else None
    upper = (d.transceiver or "").upper()
    if d.transceiver is None:
        yield error(
            "trt_transceiver_unset",
            d.where,
            ("None", "UCX"),
            "has no cache_transceiver_config.backend, which turns the hand-over off: requests die in the forward step",
            "set it to UCX or NIXL",
        )
    elif upper == "DEFAULT":
        yield error(
            "trt_transceiver_default",
            d.where,
            (d.transceiver, "UCX"),
            "leaves the transceiver to the release and to environment variables; releases differ in what that is",
            "set it to UCX or NIXL",
        )
    elif upper == "MPI":
        yield error(
            "trt_transceiver_mpi",
            d.where,
            (d.transceiver, "UCX"),
            "moves KV over MPI, which needs both engines in one MPI world; ours are each in a world of their own",
            "set it to UCX or NIXL",
        )
    elif release is not None and release.known and d.transceiver not in release.transceivers:
        right = release.spelled(d.transceiver)
        literal = right in release.transceivers
        yield error(
            "trt_transceiver_literal" if literal else "trt_transceiver_unknown",
            d.where,
            (d.transceiver, ", ".join(release.transceivers)),
            f"has transceiver {d.transceiver!r}; TensorRT-LLM {release.name} knows {', '.join(release.transceivers)}",
            f"write {right}" if literal else "use UCX or NIXL",
        )


def _timeout(d: Descriptor) -> Iterator[Finding]:
    release = parse_release(d.version) if d.version is not None else None
    if d.kv_transfer_timeout_ms is not None and release is not None and release.known:
        if not release.has_transfer_timeout:
            yield error(
                "trt_timeout_unknown",
                d.where,
                (d.kv_transfer_timeout_ms, release.name),
                f"has kv_transfer_timeout_ms, which TensorRT-LLM {release.name} doesn't know (1.2 on)",
                "leave it at auto",
            )
        elif release.mode == "engine" and d.role != "decode":
            yield warning(
                "trt_timeout_crash",
                d.where,
                (d.kv_transfer_timeout_ms, release.name),
                "has kv_transfer_timeout_ms; context workers of this line have crashed when it passed (#14565)",
                "leave it at auto: trtpd cancels a transfer that takes too long",
            )
        elif d.kv_transfer_timeout_ms < _TIMEOUT_MS:
            yield warning(
                "trt_timeout_short",
                d.where,
                (d.kv_transfer_timeout_ms, _TIMEOUT_MS),
                f"has kv_transfer_timeout_ms {d.kv_transfer_timeout_ms}; under load sound transfers have run into "
                "60000 (#15152)",
                f"leave it at auto, or give {_TIMEOUT_MS} and more",
            )


def _reuse(d: Descriptor) -> Iterator[Finding]:
    release = parse_release(d.version) if d.version is not None else None
    if d.enable_block_reuse and d.role == "prefill" and release is not None and release.mode == "engine":
        yield warning(
            "trt_block_reuse",
            d.where,
            ("True", release.name),
            "runs prefill with block reuse; 1.2 has evicted reused blocks before they were sent, and then both sides "
            "wait for ever (#12542)",
            "set enable_block_reuse: false on prefill",
        )


def _nixl(d: Descriptor) -> Iterator[Finding]:
    release = parse_release(d.version) if d.version is not None else None
    if release is None or not release.known or (d.transceiver or "").upper() != "NIXL":
        return
    if release.line < (1, 2):
        yield warning(
            "trt_nixl_old",
            d.where,
            (d.transceiver, release.name),
            f"uses NIXL with TensorRT-LLM {release.name}, whose wrapper lacks symbols of NIXL 0.6 and later (#9752)",
            "use UCX, or TensorRT-LLM 1.2",
        )
    if release.text.startswith("1.3.0rc24"):
        yield warning(
            "trt_nixl_crash",
            d.where,
            (d.transceiver, release.text),
            "uses NIXL; under load this release with UCX 1.21 has crashed in transfers and cancels (its release notes)",
            "use UCX, or another release",
        )


def _overlap(d: Descriptor) -> Iterator[Finding]:
    if d.role == "prefill" and d.disable_overlap_scheduler is False:
        yield error(
            "trt_overlap_scheduler",
            d.where,
            ("False", "True"),
            "runs prefill with the overlap scheduler, which context servers can't have",
            "set disable_overlap_scheduler: true",
        )


def _ranks(d: Descriptor) -> Iterator[Finding]:
    ranks = d.ranks
    if ranks is None:
        return
    first = min(ranks, default=0)
    if d.world_size is not None and len(ranks) != d.world_size:
        yield error(
            "trt_ranks_count",
            d.where,
            (len(ranks), d.world_size),
            f"has {len(ranks)} MPI ranks, its engine {d.world_size} (#2021)",
            f"start it with mpirun -n {d.world_size}",
        )
    elif sorted(ranks) != list(range(first, first + len(ranks))):
        yield error(
            "trt_ranks_contiguous",
            d.where,
            (", ".join(map(str, ranks)), f"{first} to {first + len(ranks) - 1}"),
            f"has the MPI ranks {', '.join(map(str, ranks))}; an instance's ranks must follow each other",
            "give it ranks in one run",
        )
    elif ranks and ranks[0] != first:
        yield error(
            "trt_rank_leader",
            d.where,
            (ranks[0], first),
            f"is led by rank {ranks[0]}; the leader must be the first, {first}",
            "list the lowest rank first",
        )


def _buffer(d: Descriptor) -> Iterator[Finding]:
    buffer, prompt, block = d.max_tokens_in_buffer, d.max_prompt_tokens, d.flag("tokens_per_block")
    if buffer is not None and prompt is not None and buffer < prompt:
        yield error(
            "trt_buffer_small",
            d.where,
            (buffer, prompt),
            f"has max_tokens_in_buffer {buffer} for prompts of {prompt}: NIXL fails on longer ones (ai-dynamo/dynamo"
            "#5523), UCX creeps to out of memory (#13506)",
            _BUFFER_MEND,
        )
    if buffer is not None and block and buffer % block:
        yield error(
            "trt_buffer_blocks",
            d.where,
            (buffer, block),
            f"has max_tokens_in_buffer {buffer}, not a multiple of tokens_per_block {block}",
            _BUFFER_MEND,
        )


def _environment(d: Descriptor) -> Iterator[Finding]:
    if d.environment is None:
        return
    yield from _ucx(d, d.environment.get("UCX_TLS"))
    for name in _SWITCHES:
        value = d.environment.get(name)
        if value is not None and value not in ("", "0", "1"):
            yield warning(
                "trt_switch_value",
                d.where,
                (f"{name}={value}", "1"),
                f"sees {name}={value}; only the text 1 means yes",
                f"set {name}=1, or unset it",
            )
        if value == "1" and name in _BROKEN:
            yield error(
                "trt_switch_broken",
                d.where,
                (f"{name}=1", "unset"),
                f"sees {name}=1, which is reported broken (#13506)",
                f"unset {name}",
            )
    release = parse_release(d.version) if d.version is not None else None
    if d.environment.get(_CANCEL) == "1" and release is not None and release.mode == "engine":
        yield error(
            "trt_inflight_cancel",
            d.where,
            (f"{_CANCEL}=1", release.name),
            f"sees {_CANCEL}=1; engines of {release.name} can't cancel a transfer in flight (#13713)",
            f"unset {_CANCEL}",
        )
    size = d.environment.get(_BUFFER_SIZE)
    if size and not _SIZE.fullmatch(size):
        yield error(
            "trt_buffer_unit",
            d.where,
            (size, "512MB"),
            f"sees {_BUFFER_SIZE}={size}, which has no unit and ends the process",
            "write for instance 512MB",
        )
    if d.sm is not None and d.sm < 90 and (d.tp_size or 1) > 1 and "NCCL_P2P_LEVEL" not in d.environment:
        yield warning(
            "trt_nccl_p2p",
            d.where,
            (f"SM {d.sm}", "unset"),
            f"runs tp {d.tp_size} on SM {d.sm} without NCCL_P2P_LEVEL; such GPUs have hung without it (#19492)",
            "set NCCL_P2P_LEVEL=PXB",
        )


def _ucx(d: Descriptor, transports: str | None) -> Iterator[Finding]:
    mover = (d.transceiver or "").upper()
    if mover not in ("UCX", "NIXL"):
        return
    if not transports:
        yield warning(
            "trt_ucx_tls",
            d.where,
            ("unset", "UCX_TLS"),
            "sees no UCX_TLS; what UCX then chooses has failed or hung at start (#18373)",
            "pin it, e.g. UCX_TLS=cuda_copy,cuda_ipc,rc,tcp (see docs/tensorrt-llm.md)",
        )
    elif mover == "NIXL" and not any(part.startswith(("cuda", "^", "all")) for part in transports.split(",")):
        yield error(
            "trt_ucx_tls_no_cuda",
            d.where,
            (transports, "cuda_copy"),
            f"sees UCX_TLS={transports}, with which NIXL can't register GPU memory",
            "add cuda_copy and cuda_ipc",
        )


_RULES = (
    _transceiver,
    _timeout,
    _reuse,
    _nixl,
    _buffer,
    _overlap,
    _ranks,
    _environment,
)
