"""What can't work in one TensorRT-LLM engine as it is built, by its descriptor. Pure: one function per concern.

A rule is silent where a descriptor doesn't know. The numbers of public reports stand beside rules that come from
them (NVIDIA/TensorRT-LLM unless named otherwise).
"""

from __future__ import annotations

from collections.abc import Iterator

from trtpd.build.backends.tensorrt_llm.descriptor import Descriptor
from trtpd.build.backends.tensorrt_llm.release import KNOWN_RELEASES, parse_release
from trtpd.build.findings import Finding, error, warning

_FUSED_ARCHITECTURES = ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")
_NOT_DECODERS = ("EncoderModel", "DecoderModel", "WhisperEncoder", "BertModel", "RobertaModel")


def check_engine(found: Descriptor) -> Iterator[Finding]:
    """Findings on one engine."""
    for rule in _RULES:
        yield from rule(found)


def _release(d: Descriptor) -> Iterator[Finding]:
    if d.version is None:
        return
    release = parse_release(d.version)
    if release is None or not release.known:
        yield error(
            "trt_release_unknown",
            d.where,
            (d.version, KNOWN_RELEASES),
            f"is for TensorRT-LLM {d.version}; trtpd knows {KNOWN_RELEASES}",
            "use one of these",
        )


def _world(d: Descriptor) -> Iterator[Finding]:
    if None in (d.tp_size, d.pp_size, d.cp_size, d.world_size):
        return
    product = (d.tp_size or 1) * (d.pp_size or 1) * (d.cp_size or 1)
    if product != d.world_size:
        yield error(
            "trt_world_size",
            d.where,
            (product, d.world_size),
            f"tp {d.tp_size} * pp {d.pp_size} * cp {d.cp_size} is {product}, its world_size is {d.world_size}",
            "convert and build it again",
        )
    if d.engine_files is not None and d.engine_files != d.world_size:
        yield error(
            "trt_engine_files",
            d.where,
            (d.engine_files, d.world_size),
            f"holds {d.engine_files} of {d.world_size} rank<N>.engine files",
            "build it again with `trtpd build`",
        )
    if d.cp_size != 1:
        yield error(
            "trt_cp",
            d.where,
            (d.cp_size, 1),
            f"has cp {d.cp_size}; KV of such engines can't be handed over",
            "use cp 1 and a larger tp",
        )


def _kv_cache(d: Descriptor) -> Iterator[Finding]:
    kind = d.flag("kv_cache_type")
    if kind is not None and str(kind).upper() != "PAGED":
        yield error(
            "trt_kv_cache_type",
            d.where,
            (kind, "PAGED"),
            f"has kv_cache_type {kind}; only a paged cache can be handed over (a disabled one also runs batches of 1: "
            "#2443)",
            "use kv_cache_type paged",
        )
    beams = d.flag("max_beam_width")
    if beams not in (None, 1):
        yield error(
            "trt_beam_width",
            d.where,
            (beams, 1),
            f"has max_beam_width {beams}; KV is handed over for one beam",
            "use max_beam_width 1",
        )
    kind = d.model_type or ("ENCODER_ONLY" if d.architecture in _NOT_DECODERS else None)
    if kind not in (None, "DECODER_ONLY"):
        yield error(
            "trt_decoder_only",
            d.where,
            (kind, "DECODER_ONLY"),
            f"is {kind} ({d.architecture}); only decoder-only models can be disaggregated",
            "serve another model",
        )
    if d.host_cache_size:
        yield error(
            "trt_host_cache",
            d.where,
            (d.host_cache_size, 0),
            f"has host_cache_size {d.host_cache_size}; answers have held other users' tokens with it (#8813)",
            "leave host_cache_size unset",
        )


def _attention(d: Descriptor) -> Iterator[Finding]:
    fused, paged = d.flag("context_fmha"), d.flag("use_paged_context_fmha")
    if d.flag("remove_input_padding") is False:
        yield error(
            "trt_input_padding",
            d.where,
            ("disable", "enable"),
            "has remove_input_padding disabled; in-flight batching needs it",
            "use remove_input_padding enable",
        )
    if fused is False and paged is True:
        yield error(
            "trt_paged_fmha",
            d.where,
            ("context_fmha disable", "use_paged_context_fmha enable"),
            "has use_paged_context_fmha without context_fmha, which turns it off",
            "enable context_fmha, or disable both",
        )
    if d.enable_chunked_context and paged is False:
        yield error(
            "trt_chunked_context",
            d.where,
            ("enable_chunked_context", "use_paged_context_fmha disable"),
            "is to run prompts in chunks, which its engine can't without use_paged_context_fmha",
            "use use_paged_context_fmha enable, or turn chunked context off",
        )
    narrow = d.kv_cache_quant_algo == "INT8" or (d.kv_cache_quant_algo == "FP8" and d.quant_algo != "FP8")
    if narrow and paged is not False:
        yield error(
            "trt_kv_fmha",
            d.where,
            (d.kv_cache_quant_algo, d.quant_algo),
            f"has {d.kv_cache_quant_algo} KV with {d.quant_algo or 'plain'} weights, which turns paged FMHA off",
            "use FP8 KV with FP8 weights, or KV of the model's own type",
        )
    if d.flag("streamingllm"):
        yield error(
            "trt_streamingllm",
            d.where,
            ("enable", "disable"),
            "has streamingllm, which is no longer supported",
            "use streamingllm disable",
        )


