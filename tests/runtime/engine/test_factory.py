from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import Driver, prompt, request

from trtpd.errors import EngineError
from trtpd.runtime.engine.factory import load_engine


def written(directory, config):
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    return directory


@pytest.mark.parametrize("engine", ["openvino", "emulated"])
def test_an_engine_directory_is_all_an_engine_needs(engine, tmp_path):
    arch = tiny.architecture()
    tiny.save(tmp_path, tiny.stored(tiny.weights(arch), "f32"))
    written(tmp_path, tiny.config(arch, engine=engine))
    loaded = load_engine(tmp_path, pool_name="test-factory", generation="g")
    assert loaded.limits.vocab_size == arch.vocab_size
    assert loaded.kv is not None
    assert loaded.kv.pool.address.generation == "g"
    if engine == "openvino":
        assert len(Driver(loaded).run(request(1, prompt(9)))) == 12
    loaded.shutdown()


@pytest.mark.parametrize(
    ("engine", "message"), [("tensorrt_llm", "no tensorrt_llm section"), ("abacus", "abacus.*emulated, openvino")]
)
def test_an_engine_this_version_lacks_is_refused(engine, message, tmp_path):
    written(tmp_path, tiny.config(tiny.architecture(), engine=engine))
    with pytest.raises(EngineError, match=message):
        load_engine(tmp_path, pool_name="test-factory", generation="g")


@pytest.mark.parametrize("engine", ["openvino", "emulated"])
def test_an_engine_of_several_ranks_is_not_loaded_by_one(engine, tmp_path):
    written(tmp_path, tiny.config(tiny.architecture(), engine=engine, tp=2))
    with pytest.raises(EngineError, match=r"built for tp 2 and is started with 1 rank: start it as `mpirun -n 2"):
        load_engine(tmp_path, pool_name="test-factory", generation="g")


def test_a_layout_of_another_tp_than_the_engines_is_refused(tmp_path):
    written(tmp_path, replace(tiny.config(tiny.architecture()), tp=2))
    with pytest.raises(EngineError, match="tp is 2, its KV layout is of tp 1"):
        load_engine(tmp_path, pool_name="test-factory", generation="g")


def test_an_engine_built_with_another_openvino_is_refused(tmp_path):
    written(tmp_path, replace(tiny.config(tiny.architecture()), versions={"openvino": "2020.1"}))
    with pytest.raises(EngineError, match=r"2020\.1"):
        load_engine(tmp_path, pool_name="test-factory", generation="g")
