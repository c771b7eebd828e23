"""The leader against an engine, a source and a sink that follow a script: what it tells, frees and holds."""

from __future__ import annotations

import msgspec
import pytest
from trtpd_testing.scripted_engine import ScriptedEngine, ScriptedLink, ScriptedSink, ScriptedSource

from trtpd.errors import CapacityError, EngineError, InternalError, LeaseError, ServeError, TransferError
from trtpd.kv_transfer.base import Visits
from trtpd.kv_transfer.offer import Chunk, Offer, Seal
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import (
    EngineRequest,
    PrefillBegan,
    PrefillChunk,
    PrefillDone,
    RequestKind,
    Sampling,
)
from trtpd.runtime.worker.job_table import DEADLINE_GRACE_S
from trtpd.runtime.worker.leader import REPORT_EVERY_S, Leader
from trtpd.runtime.worker.leader_link import Dismissed, Registered, SessionEnded
from trtpd.runtime.worker.local import LOCAL_IDS
from trtpd.runtime.worker.messages import CancelWork, DrainWork, PullWork, SubmitWork, WithdrawWork

PROMPT = (1, 2, 3, 4, 5)


class Bench:
    """A leader with all its scripted partners, and a clock that stands still."""

    def __init__(self, kv_blocks: int = 16) -> None:
        self.now_s = 100.0
        self.engine = ScriptedEngine(kv_blocks)
        self.source = ScriptedSource()
        self.sink = ScriptedSink()
        self.link = ScriptedLink()
        self.leader = Leader(self.engine, source=self.source, sink=self.sink, link=self.link, clock=lambda: self.now_s)
        self.turn()

    def turn(self, *script):
        """One turn in which the engine reports `script`; what the router was told."""
        self.engine.script += script
        self.leader.turn(0.0)
        self.leader.check_integrity()
        return self.link.events()

    def command(self, *commands):
        self.link.inbox.extend(commands)
        return self.turn()

    @property
    def at_zero(self) -> bool:
        free = self.engine.kv is not None and self.engine.kv.blocks_free == self.engine.kv.num_blocks
        return self.leader.idle and free and not self.source.held and not self.engine.alive


@pytest.fixture
def bench():
    return Bench()


def request(request_id: int = 1, kind: RequestKind = RequestKind.CONTEXT_ONLY, **changes) -> EngineRequest:
    made = EngineRequest(
        request_id=request_id,
        attempt=1,
        kind=kind,
        prompt_ids=PROMPT,
        max_tokens=8,
        sampling=Sampling(seed=3),
    )
    return msgspec.structs.replace(made, **changes)


def submit(request_id: int = 1, kind: RequestKind = RequestKind.CONTEXT_ONLY, **changes) -> SubmitWork:
    return SubmitWork(request=request(request_id, kind, **changes), deadline_in_s=10.0)


def pull(request_id: int = 1, **changes) -> PullWork:
    offer = ScriptedSource().offer((request_id, 1), prompt_tokens=len(PROMPT), blocks=(0, 1))
    work = PullWork(
        request_id=request_id,
        attempt=1,
        request=request(request_id, RequestKind.GENERATION_ONLY),
        offer=msgspec.msgpack.encode(offer),
        chunks=(),
        seal=None,
        deadline_in_s=10.0,
    )
    return msgspec.structs.replace(work, **changes)


def sealed(request_id: int = 1) -> bytes:
    return msgspec.msgpack.encode(
        Seal(request_id=request_id, attempt=1, prompt_tokens=5, first_token=42, first_log_prob=None, seed=3)
    )


def more(request_id: int = 1, **changes) -> PullWork:
    return pull(request_id, request=None, offer=None, **changes)


def began(request_id: int = 1) -> PrefillBegan:
    return PrefillBegan(request_id=request_id, attempt=1, blocks=(4, 5))


def chunk(ready_tokens: int, request_id: int = 1) -> PrefillChunk:
    return PrefillChunk(request_id=request_id, attempt=1, ready_tokens=ready_tokens)


