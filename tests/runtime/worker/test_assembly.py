"""What a worker checks before it loads anything, and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from trtpd_testing.emulated_build import engine_config, write_build

from trtpd.build.manifest import read_engine_config, write_json
from trtpd.errors import EngineError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.runtime.engine.factory import load_engine
from trtpd.runtime.worker.assembly import Place, check_unchanged, hello_of, settle


def place_of(folder: Path, **changes: Any) -> Place:
    """decode_0 of a build whose engine directory says `changes`."""
    build = write_build(folder / "BUILD", "decode")
    path = build / "decode" / "config.json"
    write_json(path, msgspec.structs.replace(read_engine_config(path.parent), **changes))
    return Place(build=build, instance="decode_0", router="", run_dir=folder, keys=None)


def test_an_engine_directory_of_the_same_build_is_taken(tmp_path: Path) -> None:
    assert settle(place_of(tmp_path), None).config == engine_config("decode")


@pytest.mark.parametrize("name", ["fingerprint", "pair_fingerprint"])
def test_an_engine_directory_of_another_build_is_one_line_with_the_mend(tmp_path: Path, name: str) -> None:
    said = rf"^[^\n]*decode: its {name} is 'other', the manifest says 'toy[^\n]*another build[^\n]*build it again"
    with pytest.raises(EngineError, match=said + r"[^\n]*$"):
        settle(place_of(tmp_path, **{name: "other"}), None)


def test_a_build_that_is_replaced_while_it_loads_is_refused(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    found = settle(place, None)
    check_unchanged(found)
    write_json(found.directory / "config.json", msgspec.structs.replace(found.config, fingerprint="newer"))
    with pytest.raises(EngineError, match="was 'toy-decode' and is 'newer'"):
        check_unchanged(found)


def test_a_worker_registers_with_the_fingerprint_of_what_it_loaded(tmp_path: Path) -> None:
    place = place_of(tmp_path, pair_fingerprint="of the engine")
    engine = load_engine(place.build / "decode", pool_name="decode_0", generation="g")
    settings = TransferSettings(instance="decode_0", generation="g")
    try:
        config = read_engine_config(place.build / "decode")
        hello = hello_of(settings, config, engine, ("shm",), prefill_tokens_per_s=1.0)
    finally:
        engine.shutdown()
    assert hello.fingerprint == "of the engine"
