"""The leader of an engine that moves its KV itself, with the real opaque source and sink around a scripted engine."""

from __future__ import annotations

import msgspec
import pytest
from trtpd_testing.scripted_engine import LAYOUT, ScriptedEngine, ScriptedLink

from trtpd.errors import EngineError, RequestError, TransferError
from trtpd.kv_transfer.base import TransferSettings
from trtpd.kv_transfer.offer import Offer
from trtpd.kv_transfer.opaque import OpaqueSink, OpaqueSource
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import (
    EngineRequest,
    KVArrived,
    PrefillBegan,
    PrefillDone,
    RequestKind,
    Sampling,
    SelfMovingEngine,
)
from trtpd.runtime.worker.assembly import transports_between
from trtpd.runtime.worker.leader import Leader
from trtpd.runtime.worker.messages import CancelWork, PullWork, SubmitWork, WithdrawWork

PROMPT = (1, 2, 3, 4, 5)


class MovingEngine(ScriptedEngine):
    capabilities = core.Capabilities(
        chunk_events=False, release=False, repull=False, digests=False, seeded_resume=False
    )
    layout = LAYOUT

    def __init__(self) -> None:
        super().__init__()
        self.kv = None
        self.state = b"state"
        self.room = True
        self.refusal: Exception | None = None

    def hand_off_of(self, key: tuple[int, int]) -> bytes:
        return self.state

    def has_room(self, tokens: int) -> bool:
        return self.room

    def submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        super().submit(request)