def done(request_id: int = 1, finish: core.FinishReason | None = None) -> PrefillDone:
    return PrefillDone(request_id=request_id, attempt=1, first_index=0, token=42, log_prob=-0.5, finish=finish)


def tokens(request_id: int = 1, finish: core.FinishReason | None = None) -> core.Tokens:
    return core.Tokens(request_id=request_id, attempt=1, first_index=1, ids=(7,), finish=finish)


def drained(request_id: int = 1) -> core.Drained:
    return core.Drained(request_id=request_id, attempt=1)


def kinds(events) -> list[str]:
    return [type(event).__name__ for event in events]


def withdraw(request_id: int = 1) -> WithdrawWork:
    return WithdrawWork(request_id=request_id, attempt=1)


def cancel(request_id: int = 1) -> CancelWork:
    return CancelWork(request_id=request_id, attempt=1)


# Prefill for others


def test_a_prefill_is_offered_published_and_sealed_then_freed_when_withdrawn(bench):
    assert bench.command(submit()) == []
    (offered,) = bench.turn(began())
    assert (offered.blocks, offered.lease_s) == (2, 5.0)
    assert msgspec.msgpack.decode(offered.offer, type=Offer).prompt_tokens == len(PROMPT)
    (ready,) = bench.turn(chunk(4))
    assert msgspec.msgpack.decode(ready.chunk, type=Chunk).ready_tokens == ready.ready_tokens == 4
    (seal,) = bench.turn(done())
    assert (seal.token, seal.log_prob, seal.finish) == (42, -0.5, None)
    assert msgspec.msgpack.decode(seal.seal, type=Seal).seed == 3
    assert bench.command(withdraw()) == [drained()]
    assert bench.engine.calls == [("release", (1, 1))]
    assert bench.at_zero


def test_only_the_last_chunk_of_a_step_is_published_and_none_beside_the_seal(bench):
    bench.command(submit())
    assert kinds(bench.turn(began(), chunk(2), chunk(4))) == ["Offered", "ChunkReady"]
    assert kinds(bench.turn(chunk(5), done())) == ["Sealed"]
    assert bench.source.published == [((1, 1), 4)]


def test_a_prefill_whose_first_token_ends_the_answer_is_sealed_with_that_reason(bench):
    bench.command(submit())
    assert bench.turn(began(), done(finish="stop"))[-1].finish == "stop"
    assert bench.command(withdraw()) == [drained()]
    assert bench.at_zero


def test_a_lapsed_lease_frees_the_kv_and_is_reported_as_drained(bench):
    bench.command(submit())
    bench.turn(began(), done())
    bench.source.lapse = [(1, 1)]
    assert bench.turn() + bench.turn() == [drained()]
    assert bench.at_zero


def test_a_prefill_the_engine_gives_up_ends_its_hold(bench):
    bench.command(submit())
    bench.turn(began())
    failed = core.Rejected(request_id=1, attempt=1, code="engine_failed", reason="nan")
    assert bench.turn(failed) == [failed]
    assert bench.at_zero


@pytest.mark.parametrize("stage", [(), (began(),), (began(), chunk(4)), (began(), done())], ids=len)
@pytest.mark.parametrize("order", [cancel, withdraw])
def test_a_prefill_stopped_at_any_stage_drains_exactly_once(bench, stage, order):
    bench.command(submit())
    bench.turn(*stage)
    assert bench.command(order()) + bench.command(order()) == [drained(), drained()]
    assert bench.at_zero


# Prefill and decode on one engine


def test_local_work_streams_tokens_and_offers_nothing(bench):
    bench.command(submit(kind=RequestKind.CONTEXT_AND_GENERATION))
    assert bench.turn(began(), chunk(4)) == []
    assert bench.turn(tokens()) == [tokens()]
    assert bench.turn(tokens(finish="length")) == [tokens(finish="length")]
    assert bench.at_zero


