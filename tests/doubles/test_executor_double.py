"""The stand-in's executor bindings and LLM class against api.json: what they have, and what they refuse."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trtpd_testing import tensorrt

API: dict[str, Any] = json.loads((Path(__file__).resolve().parent / "api.json").read_text())
EXECUTOR: dict[str, Any] = API["executor"]
MADE = (
    "SamplingConfig", "OutputConfig", "KvCacheConfig", "DynamicBatchConfig", "SchedulerConfig", "OrchestratorConfig",
    "ParallelConfig", "CacheTransceiverConfig", "ExtendedRuntimePerfKnobConfig", "ExecutorConfig", "Request",
)  # fmt: skip
ENUMS = (
    "RequestType", "FinishReason", "CapacitySchedulerPolicy", "ContextChunkingPolicy", "BatchingType", "ModelType",
    "CommunicationType", "CommunicationMode", "RequestStage",
)  # fmt: skip
LATER = {"CacheTransceiverConfig": {"kv_transfer_poll_interval_ms"}}
"""Parameters that 1.2 doesn't have."""


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tensorrt.installed(tmp_path_factory.mktemp("site")):
        yield importlib.import_module("tensorrt_llm.bindings.executor")


def required(entry: dict[str, Any]) -> bool:
    return str(entry["default"]).startswith("<required")


def some(bindings: Any, name: str) -> Any:
    """An object of a class with its required arguments only."""
    values = {"list[int]": [1], "int": 1, "bool": True}
    given = {entry["name"]: values[entry["type"]] for entry in EXECUTOR[name]["ctor"] if required(entry)}
    return getattr(bindings, name)(**given)


@pytest.mark.parametrize("name", MADE)
def test_a_class_takes_the_tables_arguments_and_has_their_defaults(bindings: Any, name: str) -> None:
    made = some(bindings, name)
    for entry in EXECUTOR[name]["ctor"]:
        if entry["name"] in LATER.get(name, ()):
            assert not hasattr(made, entry["name"])
            continue
        attribute = {"type": "request_type", "priority": "_priority"}.get(entry["name"], entry["name"])
        found, default = getattr(made, attribute), entry["default"]
        if required(entry):
            continue
        if isinstance(default, str) and default.endswith("()"):
            known = getattr(bindings, default[:-2], type(None))
            assert isinstance(found, known)
        else:
            assert getattr(found, "name", found) == default


@pytest.mark.parametrize("name", MADE)
def test_a_class_refuses_what_the_table_does_not_name(bindings: Any, name: str) -> None:
    with pytest.raises(TypeError, match="incompatible"):
        getattr(bindings, name)(surely_unknown=1)
    last = [entry for entry in EXECUTOR[name]["ctor"] if entry.get("kw_only")]
    if last:
        with pytest.raises(TypeError, match="by position"):
            getattr(bindings, name)(*[None] * len(EXECUTOR[name]["ctor"]))


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_the_tables_members(bindings: Any, name: str) -> None:
    found = EXECUTOR[name]["enum"]
    members = getattr(bindings, name).__members__
    assert list(members) == list(found)
    if isinstance(found, dict):
        assert {key: member.value for key, member in members.items()} == found


def test_the_executor_has_the_tables_methods(bindings: Any) -> None:
    for name in EXECUTOR["Executor"]["methods"]:
        assert callable(getattr(bindings.Executor, name))


@pytest.mark.parametrize("name", ["IterationStats", "KvCacheStats", "InflightBatchingStats", "RequestStats"])
def test_statistics_have_the_tables_attributes_and_no_other(bindings: Any, name: str) -> None:
    made = bindings._filled(name, {})
    known = {text.partition(" ")[0] for text in EXECUTOR[name]["attrs"] if "(" not in text.partition(" ")[0]}
    assert set(made.__slots__) == known


@pytest.mark.parametrize(("version", "arguments"), [("1.0.0", 4), ("1.2.1", 4), ("1.3.0", 6)])
def test_context_phase_params_take_as_many_arguments_as_the_release(
    tmp_path: Path, version: str, arguments: int
) -> None:
    with tensorrt.installed(tmp_path, version=version):
        bindings = importlib.import_module("tensorrt_llm.bindings.executor")
        for count in range(8):
            values = ([1], 2, b"x", None, None, None, None, None)[:count]
            if count == arguments:
                assert bindings.ContextPhaseParams(*values).opaque_state == b"x"
            else:
                with pytest.raises(TypeError, match="incompatible"):
                    bindings.ContextPhaseParams(*values)


def test_disaggregated_params_have_the_releases_fields(tmp_path: Path) -> None:
    fields = API["llmapi"]["DisaggregatedParams"]["fields"]
    with tensorrt.installed(tmp_path, version="1.2.1"):
        old = importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams
        assert "ctx_dp_rank" not in {field.name for field in dataclasses.fields(old)}
    with tensorrt.installed(tmp_path, version="1.3.0"):
        new = importlib.import_module("tensorrt_llm.llmapi").DisaggregatedParams
        assert {field.name for field in dataclasses.fields(new)} == set(fields)
        assert new(request_type="CONTEXT_ONLY").request_type == "context_only"
        with pytest.raises(ValueError, match="Unknown request type"):
            new(request_type="prefill")


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a wrong type": (lambda b: b.KvCacheConfig(max_tokens="many"), "takes Optional"),
    "a whole number for a switch": (lambda b: b.ExecutorConfig(enable_chunked_context=1), "takes bool"),
    "an empty prompt": (lambda b: b.Request([], 4), "inputTokenIds"),
    "no tokens": (lambda b: b.Request([1], 0), "maxTokens"),
    "a negative temperature": (lambda b: b.SamplingConfig(temperature=-1.0), "temperature"),
    "top_p of 0": (lambda b: b.SamplingConfig(top_p=0.0), "topP"),
    "type by its attribute's name": (lambda b: b.Request([1], 2, request_type=b.RequestType(1)), "request_type"),
    "mixed case": (lambda b: b.CacheTransceiverBackendType.from_string("Ucx"), "Invalid backend"),
    "no such backend": (lambda b: b.CacheTransceiverBackendType.from_string("TCP"), "Invalid backend"),
    "a timeout of 0": (lambda b: b.CacheTransceiverConfig(kv_transfer_timeout_ms=0), "kvTransferTimeoutMs"),
    "a response's wrong half": (lambda b: b.Response(1, "broken").result, "broken"),
    "a missing engine": (
        lambda b: b.Executor("/nowhere", b.ModelType.DECODER_ONLY, b.ExecutorConfig()), "does not exist"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_the_bindings_refuse_what_the_real_ones_refuse(bindings: Any, fault: str) -> None:
    call, said = REFUSED[fault]
    with pytest.raises((RuntimeError, TypeError), match=said):
        call(bindings)
