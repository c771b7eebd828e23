"""RouterCore driven by hand: every event is written out, every command looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.events import (
    Arrived,
    ChunkReady,
    Command,
    Drained,
    Event,
    InstanceEvent,
    Load,
    Lost,
    Offered,
    Rejected,
    Sealed,
    Step,
    Submit,
    Tokens,
    TransferBegun,
    TransferDone,
    TransferFailed,
    WakeAt,
)
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore

C = TypeVar("C", bound=Command)


class Rig:
    """A router, its instances' generations and a clock that only moves when told. `said` is the last answer."""

    def __init__(self, *specs: WorkerSpec, policy: Policy | None = None, seed: int = 0) -> None:
        self.core = RouterCore(policy, seed=seed)
        self.now_s = 100.0
        self.specs = {spec.name: spec for spec in specs}
        self.generations: dict[str, str] = {}
        self.said: list[Command] = []
        for spec in specs:
            self.hello(spec.name)

    def tell(self, event: Event) -> list[Command]:
        """One event; returns the commands but for wake-ups, and checks every invariant."""
        self.said = self.core.handle(self.now_s, event)
        self.core.check_integrity()
        return [command for command in self.said if not isinstance(command, WakeAt)]

    def hello(self, name: str, generation: str = "1") -> list[Command]:
        self.generations[name] = generation
        return self.tell(self.specs[name].hello(generation))

    def lost(self, name: str) -> list[Command]:
        return self.tell(Lost(instance=name, generation=self.generations[name], reason="killed"))

    def arrive(self, request_id: int = 1, *, prompt: int = 100, out: int = 10, **more: Any) -> list[Command]:
        more.setdefault("deadline_s", self.now_s + 60.0)
        return self.tell(Arrived(request_id=request_id, prompt_tokens=prompt, max_tokens=out, **more))

    def step(self, name: str, *events: InstanceEvent, free: int | None = None, generation: str = "") -> list[Command]:
        blocks = self.specs[name].kv_blocks if free is None else free
        return self.tell(
            Step(
                instance=name,
                generation=generation or self.generations[name],
                events=events,
                load=Load(kv_blocks_free=blocks),
            )
        )

    def holds(self) -> dict[str, int]:
        """In flight and closing, per instance that has any."""
        views = self.core.snapshot()["instances"]
        return {v["name"]: v["in_flight"] + v["closing"] for v in views if v["in_flight"] + v["closing"]}


def only(commands: Sequence[Command], kind: type[C]) -> C:
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {commands}"
    return found[0]


def prefill(name: str = "p0", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=name, role="prefill", **more)


def decode(name: str = "d0", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=name, role="decode", **more)


def mixed(name: str = "m0", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=name, role="mixed", **more)


def offered(request_id: int = 1, attempt: int = 1) -> Offered:
    return Offered(request_id=request_id, attempt=attempt, blocks=4, lease_s=30.0, offer=b"offer%d" % attempt)


def chunk(ready_tokens: int, request_id: int = 1, attempt: int = 1) -> ChunkReady:
    return ChunkReady(
        request_id=request_id, attempt=attempt, ready_tokens=ready_tokens, chunk=b"chunk%d" % ready_tokens
    )


def sealed(request_id: int = 1, attempt: int = 1, *, first_index: int = 0, **more: Any) -> Sealed:
    more.setdefault("finish", None)
    return Sealed(
        request_id=request_id,
        attempt=attempt,
        first_index=first_index,
        token=1000 + first_index,
        log_prob=-0.5,
        seal=b"seal%d" % attempt,
        **more,
    )


def begun(request_id: int = 1, attempt: int = 1) -> TransferBegun:
    return TransferBegun(request_id=request_id, attempt=attempt)


def done(request_id: int = 1, attempt: int = 1) -> TransferDone:
    return TransferDone(
        request_id=request_id, attempt=attempt, bytes_moved=4096, chunks=2, seconds=0.02, exposed_s=0.01, path="shm"
    )


def failed(request_id: int = 1, attempt: int = 1, *, retryable: bool = True) -> TransferFailed:
    return TransferFailed(
        request_id=request_id, attempt=attempt, code="digest_mismatch", reason="a digest differs", retryable=retryable
    )


def tokens(first_index: int, count: int = 1, request_id: int = 1, attempt: int = 1, **more: Any) -> Tokens:
    ids = tuple(1000 + first_index + offset for offset in range(count))
    return Tokens(request_id=request_id, attempt=attempt, first_index=first_index, ids=ids, **more)


def drained(request_id: int = 1, attempt: int = 1) -> Drained:
    return Drained(request_id=request_id, attempt=attempt)


def rejected(request_id: int = 1, attempt: int = 1, *, code: str = "capacity", permanent: bool = False) -> Rejected:
    return Rejected(request_id=request_id, attempt=attempt, code=code, reason="full", permanent=permanent)


def to_sealed(rig: Rig, request_id: int = 1, **more: Any) -> list[Command]:
    """A short prompt, placed and sealed: the sink has been told everything. Returns what the seal brought."""
    submit = only(rig.arrive(request_id, **more), Submit)
    attempt = submit.attempt
    rig.step(submit.instance, offered(request_id, attempt))
    return rig.step(submit.instance, sealed(request_id, attempt))


def to_decoding(rig: Rig, request_id: int = 1, *, source: str = "p0", sink: str = "d0", **more: Any) -> None:
    """A short prompt, handed over; prefill has freed its copy."""
    to_sealed(rig, request_id, **more)
    rig.step(sink, begun(request_id), done(request_id))
    rig.step(source, drained(request_id))