def test_a_request_no_engine_could_take_is_rejected_for_good(bench):
    (rejected,) = bench.command(submit(prompt_ids=(1000,)))
    assert (rejected.code, rejected.permanent) == ("invalid_argument", True)
    assert bench.at_zero


def test_generation_only_without_an_offer_is_rejected(bench):
    (rejected,) = bench.command(submit(kind=RequestKind.GENERATION_ONLY))
    assert rejected.permanent


# Decode of what others prefilled


def test_a_pull_becomes_a_decoding_sequence_with_the_sealed_token(bench):
    first_chunk = msgspec.msgpack.encode(Chunk(request_id=1, attempt=1, ready_tokens=4))
    assert kinds(bench.command(pull(chunks=(first_chunk,)))) == ["TransferBegun"]
    assert bench.command(more(seal=sealed())) == []
    assert [c.ready_tokens for c in bench.sink.chunks] == [4]
    bench.sink.finish((1, 1))
    (moved,) = bench.turn()
    assert isinstance(moved, core.TransferDone)
    (joined,) = bench.engine.submitted
    assert (joined.kind, joined.first_token) == (RequestKind.GENERATION_ONLY, 42)
    assert bench.turn(tokens(finish="stop")) == [tokens(finish="stop")]
    assert bench.at_zero


def test_a_prefill_the_source_can_not_hold_is_rejected_for_now(bench):
    bench.command(submit())
    bench.source.refusal = CapacityError("no lease slot")
    assert bench.turn(began()) == []
    (refused,) = bench.turn()
    assert (refused.code, refused.reason, refused.permanent) == ("capacity", "no lease slot", False)
    assert bench.at_zero


def test_without_room_a_pull_is_rejected_for_now():
    bench = Bench(kv_blocks=1)
    (rejected,) = bench.command(pull())
    assert (rejected.code, rejected.permanent) == ("no_kv", False)
    assert bench.at_zero


def test_a_failed_pull_gives_its_blocks_back_and_may_be_pulled_again(bench):
    bench.command(pull(seal=sealed()))
    bench.sink.finish((1, 1), error="torn", code="digest_mismatch", retryable=True)
    (failed,) = bench.turn()
    assert (failed.code, failed.reason, failed.retryable) == ("digest_mismatch", "torn", True)
    assert bench.at_zero
    assert kinds(bench.command(pull(seal=sealed()))) == ["TransferBegun"]
    bench.sink.finish((1, 1))
    assert kinds(bench.turn()) == ["TransferDone"]


@pytest.mark.parametrize("error", [LeaseError("gone"), TransferError("unreachable")])
def test_a_pull_the_sink_refuses_fails_and_holds_nothing(bench, error):
    bench.sink.refusal = error
    (failed,) = bench.command(pull())
    assert (failed.code, failed.retryable) == (error.code, error.retryable)
    assert bench.at_zero


def test_a_sink_that_broke_down_leaks_no_blocks(bench):
    bench.sink.refusal = InternalError("this sink is closed")
    (rejected,) = bench.command(pull())
    assert rejected.code == "internal"
    assert bench.at_zero


@pytest.mark.parametrize(
    "changes",
    [
        {"offer": b"\xc1junk"},
        {"request": None},
        {"request": request(2, RequestKind.GENERATION_ONLY)},
        {"request": request(1, RequestKind.CONTEXT_ONLY)},
        {"request": request(1, RequestKind.GENERATION_ONLY, prompt_ids=(1, 2))},
    ],
    ids=["junk offer", "no request", "another request", "another kind", "another prompt"],
)
def test_a_pull_that_contradicts_itself_fails_for_good_and_holds_nothing(bench, changes):
    (failed,) = bench.command(pull(**changes))
    assert isinstance(failed, core.TransferFailed)
    assert not failed.retryable
    assert bench.at_zero


