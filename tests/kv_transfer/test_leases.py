from hypothesis import given
from hypothesis import strategies as st
from trtpd_testing.kv import LAYOUT

from trtpd.kv_transfer.leases import LeaseSlots, SinkLease, SourceLease, is_granted, lease_tag, write_renewal
from trtpd.kv_transfer.pool import SharedPool

LEASE_S = 10.0
DELAYS = st.one_of(st.none(), st.floats(0.0, 30.0))


@given(
    sealed_s=st.floats(0.0, 20.0),
    sends=st.lists(st.tuples(st.floats(0.0, 20.0), DELAYS, DELAYS), max_size=12),
    looks=st.lists(st.floats(0.0, 80.0), min_size=1, max_size=20),
)
def test_the_sinks_lease_ends_first_whatever_is_delayed_or_lost(sealed_s, sends, looks):
    """A send is (gap since the last, delay to the source, delay of its answer); None is a lost message."""
    source, sink = SourceLease(LEASE_S), SinkLease(LEASE_S)
    events, sent_s = [(sealed_s, 0, "seal", 0.0)], 0.0
    for gap_s, there_s, back_s in sends:
        sent_s += gap_s
        if there_s is not None:
            events.append((sent_s + there_s, 1, "received", sent_s))
            if back_s is not None:
                events.append((sent_s + there_s + back_s, 2, "confirmed", sent_s))
    events += [(at_s, 3, "look", 0.0) for at_s in looks]
    received, lapsed = set(), False
    for now_s, _, what, of_s in sorted(events):
        lapsed = lapsed or source.lapsed(now_s)
        if what == "seal":
            source.sealed(now_s)
        elif what == "received" and not lapsed:
            source.received(sent_s=of_s, now_s=now_s)
            received.add(of_s)
        elif what == "confirmed" and of_s in received:
            sink.confirmed(sent_s=of_s)
        assert not (sink.holds(now_s) and lapsed)


@given(times=st.lists(st.floats(0.0, 100.0), min_size=1))
def test_a_renewal_never_shortens_a_lease(times):
    source = SourceLease(LEASE_S)
    source.sealed(0.0)
    until_s = LEASE_S
    for now_s in sorted(times):
        if source.lapsed(now_s):
            break
        source.received(sent_s=now_s / 2, now_s=now_s)
        until_s = max(until_s, now_s)
        assert not source.lapsed(until_s - 1e-6)


def test_repeated_and_older_renewals_do_not_count():
    source = SourceLease(LEASE_S)
    source.sealed(0.0)
    assert source.received(sent_s=1.0, now_s=2.0)
    assert not source.received(sent_s=1.0, now_s=9.0)
    assert not source.received(sent_s=0.5, now_s=9.0)
    assert source.lapsed(12.0)


def test_a_sink_without_a_confirmed_renewal_holds_nothing():
    sink = SinkLease(LEASE_S)
    sink.sent(5.0)
    assert not sink.holds(5.0)
    sink.confirmed(sent_s=5.0)
    assert sink.holds(14.9)
    assert not sink.holds(15.0)


def test_a_sink_renews_several_times_in_a_lease():
    sink = SinkLease(LEASE_S)
    sink.sent(5.0)
    assert 5.0 < sink.due_s() <= 5.0 + LEASE_S / 2


@given(st.integers(0, 1 << 62), st.integers(0, 1000), st.text("abc", max_size=20))
def test_tags_differ_between_attempts_and_generations_and_are_never_zero(request_id, attempt, generation):
    tag = lease_tag(request_id, attempt, generation)
    assert 0 < tag < 1 << 64
    assert tag != lease_tag(request_id, attempt + 1, generation)
    assert tag != lease_tag(request_id, attempt, generation + "x")


def test_a_torn_renewal_is_not_believed():
    pool = SharedPool.create("torn", LAYOUT, 2, generation="g")
    slots, tag = LeaseSlots(pool), lease_tag(1, 1, "g")
    slot = slots.grant(tag)
    assert write_renewal(pool, slot, tag, sent_s=5.0)
    assert slots.sent_s(slot, tag) == 5.0
    pool.leases[slot, 2] += 1
    assert slots.sent_s(slot, tag) is None
    pool.close()


def test_a_suspended_grant_does_not_confirm_renewals():
    pool = SharedPool.create("suspended", LAYOUT, 2, generation="g")
    slots, tag = LeaseSlots(pool), lease_tag(1, 1, "g")
    slot = slots.grant(tag)
    slots.suspend(slot)
    assert not write_renewal(pool, slot, tag, sent_s=5.0)
    slots.regrant(slot, tag)
    assert is_granted(pool, slot, tag)
    pool.close()
