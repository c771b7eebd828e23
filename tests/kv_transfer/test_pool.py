import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trtpd.errors import CapacityError, InternalError, LayoutError, LeaseError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import PoolAddress, SharedPool, leftovers, sweep

LAYOUT = KVLayout(num_layers=2, kv_heads=3, head_dim=8, tokens_per_block=4, dtype="f32")

CREATE = textwrap.dedent("""
    import sys, time
    import msgspec
    from trtpd.kv_transfer.layout import KVLayout
    from trtpd.kv_transfer.pool import SharedPool
    layout = msgspec.json.decode(sys.argv[1], type=KVLayout)
    pool = SharedPool.create("child", layout, 8, generation="child-1")
    pool.keys[0][3] = 7
    print(msgspec.json.encode(pool.address).decode(), flush=True)
    time.sleep(60)
""")

ATTACH = textwrap.dedent("""
    import sys
    import msgspec
    from trtpd.kv_transfer.layout import KVLayout
    from trtpd.kv_transfer.pool import PoolAddress, SharedPool
    layout = msgspec.json.decode(sys.argv[1], type=KVLayout)
    pool = SharedPool.attach(msgspec.json.decode(sys.argv[2], type=PoolAddress), layout)
    print(float(pool.values[1][5].sum()))
""")


def child(code: str, *args: bytes) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-P", "-c", code, *args], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def pool():
    made = SharedPool.create("test", LAYOUT, 8, generation="g1")
    yield made
    made.close()


@pytest.fixture
def dead_pool():
    """The address of a pool whose process was killed."""
    with child(CREATE, msgspec.json.encode(LAYOUT)) as process:
        try:
            assert process.stdout is not None
            address = msgspec.json.decode(process.stdout.readline(), type=PoolAddress)
        finally:
            process.kill()
    yield address
    Path("/dev/shm", address.name).unlink(missing_ok=True)


def test_arrays_have_the_shape_of_the_layout_and_start_at_zero(pool):
    assert len(pool.keys) == len(pool.values) == 2
    assert all(a.shape == (8, 3, 4, 8) and a.dtype == np.float32 and not a.any() for a in pool.keys + pool.values)


@pytest.mark.parametrize(("dtype", "held"), [("f32", np.float32), ("bf16", np.uint16), ("f16", np.float16)])
def test_each_dtype_is_held_in_its_width(dtype, held):
    pool = SharedPool.create("dtype", replace(LAYOUT, dtype=dtype), 2, generation="g")
    assert pool.keys[0].dtype == held
    pool.close()


def test_arrays_do_not_overlap(pool):
    for i, array in enumerate(pool.keys + pool.values, start=1):
        array[:] = i
    pool.bump(range(8))
    pool.leases[:] = 99
    assert [set(a.ravel().tolist()) for a in pool.keys + pool.values] == [{1.0}, {2.0}, {3.0}, {4.0}]


def test_an_attached_pool_sees_writes_and_cannot_write(pool):
    other = SharedPool.attach(pool.address, LAYOUT)
    pool.keys[1][2] = 5
    assert other.keys[1][2].min() == 5
    with pytest.raises(ValueError, match="read-only"):
        other.keys[1][2] = 6
    with pytest.raises(InternalError):
        other.bump([1])
    other.close()


def test_epochs_are_seen_by_others_and_count_each_free(pool):
    other = SharedPool.attach(pool.address, LAYOUT)
    pool.bump([2, 3])
    pool.bump([3])
    assert other.epochs_of([1, 2, 3]) == pool.epochs_of([1, 2, 3]) == (0, 1, 2)
    other.close()


def test_closing_unlinks_once_and_others_notice(pool):
    other = SharedPool.attach(pool.address, LAYOUT)
    assert not other.gone()
    pool.close()
    pool.close()
    assert other.gone()
    assert not Path("/dev/shm", pool.address.name).exists()
    other.close()


def test_an_array_outlives_the_close_of_its_pool(pool):
    array = pool.keys[0]
    array[1] = 3
    pool.close()
    assert array[1].max() == 3


def test_a_pool_of_another_generation_is_refused(pool):
    with pytest.raises(LeaseError, match="restarted"):
        SharedPool.attach(msgspec.structs.replace(pool.address, generation="g2"), LAYOUT)


def test_a_pool_of_another_layout_is_refused(pool):
    with pytest.raises(LayoutError):
        SharedPool.attach(pool.address, replace(LAYOUT, head_dim=16))
    with pytest.raises(LayoutError):
        SharedPool.attach(pool.address, replace(LAYOUT, head_dim=4, tokens_per_block=8))


@pytest.mark.parametrize("name", ["", "../etc/passwd", "trtpd-x", "/dev/shm/x", "other.1.1.00000000"])
def test_a_name_that_is_no_pool_is_refused(pool, name):
    with pytest.raises(LeaseError):
        SharedPool.attach(msgspec.structs.replace(pool.address, name=name), LAYOUT)


def test_a_pool_that_is_gone_is_refused(pool):
    pool.close()
    with pytest.raises(LeaseError, match="gone"):
        SharedPool.attach(pool.address, LAYOUT)


def test_no_room_is_an_error_with_both_numbers_and_leaves_no_file():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(CapacityError, match=r"needs \d+ bytes of /dev/shm, which has \d+ free .*--shm-size"):
        SharedPool.create("huge", LAYOUT, 1 << 40, generation="g")
    assert set(os.listdir("/dev/shm")) == before


def test_a_second_pool_of_the_same_name_and_generation_is_a_bug(pool):
    with pytest.raises(InternalError, match="already"):
        SharedPool.create("test", LAYOUT, 8, generation="g1")


def test_a_rank_holds_its_own_heads_and_layers():
    layout = replace(LAYOUT, tp=2, pp=2)
    pool = SharedPool.create("rank", layout, 2, generation="g", tp_rank=1, pp_rank=0)
    assert len(pool.keys) == 1
    assert pool.keys[0].shape[1] == 1
    other = SharedPool.attach(pool.address, layout)
    assert other.keys[0].shape == pool.keys[0].shape
    other.close()
    pool.close()


def test_sweep_removes_only_pools_of_dead_creators(pool, dead_pool):
    assert [path.name for path in leftovers("trtpd-child.")] == [dead_pool.name]
    assert sweep("trtpd-child.") == [dead_pool.name]
    assert leftovers("trtpd-child.") == []
    assert Path("/dev/shm", pool.address.name).exists()


def test_sweep_leaves_a_pool_whose_lock_is_held_though_its_pid_is_unknown(pool):
    start = pool.address.name.rsplit(".", 3)
    foreign = Path("/dev/shm", f"{start[0]}.4000000.1.{start[3]}")
    os.link(Path("/dev/shm", pool.address.name), foreign)
    try:
        assert leftovers("trtpd-test.") == []
        assert sweep("trtpd-test.") == []
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_a_killed_creator_is_noticed_though_its_file_is_there(dead_pool):
    other = SharedPool.attach(dead_pool, LAYOUT)
    assert other.gone()
    assert other.keys[0][3].min() == 7
    other.close()


def test_a_process_that_attached_does_not_unlink_when_it_exits(pool):
    pool.values[1][5] = 1
    process = child(ATTACH, msgspec.json.encode(LAYOUT), msgspec.json.encode(pool.address))
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, float(out)) == (0, 96.0)
    assert Path("/dev/shm", pool.address.name).exists()