@pytest.mark.parametrize("changes", [{"seal": b"junk"}, {"chunks": (b"junk",)}, {"seal": sealed(2)}])
def test_junk_in_the_middle_of_a_pull_fails_it_once_the_copies_rest(bench, changes):
    bench.command(pull())
    assert bench.command(more(**changes)) == []
    assert not bench.at_zero
    bench.sink.settle()
    (failed,) = bench.turn()
    assert (failed.code, failed.retryable) == ("transfer_failed", False)
    assert bench.at_zero


def test_more_of_an_unknown_pull_is_ignored(bench):
    assert bench.command(more(seal=sealed())) == []
    assert bench.sink.seals == []


def test_a_cancelled_pull_keeps_its_blocks_until_its_copies_rest(bench):
    bench.command(pull(seal=sealed()))
    assert bench.command(cancel(), cancel()) == []
    assert not bench.at_zero
    bench.sink.settle()
    assert bench.turn() == [drained()]
    assert bench.at_zero


def test_a_pull_that_ends_well_just_when_cancelled_is_drained_and_not_decoded(bench):
    bench.command(pull(seal=sealed()))
    bench.command(cancel())
    bench.sink.finish((1, 1))
    assert bench.turn() == [drained()]
    assert bench.engine.submitted == []
    assert bench.at_zero


def test_a_cancelled_decode_is_drained_even_if_it_finished_in_that_step(bench):
    bench.command(submit(kind=RequestKind.CONTEXT_AND_GENERATION))
    bench.engine.script = [tokens(finish="stop")]
    bench.engine.alive.clear()
    assert bench.command(cancel()) == [drained()]
    assert bench.at_zero


@pytest.mark.parametrize("order", [cancel, withdraw])
def test_stopping_the_unknown_is_answered_at_once(bench, order):
    assert bench.command(order(77)) == [drained(77)]


def test_instances_without_a_source_or_sink_say_so():
    link = ScriptedLink()
    leader = Leader(ScriptedEngine(), source=None, sink=None, link=link)
    link.inbox.extend([submit(1), pull(2)])
    leader.turn(0.0)
    assert [(e.code, e.permanent) for e in link.events()] == [("unsupported", False)] * 2


def test_an_engine_that_moves_its_own_kv_is_refused_clearly():
    engine = ScriptedEngine()
    engine.kv = None
    with pytest.raises(EngineError, match="opaque"):
        Leader(engine, source=None, sink=ScriptedSink(), link=ScriptedLink())


# Time, sessions, ends


def test_work_nobody_cancelled_ends_some_time_after_its_deadline(bench):
    bench.command(submit(1), pull(2), submit(3, RequestKind.CONTEXT_AND_GENERATION))
    bench.turn(began(), done())
    bench.now_s += 10.0 + DEADLINE_GRACE_S - 0.1
    assert bench.turn() == []
    bench.now_s += 0.5
    bench.turn()
    bench.sink.settle()
    bench.turn()
    assert bench.at_zero


def test_a_quiet_leader_sends_only_its_load_now_and_then(bench):
    bench.turn()
    assert bench.link.sent == []
    bench.now_s += REPORT_EVERY_S
    bench.leader.turn(0.0)
    ((message, generation),) = bench.link.sent
    assert (message.events, generation) == ((), "g1")


def test_a_changed_load_is_reported_without_an_event(bench):
    bench.engine.alive.add((9, 9))
    bench.leader.turn(0.0)
    ((message, _),) = bench.link.sent
    assert (message.events, message.load.running) == ((), 1)


def test_everything_of_one_step_goes_in_one_message(bench):
    bench.command(submit(1), submit(2), submit(3, RequestKind.CONTEXT_AND_GENERATION))
    bench.engine.script = [began(1), began(2), tokens(3)]
    bench.leader.turn(0.0)
    ((message, _),) = bench.link.sent
    assert [name for name, _ in message.events] == ["Offered", "Offered", "Tokens"]


