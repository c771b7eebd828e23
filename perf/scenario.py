"""What a simulation is given: clients, faults and a network. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One client: what it asks for, and whether it leaves early (`leaves_after_s`) or its text meets a stop
    string (`stops_at_index`). `block_hashes` as in events.Arrived."""

    at_s: float
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    timeout_s: float = 120.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    leaves_after_s: float | None = None
    stops_at_index: int | None = None
    priority: int = 0
    tenant: str = ""
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """An instance dies at an instant and is back, empty, `back_after_s` later (None: never)."""

    instance: str
    at_s: float
    back_after_s: float | None = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Steps of an instance take `factor` times as long for a while."""

    instance: str
    from_s: float
    to_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. `drop_rate`: messages lost on their way and sent again `resend_s` later, those behind
    them waiting, as the session between leader and router has it. `detect_s`: how long a death goes
    unnoticed."""

    kills: tuple[Kill, ...] = ()
    slow: tuple[Slow, ...] = ()
    transfer_failure_rate: float = 0.0
    drop_rate: float = 0.0
    resend_s: float = 0.25
    detect_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One way of a message, and the bandwidth of a sink, which its transfers share."""

    message_s: float = 0.0002
    bytes_per_s: float = 5e9
    transfer_fixed_s: float = 0.001
