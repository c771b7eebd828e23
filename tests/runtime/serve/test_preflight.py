from __future__ import annotations

import os
import socket

import pytest
from msgspec import structs

from trtpd.build.manifest import Manifest, RoleEntry
from trtpd.errors import InputError, ServeError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.serve import preflight
from trtpd.runtime.serve.preflight import (
    Ports,
    check_ports,
    check_repository,
    check_settings,
    check_shared_memory,
)
from trtpd.runtime.serve.serve_options import ServeOptions, check_reachable, check_router, models_of
from trtpd.runtime.worker.roles import home_role
from trtpd.runtime.worker.sockets import make_keys

HOST = "127.0.0.1"


def test_port_0_becomes_a_free_port_and_no_two_are_equal():
    ports = check_ports(HOST, Ports(http=0, grpc=0, metrics=0))
    assert len({ports.http, ports.grpc, ports.metrics, 0}) == 4


def test_a_port_in_use_is_named_with_its_holder_and_the_mend():
    with socket.create_server((HOST, 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(InputError, match=rf"^port {port} .*pid {os.getpid()}.*another with --grpc PORT"):
            check_ports(HOST, Ports(http=0, grpc=port, metrics=0))


def test_all_ports_in_use_are_named_at_once():
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        http, metrics = one.getsockname()[1], other.getsockname()[1]
        with pytest.raises(InputError, match=rf"^ports {http}, {metrics} \(.*others with --http PORT --metrics PORT"):
            check_ports(HOST, Ports(http=http, grpc=0, metrics=metrics))


def test_equal_ports_are_bad_input():
    with pytest.raises(InputError, match="must differ"):
        check_ports(HOST, Ports(http=7001, grpc=7001, metrics=0))


@pytest.mark.parametrize("host", ["203.0.113.1", "foo.invalid", "a..b"])
def test_a_host_that_is_not_ours_is_refused_and_no_port_blamed(host):
    with pytest.raises(InputError, match=r"--host .* can't listen there") as refusal:
        check_ports(host, Ports(http=8000, grpc=8001, metrics=8002))
    assert host in str(refusal.value)
    assert "port" not in str(refusal.value)
    assert "while attempting" not in str(refusal.value)


def manifest():
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=4, tokens_per_block=4, dtype="f32")
    roles = {
        role: RoleEntry(
            directory=role, fingerprint="f", engine="emulated", precision="f32", layout=layout, instances=names
        )
        for role, names in {"prefill": ("prefill_0",), "decode": ("decode_0", "decode_1")}.items()
    }
    return Manifest(format=1, trtpd="0", model="m", pair_fingerprint="p", roles=roles, settings={})


def test_the_router_model_is_loaded_last():
    assert models_of(manifest(), ()) == ["prefill_0", "decode_0", "decode_1", "pd"]
    assert models_of(manifest(), ("pd", "decode_1")) == ["decode_1", "pd"]


def test_a_model_the_build_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(InputError, match=r"decode_7.*prefill_0, decode_0, decode_1, pd"):
        models_of(manifest(), ("decode_7",))


def test_too_little_shared_memory_is_told_in_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "pool_bytes", lambda *_: {"decode_0": 1 << 50})
    with pytest.raises(ServeError, match=r"/dev/shm has .* MB free, serving needs .* MB.*shm-size"):
        check_shared_memory(tmp_path, manifest(), ["decode_0"])


def test_a_build_without_a_models_folder_is_refused_with_the_mend(tmp_path):
    for name in ("pd", "prefill_0"):
        (tmp_path / "model_repo" / name).mkdir(parents=True)
        (tmp_path / "model_repo" / name / "config.pbtxt").touch()
    check_repository(tmp_path, ["prefill_0", "pd"])
    with pytest.raises(InputError, match=r"no model decode_0; .*trtpd build .* --force"):
        check_repository(tmp_path, ["prefill_0", "decode_0", "pd"])


@pytest.mark.parametrize(
    "router", ["banana", "tcp://:5577", "tcp://127.0.0.1:99999", "udp://x:1", "tcp://10.0.0.1:5577"]
)
def test_a_router_that_can_not_be_is_bad_input_before_anything_starts(router, tmp_path):
    with pytest.raises(InputError, match="--router: address"):
        check_router(ServeOptions(build=tmp_path, router=router), ["prefill_0"])


def test_keys_that_are_not_there_or_of_another_host_are_bad_input(tmp_path):
    with pytest.raises(InputError, match=r"--keys .*trtpd keys"):
        check_router(ServeOptions(build=tmp_path, keys=tmp_path / "none"), ["prefill_0"])
    make_keys(tmp_path / "keys")
    options = ServeOptions(build=tmp_path, router="tcp://10.0.0.1:5577", keys=tmp_path / "keys")
    check_router(options, ["prefill_0", "pd"])
    (tmp_path / "keys" / "router.key_secret").unlink()
    check_router(options, ["prefill_0"])
    with pytest.raises(InputError, match=r"has no router\.key_secret"):
        check_router(options, ["pd"])


def test_settings_edited_by_hand_stop_a_server_before_it_starts(tmp_path):
    edited = structs.replace(manifest(), settings={"model": "m", "pools": {"mixed": {}, "elastic": 3}})
    with pytest.raises(InputError, match=r"manifest\.json: its settings: pools\.elastic: is 3.*build it again"):
        check_settings(tmp_path, edited)


@pytest.mark.parametrize("only", [("pd",), ("prefill_0", "pd"), ("decode_1", "pd")])
def test_a_router_that_no_instance_could_join_is_bad_input(only, tmp_path):
    here = {name: home_role(manifest(), name) for name in only if name != "pd"}
    with pytest.raises(InputError, match=r"--only .*--router ADDR"):
        check_reachable(ServeOptions(build=tmp_path, only=only), only, here)
    check_reachable(ServeOptions(build=tmp_path, only=only, router="tcp://127.0.0.1:5577"), only, here)
    both = {"prefill_0": home_role(manifest(), "prefill_0"), "decode_0": home_role(manifest(), "decode_0")}
    check_reachable(ServeOptions(build=tmp_path), [*both, "pd"], both)
