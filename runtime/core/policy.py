"""The constants RouterCore decides by. One object, given once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from trtpd.errors import InputError
from trtpd.runtime.core.ranks import Limits
from trtpd.runtime.core.score import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Every field has a default that suits one host. Durations are seconds.

    Admission
      queue_limit                 requests that may wait for a place; further ones are refused as saturated
      no_instance_grace_s         arrivals still queue for so long after the last usable instance went; then what waits
                                  ends with no_instance
      queue_s                     a request that has not been placed after so long is refused as saturated
      refuse_late                 whether a request is refused when load would make it miss its targets
      late_factor                 a request that would miss its TTFT target on an idle deployment is refused only when
                                  load makes it so many times later than that
      tenant_weights              shares of tenants, 1 for those not named
      starve_s                    the first of a lower class that has waited so long goes before higher classes

    Placement
      overtake                    requests behind one that doesn't fit which may be tried before it
      overtake_s                  once it has waited for room so long, none may
      placed_per_batch            sequences placed on an instance per `max_batch`, those still in prefill included
      ahead_s                     prompts waiting at an instance, in seconds of its prefill, up to which it is given
                                  more
      local_tokens                prompts up to this size may be prefilled on decode in calm times, where moving their
                                  KV would cost more than it saves; 0: from rung 1 on only
      short_tokens                the same from rung 1 of the ladder on; and prompts up to this size don't wait for
                                  longer ones where the engine computes shorter ones first
      long_tokens                 from rung 2 on prompts of this size leave the prefill pool to shorter ones,
      long_wait_s                 until they have waited so long
      handoff_s                   fixed part of what a hand-off costs its client
      weights                     of the terms of the score (score.py)

    Ladder
      patience_s                  a wait for the first token that counts as pressure 1 where there is no TTFT target
      dwell_up_s, dwell_down_s    least time on a rung before the next higher, and of calm before the next lower
      held_watermark              part of a prefill instance's KV that offers without a sink may hold; past it the
                                  oldest is withdrawn and queued again

    Hand-off
      pull_lead_s                 decode starts to pull when the rest of the prefill is predicted to take no longer
      repulls                     pulls of one offer after a failed one
      transfer_patience_s         fixed part of the time a sealed offer's pull may take, a backstop to the sink's own
      transfer_floor_bytes_per_s  what the bytes add to it: a slower transfer counts as stalled

    Failures
      retry_budget                new attempts a request may cost through failures of its own; rejects for lack of room
                                  cost nothing
      loss_budget                 instances a request may lose while they work on it: a request that kills every
                                  instance it meets has to end, one that was only unlucky has not
      reprefills_per_instance     new attempts in prefill at a time, per usable instance that prefills
      drain_patience_s            an unanswered Cancel or Withdraw is sent again after this
      drain_reminders             so often; then its credit is taken back without an answer
      reject_pause_s              a request stays away from an instance that rejected it, twice as long each time,
      reject_pause_max_s          up to this
      link_avoid_s                a pair whose link was reported down is not used for so long
      flap_losses                 losses of one instance within
      flap_window_s               this window that put it in quarantine, unless nothing else serves its role
      quarantine_s                for so long, twice as long each time,
      quarantine_max_s            up to this
      moves_per_prefiller         sessions that leave a draining or overloaded instance at a time, per usable instance
                                  that prefills
      move_gain                   a session leaves an overloaded instance if its steps would be so many times shorter
                                  elsewhere
      move_left_tokens            and if it is expected to write so many more

    Elasticity (rebalance.py)
      elastic                     whether an instance's role may be switched
      rebalance_s                 how long one role must have been shorter than the other
      rebalance_gain              the least gain in capacity, as a factor

    Memory
      faults_kept                 recent faults that status shows, and as many events
      timelines_kept              timelines of ended requests
    """

    queue_limit: int = 1024
    no_instance_grace_s: float = 10.0
    queue_s: float = 60.0
    refuse_late: bool = True
    late_factor: float = 2.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    starve_s: float = 5.0
    retry_budget: int = 3
    loss_budget: int = 8
    reprefills_per_instance: int = 2
    pull_lead_s: float = 0.25
    repulls: int = 1
    transfer_patience_s: float = 10.0
    transfer_floor_bytes_per_s: float = 50e6
    drain_patience_s: float = 10.0
    drain_reminders: int = 3
    reject_pause_s: float = 0.25
    reject_pause_max_s: float = 5.0
    link_avoid_s: float = 5.0
    flap_losses: int = 3
    flap_window_s: float = 60.0
    quarantine_s: float = 15.0
    quarantine_max_s: float = 300.0
    overtake: int = 8
    overtake_s: float = 1.0
    placed_per_batch: float = 2.0
    ahead_s: float = 0.5
    local_tokens: int = 0
    short_tokens: int = 256
    long_tokens: int = 1024
    long_wait_s: float = 5.0
    handoff_s: float = 0.003
    patience_s: float = 5.0
    dwell_up_s: float = 2.0
    dwell_down_s: float = 5.0
    held_watermark: float = 0.5
    moves_per_prefiller: int = 1
    move_gain: float = 1.5
    move_left_tokens: int = 64
    elastic: bool = False
    rebalance_s: float = 20.0
    rebalance_gain: float = 1.15
    faults_kept: int = 256
    timelines_kept: int = 1024
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("weights", "refuse_late", "elastic") or value is None:
                continue
            if item.name == "tenant_weights":
                self._check_tenants()
            elif value < 0 or (value == 0 and item.name not in MAY_BE_ZERO):
                least = "at least 0" if item.name in MAY_BE_ZERO else "above 0"
                raise InputError(f"scheduler setting {item.name} is {value}; it must be {least}")

    def is_short(self, prompt_tokens: int) -> bool:
        """Whether such a prompt has the line of short ones."""
        return prompt_tokens <= self.short_tokens

    @property
    def limits(self) -> Limits:
        """The part of it that instances' rows are worked out with."""
        return Limits(
            placed_per_batch=self.placed_per_batch,
            ahead_s=self.ahead_s,
            tpot_s=self.weights.tpot_s,
            kv_s=self.weights.kv_s,
            batch_s=self.weights.batch_s,
        )

    def _check_tenants(self) -> None:
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0.0:
                raise InputError(f"the weight of tenant {tenant!r} is {weight}; it must be above 0")


MAY_BE_ZERO = frozenset(
    {
        "retry_budget",
        "loss_budget",
        "repulls",
        "drain_reminders",
        "overtake",
        "overtake_s",
        "pull_lead_s",
        "local_tokens",
        "short_tokens",
        "handoff_s",
        "moves_per_prefiller",
    }
)
