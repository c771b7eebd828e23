from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtpd_testing.gpu_hosts import device, dgx, host, islands, mig, pcie

from trtpd.build.gpu_placement import GpuGroup, place_groups, remarks_on
from trtpd.build.gpu_topology import Link, Topology, describe_links
from trtpd.build.manifest import RoleName
from trtpd.errors import InputError


def groups(*asked: tuple[RoleName, int]) -> list[GpuGroup]:
    counted: dict[str, int] = {}
    found = []
    for role, ranks in asked:
        found.append(GpuGroup(name=f"{role}_{counted.setdefault(role, 0)}", role=role, ranks=ranks, sm=None))
        counted[role] += 1
    return found


def test_a_host_whose_gpus_are_all_alike_is_filled_from_the_first() -> None:
    placed = place_groups(dgx(), groups(("prefill", 2), ("decode", 4)))
    assert placed == {"prefill_0": (4, 5), "decode_0": (0, 1, 2, 3)}
    assert remarks_on(dgx(), placed) == []


def test_a_group_stays_within_an_island() -> None:
    placed = place_groups(islands(), groups(("prefill", 1), ("prefill", 1), ("decode", 4), ("prefill", 2)))
    assert placed["decode_0"] == (0, 1, 2, 3)
    assert islands().worst(placed["prefill_2"], placed["prefill_2"]) == Link.NVLINK


def test_each_decode_is_in_the_island_of_a_prefill() -> None:
    topology = islands()
    placed = place_groups(topology, groups(("prefill", 2), ("prefill", 2), ("decode", 2), ("decode", 2)))
    for number in (0, 1):
        near = [topology.worst(placed[f"decode_{number}"], placed[f"prefill_{other}"]) for other in (0, 1)]
        assert min(near) == Link.NVLINK


def test_over_pcie_a_pair_is_below_one_switch() -> None:
    topology = pcie()
    assert place_groups(topology, groups(("prefill", 1), ("decode", 1))) == {"prefill_0": (0,), "decode_0": (1,)}
    two = place_groups(topology, groups(("prefill", 2), ("decode", 2)))
    assert two == {"prefill_0": (0, 1), "decode_0": (2, 3)}
    assert remarks_on(topology, two) == [
        f"{name}: its GPUs ({pair}) have a PCIe switch between them and no NVLink, which every layer waits for"
        for name, pair in (("prefill_0", "0, 1"), ("decode_0", "2, 3"))
    ]


def test_mig_instances_take_groups_of_one_rank() -> None:
    assert place_groups(mig(), groups(("prefill", 1), ("decode", 1))) == {"prefill_0": (0,), "decode_0": (1,)}
    with pytest.raises(InputError, match=r"no peer access, can't make a group of 2; use tp 1"):
        place_groups(mig(), groups(("prefill", 2), ("decode", 1)))


def test_too_few_gpus_are_refused_with_what_was_asked_and_what_is_there() -> None:
    with pytest.raises(InputError) as caught:
        place_groups(dgx(4), groups(("prefill", 2), ("decode", 4)))
    assert str(caught.value) == (
        "GPUs asked for: prefill_0 2, decode_0 4 (6 together); here: 4 x NVIDIA H100 80GB HBM3 (SM 90, 80 GiB), 0 left "
        "for prefill_0; lower tp or instances of a pool, serve some of them on another host (--only), or let groups "
        "share GPUs by a tensorrt_llm.free_gpu_memory_fraction of at most 0.50"
    )


def test_a_group_larger_than_the_host_is_refused() -> None:
    with pytest.raises(InputError, match=r"decode_0 8 .* too few for decode_0; lower its tp"):
        place_groups(dgx(4), groups(("decode", 8)))


def test_an_engine_goes_only_to_gpus_it_was_built_for() -> None:
    mixed = host([device(0, name="NVIDIA L40S", sm=89), device(1), device(2)], lambda a, b: Link.BRIDGE)
    one = GpuGroup(name="prefill_0", role="prefill", ranks=2, sm=90)
    assert place_groups(mixed, [one]) == {"prefill_0": (1, 2)}
    with pytest.raises(InputError, match=r"1 x NVIDIA L40S .*2 of them SM 90, which prefill_0 was built for"):
        place_groups(mixed, [GpuGroup(name="prefill_0", role="prefill", ranks=3, sm=90)])


def test_gpus_are_shared_only_when_allowed_and_only_when_none_is_left() -> None:
    asked = groups(("prefill", 1), ("decode", 1))
    assert place_groups(dgx(1), asked, per_device=2) == {"prefill_0": (0,), "decode_0": (0,)}
    assert place_groups(dgx(2), asked, per_device=2) == {"prefill_0": (0,), "decode_0": (1,)}
    with pytest.raises(InputError, match="1 x NVIDIA H100"):
        place_groups(dgx(1), asked)


SIZES = st.lists(st.tuples(st.sampled_from(["prefill", "decode", "mixed"]), st.sampled_from([1, 2, 4])), max_size=6)
HOSTS = st.sampled_from([dgx(), islands(), islands(4, 2), pcie(), dgx(2)])


@given(HOSTS, SIZES)
def test_placements_are_disjoint_whole_and_never_split_an_island_without_need(
    topology: Topology, asked: list[tuple[RoleName, int]]
) -> None:
    wanted = groups(*asked)
    enough = sum(one.ranks for one in wanted) <= len(topology.devices)
    if not enough:
        with pytest.raises(InputError):
            place_groups(topology, wanted)
        return
    placed = place_groups(topology, wanted)
    taken = [index for devices in placed.values() for index in devices]
    assert len(set(taken)) == len(taken)
    assert all(len(placed[one.name]) == one.ranks for one in wanted)
    largest = max((len(island) for island in topology.islands()), default=1)
    for one in wanted:
        if one.ranks <= largest:
            assert topology.worst(placed[one.name], placed[one.name]) <= Link.NVLINK


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (dgx(), "NVLink between all"),
        (islands(), "NVLink within 0-3; NVLink within 4-7; host memory across sockets between them"),
        (pcie(), "a PCIe switch or host memory across sockets between all"),
        (dgx(1), "nothing to link"),
        (Topology(), "nothing to link"),
    ],
)
def test_links_are_described_in_words(topology: Topology, said: str) -> None:
    assert describe_links(topology) == said


def test_links_are_ordered_from_near_to_far() -> None:
    assert all(near < far for near, far in pairwise(Link))