class Bench:
    """A leader of such an engine that both prefills and decodes."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.engine = MovingEngine()
        settings = TransferSettings(instance="mixed_0", generation="g", lease_s=5.0)
        self.source = OpaqueSource(LAYOUT, settings, state_of=self.engine.hand_off_of, clock=lambda: self.now_s)
        self.sink = OpaqueSink(LAYOUT)
        self.link = ScriptedLink()
        self.leader = Leader(self.engine, source=self.source, sink=self.sink, link=self.link, clock=lambda: self.now_s)
        self.turn()

    def turn(self, *script):
        self.engine.script += script
        self.leader.turn(0.0)
        self.leader.check_integrity()
        return self.link.events()

    def command(self, *commands):
        self.link.inbox.extend(commands)
        return self.turn()

    def prefilled(self) -> tuple[bytes, bytes]:
        """An offer and its seal, of request 1."""
        self.command(SubmitWork(request=request(RequestKind.CONTEXT_ONLY), deadline_in_s=60.0))
        offered, sealed = self.turn(
            PrefillBegan(request_id=1, attempt=1, blocks=()),
            PrefillDone(request_id=1, attempt=1, first_index=0, token=42, log_prob=None, finish=None),
        )
        return offered.offer, sealed.seal

    @property
    def at_zero(self) -> bool:
        return self.leader.idle and not self.source.holds() and not self.engine.alive


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(kind: RequestKind, request_id: int = 1) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, attempt=1, kind=kind, prompt_ids=PROMPT, max_tokens=8, sampling=Sampling()
    )


def pulled(bench: Bench, offer: bytes, seal: bytes | None):
    """Request 1 pulled by a decode instance."""
    return bench.command(
        PullWork(
            request_id=1,
            attempt=1,
            request=request(RequestKind.GENERATION_ONLY),
            offer=offer,
            chunks=(),
            seal=seal,
            deadline_in_s=60.0,
        )
    )


def drained() -> core.Drained:
    return core.Drained(request_id=1, attempt=1)


def test_an_offer_carries_the_engines_state_and_no_blocks(bench):
    offer = msgspec.msgpack.decode(bench.prefilled()[0], type=Offer)
    assert (offer.transport, offer.opaque, offer.blocks) == ("opaque", b"state", ())
    assert bench.source.holds() == {(1, 1): 2}


def test_what_was_delivered_is_released_and_what_was_not_is_cancelled():
    for command, how in ((WithdrawWork, "release"), (CancelWork, "cancel")):
        bench = Bench()
        bench.prefilled()
        assert bench.command(command(request_id=1, attempt=1)) == [drained()]
        assert bench.engine.calls == [(how, (1, 1))]
        assert bench.at_zero


def test_a_state_that_can_not_travel_ends_that_request_alone(bench):
    bench.engine.state = b""
    bench.command(SubmitWork(request=request(RequestKind.CONTEXT_ONLY), deadline_in_s=60.0))
    events = bench.turn(
        PrefillBegan(request_id=1, attempt=1, blocks=()),
        PrefillDone(request_id=1, attempt=1, first_index=0, token=42, log_prob=None, finish=None),
    )
    events += bench.turn()
    assert [(type(event).__name__, event.code) for event in events] == [("Rejected", "transfer_failed")]
    assert bench.at_zero


def test_a_transfer_is_done_when_the_engine_says_that_the_kv_is_there():
    offer, seal = Bench().prefilled()
    bench = Bench()
    assert [type(event).__name__ for event in pulled(bench, offer, None)] == ["TransferBegun"]
    assert bench.engine.submitted == []
    later = PullWork(request_id=1, attempt=1, request=None, offer=None, chunks=(), seal=seal, deadline_in_s=60.0)
    assert bench.command(later) == []
    (submitted,) = bench.engine.submitted
    assert (submitted.hand_off, submitted.first_token) == (b"state", 42)
    tokens = core.Tokens(request_id=1, attempt=1, first_index=1, ids=(7,), finish="length")
    done, told = bench.turn(KVArrived(request_id=1, attempt=1, bytes_moved=640, seconds=0.5), tokens)
    assert (done.bytes_moved, done.seconds, done.path) == (640, 0.5, "opaque")
    assert told == tokens
    assert bench.at_zero


def test_kv_that_does_not_come_is_a_failed_transfer_that_can_not_be_repeated():
    offer, seal = Bench().prefilled()
    bench = Bench()
    pulled(bench, offer, seal)
    (failed,) = bench.turn(core.Rejected(request_id=1, attempt=1, code="transfer_timeout", reason="late"))
    assert (failed.code, failed.retryable) == ("transfer_timeout", False)
    assert bench.at_zero


def test_a_fetch_can_be_cancelled():
    offer, seal = Bench().prefilled()
    bench = Bench()
    pulled(bench, offer, seal)
    assert bench.command(CancelWork(request_id=1, attempt=1)) == [drained()]
    assert bench.engine.calls == [("cancel", (1, 1))]
    assert bench.at_zero


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [(TransferError("no"), "TransferFailed", "transfer_failed"), (RequestError("no"), "Rejected", "invalid_argument")],
)
def test_a_hand_off_that_the_engine_refuses_leaves_nothing(refusal, kind, code):
    offer, seal = Bench().prefilled()
    bench = Bench()
    bench.engine.refusal = refusal
    _, ended = pulled(bench, offer, seal)
    assert (type(ended).__name__, ended.code) == (kind, code)
    assert bench.at_zero


def test_a_pull_that_finds_no_room_is_refused_before_it_begins():
    offer, seal = Bench().prefilled()
    bench = Bench()
    bench.engine.room = False
    (rejected,) = pulled(bench, offer, seal)
    assert (rejected.code, rejected.permanent) == ("no_kv", False)
    assert bench.at_zero


def test_an_offer_of_our_own_transports_is_refused(bench):
    offer = msgspec.structs.replace(
        msgspec.msgpack.decode(bench.prefilled()[0], type=Offer),
        transport="shm", opaque=b"", blocks=(0, 1), epochs=(0, 0), address=b"x",
    )  # fmt: skip
    other = Bench()
    (failed,) = pulled(other, msgspec.msgpack.encode(offer), None)
    assert "over 'shm', this sink pulls over 'opaque'" in failed.reason


def test_a_lapsed_lease_waits_for_the_engine(bench):
    bench.prefilled()
    bench.now_s += 5.1
    assert bench.turn() == []
    assert bench.engine.calls == [("cancel", (1, 1))]
    assert bench.turn() == [drained()]


def test_such_an_engine_moves_kv_by_its_own_transport_and_no_other():
    engine, settings = MovingEngine(), TransferSettings(instance="p", generation="g")
    assert isinstance(engine, SelfMovingEngine)
    assert transports_between(engine, settings) == ("opaque",)
    with pytest.raises(TransferError, match=r"transfer\.path is 'tcp'"):
        transports_between(engine, TransferSettings(instance="p", generation="g", path="tcp"))
    assert transports_between(ScriptedEngine(), settings) == ("shm",)


def test_an_engine_with_neither_blocks_nor_a_transport_is_refused():
    engine = ScriptedEngine()
    engine.kv = None
    with pytest.raises(EngineError, match="opaque"):
        Leader(engine, source=None, sink=OpaqueSink(LAYOUT), link=ScriptedLink())