def _lengths(d: Descriptor) -> Iterator[Finding]:
    prompt, tokens, seq = d.max_prompt_tokens, d.flag("max_num_tokens"), d.flag("max_seq_len")
    chunked = d.enable_chunked_context is True and d.flag("use_paged_context_fmha") is not False
    if None not in (prompt, tokens) and d.role != "decode" and not chunked and tokens < prompt:
        yield error(
            "trt_max_num_tokens",
            d.where,
            (tokens, prompt),
            f"takes {tokens} tokens a step and no chunks, but prompts of {prompt}; a longer prompt ends a context "
            "server (#3937)",
            f"raise max_num_tokens to {prompt} or run prompts in chunks",
        )
    answer = 1 if d.role == "prefill" else d.max_answer_tokens
    if None not in (prompt, answer, seq) and seq < (prompt or 0) + (answer or 0):
        yield error(
            "trt_max_seq_len",
            d.where,
            (seq, (prompt or 0) + (answer or 0)),
            f"has max_seq_len {seq} for prompts of {prompt} tokens and answers of {answer}",
            "raise max_seq_len",
        )


def _profiles(d: Descriptor) -> Iterator[Finding]:
    opt = d.flag("opt_num_tokens")
    if d.engine_files is None and d.flag("multiple_profiles") and opt is not None:
        yield error(
            "trt_profiles",
            d.where,
            ("multiple_profiles enable", f"opt_num_tokens {opt}"),
            "has both multiple_profiles and opt_num_tokens, which trtllm-build refuses",
            "drop one of them",
        )
    drafts = d.flag("max_draft_len") or 0
    if d.flag("gather_context_logits") and drafts > 0:
        yield error(
            "trt_gather_draft",
            d.where,
            ("gather_context_logits", f"max_draft_len {drafts}"),
            "gathers context logits and decodes speculatively, which trtllm-build refuses",
            "drop one of them",
        )
    if d.flag("pp_reduce_scatter") and d.architecture not in (None, "MixtralForCausalLM"):
        yield error(
            "trt_pp_reduce_scatter",
            d.where,
            ("pp_reduce_scatter enable", d.architecture),
            "has pp_reduce_scatter, which only Mixtral takes",
            "use pp_reduce_scatter disable",
        )


def _fp8_plugins(d: Descriptor) -> Iterator[Finding]:
    names = ("low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "gemm_swiglu_plugin")
    for name in (name for name in names if d.flag(name) == "fp8"):
        if d.quant_algo != "FP8":
            yield error(
                "trt_fp8_plugin",
                d.where,
                (f"{name} fp8", d.quant_algo),
                f"has {name} fp8 with {d.quant_algo or 'plain'} weights; it needs an FP8 checkpoint",
                f"use {name} disable, or an FP8 checkpoint",
            )
        if d.sm is not None and 100 <= d.sm < 120:
            yield error(
                "trt_fp8_plugin_sm",
                d.where,
                (f"{name} fp8", f"SM {d.sm}"),
                f"has {name} fp8, which isn't there for SM {d.sm}",
                f"use {name} disable",
            )
        if "swiglu" in name and d.flag("use_fused_mlp") is False:
            yield error(
                "trt_fused_mlp",
                d.where,
                (f"{name} fp8", "use_fused_mlp disable"),
                f"has {name} fp8 without use_fused_mlp, which it is a part of",
                "use use_fused_mlp enable",
            )


def _fusion(d: Descriptor) -> Iterator[Finding]:
    reduce = d.flag("reduce_fusion")
    if d.engine_files is None and reduce and (d.tp_size == 1 or d.architecture not in (None, *_FUSED_ARCHITECTURES)):
        yield warning(
            "trt_reduce_fusion",
            d.where,
            ("reduce_fusion enable", f"tp {d.tp_size}, {d.architecture}"),
            f"has reduce_fusion with tp {d.tp_size} and {d.architecture}; trtllm-build drops it quietly",
            "leave it out: it is for tp above 1 and Llama, Gemma 2 or Medusa",
        )
    if d.flag("user_buffer") and (not reduce or d.quant_algo != "FP8"):
        yield error(
            "trt_user_buffer",
            d.where,
            ("user_buffer enable", f"reduce_fusion {reduce}, {d.quant_algo}"),
            "has user_buffer, which needs reduce_fusion and FP8 weights",
            "use user_buffer disable",
        )


def _arithmetic(d: Descriptor) -> Iterator[Finding]:
    if d.sm is None:
        return
    if 100 <= d.sm < 120 and (d.quant_algo in ("W8A16", "W4A16") or d.kv_cache_quant_algo == "INT8"):
        yield error(
            "trt_int8_sm",
            d.where,
            (d.quant_algo or d.kv_cache_quant_algo, f"SM {d.sm}"),
            f"has integer weights or KV ({d.quant_algo}, {d.kv_cache_quant_algo}), which SM {d.sm} can't compute with",
            "use bf16 or FP8",
        )
    if d.sm < 89 and "FP8" in (d.quant_algo, d.kv_cache_quant_algo):
        yield error(
            "trt_fp8_sm",
            d.where,
            ("FP8", f"SM {d.sm}"),
            f"has FP8 weights or KV; SM {d.sm} has no FP8",
            "use bf16, or a GPU of SM 89 or later",
        )


_RULES = (
    _release,
    _world,
    _kv_cache,
    _attention,
    _lengths,
    _profiles,
    _fp8_plugins,
    _fusion,
    _arithmetic,
)
