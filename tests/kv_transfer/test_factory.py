import pytest
from trtpd_testing.kv import LAYOUT

from trtpd.errors import InternalError, TransferError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.factory import TRANSPORTS, choose, transport
from trtpd.kv_transfer.pool import SharedPool
from trtpd.kv_transfer.ranks import RankPools

SETTINGS = TransferSettings(instance="prefill_0", generation="g")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_makes_both_ends(name):
    pool = SharedPool.create("factory", LAYOUT, 2, generation="g")
    pools = RankPools([pool])
    source, sink = transport(name).source(pools, SETTINGS), transport(name).sink(pools, SETTINGS, wake=lambda: None)
    assert source.holds() == {}
    assert not sink.busy()
    sink.close()
    source.close()
    pool.close()


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(TransferError, match=r"'pigeon': use one of .*shm"):
        transport("pigeon")


def test_what_both_ends_can_do_is_chosen():
    assert choose(["shm"], ["tcp", "shm"]) == "shm"
    assert choose(["tcp", "shm"], ["tcp", "shm"], "tcp") == "tcp"


@pytest.mark.parametrize(
    ("offered", "accepted", "forced"), [([], ["shm"], None), (["tcp"], ["shm"], None), (["shm"], ["shm"], "tcp")]
)
def test_a_pair_without_a_common_transport_is_refused_with_both_lists(offered, accepted, forced):
    with pytest.raises(TransferError, match=r"prefill offers .* decode accepts shm"):
        choose(offered, accepted, forced)


@pytest.mark.parametrize("wrong", [{"lease_s": 0.0}, {"lease_s": 1e9}, {"digest_every": -1}, {"one_piece_tokens": -1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InternalError):
        TransferSettings(instance="prefill_0", generation="g", **wrong)
