"""What TensorRT-LLM is told, and what is made of its statistics, against the stand-in's classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import CONTEXT_ONLY, GENERATION_ONLY, WHOLE
from trtpd_testing import tensorrt

from trtpd.errors import EngineError
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.tensorrt_llm import compiled, llm_api
from trtpd.runtime.engine.tensorrt_llm.backend import Start, one_line
from trtpd.runtime.engine.tensorrt_llm.compiled import ParamsCodec, StatsPairs, executor_config_of, request_of
from trtpd.runtime.engine.tensorrt_llm.hand_off import HandOff
from trtpd.runtime.engine.tensorrt_llm.load import check_release, load

DRAWN = Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=-5, end_ids=(2, 3), log_probs=True)
HAND_OFF = HandOff(version="1.2.1", first_gen_tokens=(7,), req_id=3, opaque_state=b"state")


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tensorrt.installed(tmp_path_factory.mktemp("site")):
        yield importlib.import_module("tensorrt_llm.bindings.executor")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tensorrt.installed(tmp_path_factory.mktemp("site"), version="1.3.0"):
        yield importlib.import_module("tensorrt_llm.llmapi")


def start(kind: Any = WHOLE, sampling: Sampling = DRAWN, hand_off: HandOff | None = None) -> Start:
    return Start(kind=kind, prompt_ids=(5, 6), max_tokens=9, sampling=sampling, hand_off=hand_off)


def made(bindings: Any, what: Start) -> Any:
    return request_of(bindings, what, ParamsCodec(bindings, "1.2.1"))


def test_a_drawn_request_says_everything(bindings):
    request = made(bindings, start())
    sampling = request.sampling_config
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 40, 0.9)
    assert sampling.seed == (1 << 64) - 5
    assert (request.streaming, request.end_id, request.stop_words) == (True, None, [[2], [3]])
    assert (request.output_config.return_log_probs, request.output_config.exclude_input_from_output) == (True, True)


def test_a_greedy_request_draws_among_one(bindings):
    sampling = made(bindings, start(sampling=Sampling(seed=4))).sampling_config
    assert (sampling.top_k, sampling.temperature, sampling.top_p, sampling.seed) == (1, None, None, None)


def test_penalties_and_bad_words_go_along_and_neutral_ones_do_not(bindings, api):
    what = start(sampling=Sampling(repetition_penalty=1.2, frequency_penalty=0.5, bad_words=((4,), (5, 6))))
    request = made(bindings, what)
    sampling = request.sampling_config
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, None, 0.5)
    assert request.bad_words == [[4], [5, 6]]
    assert llm_api.sampling_params_of(api, what).repetition_penalty == 1.2


def test_each_kind_is_named_and_only_a_generation_brings_params(bindings):
    kinds = {
        kind: made(bindings, start(kind, hand_off=HAND_OFF if kind is GENERATION_ONLY else None))
        for kind in (WHOLE, CONTEXT_ONLY, GENERATION_ONLY)
    }
    assert [request.request_type.value for request in kinds.values()] == [0, 1, 2]
    assert kinds[WHOLE].context_phase_params is None
    assert kinds[GENERATION_ONLY].context_phase_params.opaque_state == b"state"
    assert (kinds[CONTEXT_ONLY].streaming, kinds[CONTEXT_ONLY].stop_words) == (False, None)


def test_the_executor_is_configured_in_full(bindings):
    trt = tensorrt.settings(transceiver="NIXL", kv_transfer_timeout_ms=1234)
    config = executor_config_of(bindings, tensorrt.engine_config(tiny.architecture(), tiny.PROFILE, trt))
    transceiver = config.cache_transceiver_config
    assert (transceiver.backend.name, transceiver.max_tokens_in_buffer) == ("NIXL", 512)
    assert transceiver.kv_transfer_timeout_ms == 1234
    assert (config.enable_chunked_context, config.kv_cache_config.enable_block_reuse) == (True, False)
    assert config.kv_cache_config.max_tokens == tiny.PROFILE.kv_blocks * 32
    assert config.parallel_config.communication_mode.name == "LEADER"
    assert config.request_stats_max_iterations > 0


def test_the_first_release_is_told_in_its_own_words(tmp_path):
    trt = tensorrt.settings(release="1.0", transceiver="ucx", kv_transfer_timeout_ms=None)
    with tensorrt.installed(tmp_path, version="1.0.0"):
        bindings = importlib.import_module("tensorrt_llm.bindings.executor")
        config = executor_config_of(bindings, tensorrt.engine_config(tiny.architecture(), tiny.PROFILE, trt))
    assert config.cache_transceiver_config.backend.name == "UCX"
    assert not hasattr(config.cache_transceiver_config, "kv_transfer_timeout_ms")


def test_statistics_of_one_iteration_are_put_together_and_half_pairs_left_out():
    pairs = StatsPairs()
    iterations = [SimpleNamespace(iter=number) for number in (3, 4, 5, 5)]
    pairs.add(iterations, [SimpleNamespace(iter=number) for number in (4, 5)])
    assert [(one.iter, two.iter) for one, two in pairs.take()] == [(4, 4), (5, 5)]
    pairs.add([], [SimpleNamespace(iter=5), SimpleNamespace(iter=6)])
    assert [(one.iter, two.iter) for one, two in pairs.take()] == [(5, 5)]


def test_log_probabilities_of_new_tokens_are_the_last_ones():
    assert compiled._last([[-1.0, -2.0, -3.0]], 2) == (-2.0, -3.0)
    assert compiled._last([[-3.0]], 1) == (-3.0,)
    assert compiled._last(None, 1) == ()
    entries = [{4: SimpleNamespace(logprob=-1.0)}, {5: SimpleNamespace(logprob=-2.0)}]
    assert llm_api._log_probs(entries, (5,)) == (-2.0,)
    assert llm_api._log_probs([-1.5], (5,)) == (-1.5,)


def test_the_llm_class_is_told_the_same(api):
    params = llm_api.sampling_params_of(api, start())
    assert (params.end_id, params.stop_token_ids, params.include_stop_str_in_output) == (-1, [2, 3], True)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.7, 40, 0.9, 9)
    assert (params.logprobs, params.detokenize) == (0, False)
    assert llm_api.sampling_params_of(api, start(CONTEXT_ONLY)).stop_token_ids is None
    assert llm_api.sampling_params_of(api, start(sampling=Sampling())).top_k == 1


def test_params_of_the_llm_class_are_written_and_read_back(api):
    later = HandOff(
        version="1.3.0", first_gen_tokens=(7,), req_id=3, opaque_state=b"s", ctx_dp_rank=2, disagg_info_endpoint="x"
    )
    written = llm_api.disaggregated_params_of(api, start(GENERATION_ONLY, hand_off=later))
    assert written.request_type == "generation_only"
    assert llm_api.hand_off_of(written, "1.3.0") == later
    assert llm_api.disaggregated_params_of(api, start()) is None
    assert llm_api.disaggregated_params_of(api, start(CONTEXT_ONLY)).request_type == "context_only"


def test_statistics_of_the_llm_class_may_miss_anything():
    assert llm_api.iteration_of({"iter": 1}).uses == {}
    found = llm_api.iteration_of(
        {
            "kvCacheStats": {"usedNumBlocks": 4, "maxNumBlocks": 9},
            "requestStats": [{"id": 7, "stage": "QUEUED", "contextPrefillPosition": None}],
        }
    )
    assert (found.used_blocks, found.pool_blocks, found.uses[7].stage) == (4, 9, "queued")


@pytest.mark.parametrize("text", ["", "- a list", "{"])
def test_an_arguments_file_that_is_none_is_one_line_with_the_mend(tmp_path: Path, text: str) -> None:
    path = tmp_path / "llm_args.yaml"
    path.write_text(text)
    with pytest.raises(EngineError, match=r"^[^\n]*build this role again$"):
        llm_api.read_arguments(path)


def test_what_tensorrt_llm_says_becomes_one_line():
    said = "\n  [TensorRT-LLM][ERROR] Assertion failed: x\n1  0x7f libtensorrt_llm.so\n"
    assert one_line(RuntimeError(said)) == "[TensorRT-LLM][ERROR] Assertion failed: x"
    assert one_line(RuntimeError()) == "RuntimeError()"


@pytest.mark.parametrize(("version", "mode"), [("1.1.0", "engine"), ("none", "engine"), ("1.3.0", "llm_api")])
def test_another_release_than_the_builds_is_refused(version: str, mode: str) -> None:
    with pytest.raises(EngineError, match=rf"built for TensorRT-LLM 1\.2 .*{version} is installed"):
        check_release(tensorrt.settings(mode), version)


def test_a_group_of_another_size_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = tensorrt.engine_config(tiny.architecture(), tiny.PROFILE, tensorrt.settings(), tp=2)
    with pytest.raises(EngineError, match="built for tp 2 and is started with 1 rank"):
        load(config, tmp_path, pool_name="t", generation="g")


@pytest.mark.parametrize(
    ("mode", "version", "said"), [("engine", "1.2.1", "loading"), ("llm_api", "1.3.0", "can't be read")]
)
def test_an_engine_that_is_not_there_is_said_in_one_line(tmp_path: Path, mode: str, version: str, said: str) -> None:
    trt = tensorrt.settings(mode, release=version[:3])
    config = tensorrt.engine_config(tiny.architecture(), tiny.PROFILE, trt)
    with tensorrt.installed(tmp_path, version=version), pytest.raises(EngineError, match=rf"^[^\n]*{said}[^\n]*$"):
        load(config, tmp_path / "nowhere", pool_name="t", generation="g")


def test_an_absent_package_names_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorrt_llm", "tensorrt_llm.bindings.executor", "tensorrt_llm.llmapi"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineError, match="run in an image that has the release"):
        compiled.import_bindings()
    with pytest.raises(EngineError, match="run in an image that has the release"):
        llm_api.import_api()