def test_the_engine_is_not_waited_for_while_there_is_something_to_say(bench):
    bench.link.inbox.append(cancel(77))
    bench.leader.turn(5.0)
    bench.leader.turn(5.0)
    assert bench.engine.timeouts_s[-2:] == [0.0, 5.0]


def test_after_a_session_nothing_of_it_is_left_or_told_before_new_work_starts(bench):
    bench.command(submit(1), pull(2), submit(3, RequestKind.CONTEXT_AND_GENERATION))
    bench.turn(began(1), done(1))
    again = submit(1)
    ended = [SessionEnded("g1", "router gone"), Registered("e2", "g1.000001"), again]
    assert bench.command(*ended) == []
    assert bench.turn() == []
    assert len(bench.engine.submitted) == 2
    bench.sink.settle()
    assert bench.turn() == []
    assert bench.turn() == []
    assert bench.engine.submitted[-1] is again.request
    assert bench.turn(began(1))[0].request_id == 1
    bench.engine.script = [done(1)]
    bench.leader.turn(0.0)
    assert {generation for _, generation in bench.link.sent} == {"g1.000001"}


def test_a_draining_leader_finishes_what_it_has_and_takes_nothing_new(bench):
    bench.command(submit(1))
    rejected = bench.command(DrainWork(), submit(2), pull(3))
    assert [(e.request_id, e.code, e.permanent) for e in rejected] == [
        (2, "draining", False),
        (3, "draining", False),
    ]
    assert kinds(bench.turn(began(1), done(1))) == ["Offered", "Sealed"]
    assert bench.command(withdraw(1)) == [drained(1)]
    assert bench.at_zero


def test_a_key_sent_twice_is_begun_once(bench):
    assert bench.command(submit(1), submit(1)) == []
    assert len(bench.engine.submitted) == 1


def test_an_id_reserved_for_local_requests_is_not_taken_from_a_router(bench):
    assert bench.command(submit(LOCAL_IDS)) == []
    assert bench.engine.submitted == []


def test_a_failed_engine_ends_the_run_after_telling_of_every_job(bench):
    bench.command(submit(1), submit(2, RequestKind.CONTEXT_AND_GENERATION))
    bench.engine.script = [EngineError("step failed")]
    with pytest.raises(EngineError, match="step failed"):
        bench.leader.run()
    told = bench.link.events()
    assert [(e.request_id, e.code, e.permanent) for e in told] == [
        (1, "engine_failed", False),
        (2, "engine_failed", False),
    ]


def test_a_leader_the_router_refuses_ends(bench):
    bench.link.inbox.append(Dismissed("another process is registered"))
    with pytest.raises(ServeError, match="another process"):
        bench.leader.run()


def test_a_stop_waits_for_its_grace_then_ends_the_rest():
    bench = Bench()
    bench.command(submit(1, RequestKind.CONTEXT_AND_GENERATION))
    bench.leader.request_stop(0.0)
    bench.leader.run()
    assert bench.link.events() == [drained()]
    assert bench.at_zero


def test_an_event_for_a_key_never_submitted_is_our_bug(bench):
    bench.engine.script = [tokens(5)]
    with pytest.raises(InternalError, match="not given"):
        bench.leader.turn(0.0)


def test_holds_without_a_job_are_found(bench):
    bench.source.held[(9, 9)] = 1
    with pytest.raises(InternalError, match="holds KV"):
        bench.leader.check_integrity()


def test_who_came_to_the_data_port_in_vain_is_told_with_the_load(bench):
    bench.source.came = Visits(strangers=3, refused=1)
    bench.leader.turn(0.0)
    load = bench.link.sent[-1][0].load
    assert (load.strangers, load.stalled, load.refused) == (3, 0, 1)


def test_a_sink_whose_thread_has_ended_ends_the_leader(bench, monkeypatch):
    def broken():
        raise InternalError("the thread that pulls KV has ended")

    monkeypatch.setattr(bench.sink, "progress", broken)
    with pytest.raises(InternalError, match="has ended"):
        bench.leader.run()
