"""What can't work between TensorRT-LLM engines that exchange KV. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from trtpd.build.backends.tensorrt_llm.descriptor import Descriptor
from trtpd.build.backends.tensorrt_llm.release import parse_release
from trtpd.build.findings import Finding, error, warning
from trtpd.build.kv_mapping import Side, mapping_fault

_REBUILD = "give both roles the same and build them again"

_SAME = (
    ("trt_kv_dtype", "KV of type", "kv_dtype"),
    ("trt_head_size", "head_size", "head_size"),
    ("trt_layers", "num_hidden_layers", "num_hidden_layers"),
    ("trt_kv_heads", "num_key_value_heads", "num_key_value_heads"),
    ("trt_version_differs", "TensorRT-LLM", "version"),
)


def check_pairs(found: Sequence[Descriptor]) -> Iterator[Finding]:
    """Findings between engines: each is compared with the first; those that hand KV over also as pairs."""
    for other in found[1:]:
        yield from _alike(found[0], other)
    for one, other in combinations(found, 2):
        yield from _ranks(one, other)
        yield from _shared_gpu(one, other)
    if len(found) > 1:
        for one in found:
            yield from _power_of_two(one)
            yield from _stages(one)
    for source in found:
        for sink in found:
            if source.role in ("prefill", "mixed") and sink.role in ("decode", "mixed") and source is not sink:
                yield from _hand_over(source, sink)


def _alike(one: Descriptor, other: Descriptor) -> Iterator[Finding]:
    pairs = [(code, what, getattr(one, name), getattr(other, name)) for code, what, name in _SAME]
    block = one.flag("tokens_per_block"), other.flag("tokens_per_block")
    pairs.append(("trt_tokens_per_block", "tokens_per_block", *block))
    if one.transceiver_given and other.transceiver_given:
        pairs.append(("trt_transceiver_differs", "transceiver", one.transceiver, other.transceiver))
    for code, what, first, second in pairs:
        if first is not None and second is not None and first != second:
            yield error(
                code,
                other.where,
                (first, second),
                f"has {what} {second}, {one.where} {first}; engines that exchange KV must agree",
                _REBUILD,
            )


def _power_of_two(d: Descriptor) -> Iterator[Finding]:
    for name, size in (("tp", d.tp_size), ("cp", d.cp_size)):
        if size is not None and size & (size - 1):
            yield error(
                "trt_power_of_two",
                d.where,
                (size, 1 << size.bit_length() - 1),
                f"has {name} {size}; engines hand KV over only between sizes that are powers of two",
                f"set it to {1 << size.bit_length() - 1} or {1 << size.bit_length()}",
            )


def _stages(d: Descriptor) -> Iterator[Finding]:
    release = parse_release(d.version) if d.version is not None else None
    if (d.pp_size or 1) > 1 and release is not None and release.mode == "engine":
        yield warning(
            "trt_pp_hang",
            d.where,
            (d.pp_size, 1),
            f"has pp {d.pp_size}; between stages of engines that hand KV over this line has hung (#12528)",
            "use pp 1 and a larger tp",
        )


def _ranks(one: Descriptor, other: Descriptor) -> Iterator[Finding]:
    shared = sorted(set(one.ranks or ()) & set(other.ranks or ()))
    if shared:
        yield error(
            "trt_ranks_overlap",
            other.where,
            (", ".join(map(str, one.ranks or ())), ", ".join(map(str, other.ranks or ()))),
            f"shares MPI rank {shared[0]} with {one.where}; participants must be disjoint",
            "give each instance ranks of its own",
        )


def _shared_gpu(one: Descriptor, other: Descriptor) -> Iterator[Finding]:
    shared = sorted(set(one.device_ids or ()) & set(other.device_ids or ()))
    shares = one.free_gpu_memory_fraction or 0.9, other.free_gpu_memory_fraction or 0.9
    if shared and one.host == other.host and sum(shares) > 1:
        yield error(
            "trt_gpu_shared",
            other.where,
            shares,
            f"shares GPU {shared[0]} with {one.where}, and each takes its free_gpu_memory_fraction of what is free",
            "give each GPUs of its own, or fractions that add up to less than 1",
        )


def _hand_over(source: Descriptor, sink: Descriptor) -> Iterator[Finding]:
    sizes = source.flag("max_seq_len"), sink.flag("max_seq_len")
    if source.max_prompt_tokens is None and None not in sizes and sizes[1] < sizes[0]:
        yield error(
            "trt_max_seq_len",
            sink.where,
            (sizes[1], sizes[0]),
            f"has max_seq_len {sizes[1]}, below {sizes[0]} of {source.where}, whose prompts it must take over",
            f"raise it to {sizes[0]}",
        )
    if source.tp_size != sink.tp_size and "FLASHINFER" in (source.attn_backend, sink.attn_backend):
        yield error(
            "trt_attn_backend",
            sink.where,
            (source.attn_backend, sink.attn_backend),
            f"takes KV over from another TP size ({source.tp_size} to {sink.tp_size}) with FlashInfer, whose block "
            "order differs: answers are wrong (#6507)",
            "use attn_backend: TRTLLM, or equal TP sizes",
        )
    numbers = [
        (d.num_hidden_layers, d.num_key_value_heads, d.tp_size, d.pp_size or 1) for d in (source, sink)
    ]  # fmt: skip
    if any(None in sizes for sizes in numbers) or numbers[0][:2] != numbers[1][:2]:
        return
    sides = [Side(layers=a or 1, kv_heads=b or 1, tp=c or 1, pp=e) for a, b, c, e in numbers]
    if all(side.tp & (side.tp - 1) == 0 for side in sides) and (fault := mapping_fault(*sides)):
        yield error(
            "trt_kv_mapping",
            sink.where,
            (f"tp {sides[0].tp} pp {sides[0].pp}", f"tp {sides[1].tp} pp {sides[1].pp}"),
            f"can't be filled from {source.where}: {fault}",
            "use TP sizes that divide the KV heads",
        )
