"""The constants RouterCore decides by. One object, given once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trtpd.errors import InputError
from trtpd.runtime.core.score import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Every field has a default that suits one host. Durations are seconds.

    Admission
      queue_limit                 requests that may wait for a place; further ones are refused as saturated
      no_instance_grace_s         arrivals still queue for so long after the last usable instance went

    Placement
      overtake                    requests behind one that doesn't fit which may be tried before it
      overtake_s                  once it has waited for room so long, none may
      placed_per_batch            sequences placed on an instance per `max_batch`, those still in prefill included
      weights                     of the terms of the score

    Hand-off
      pull_lead_s                 decode starts to pull when the rest of the prefill is predicted to take no longer
      repulls                     pulls of one offer after a failed one
      transfer_patience_s         fixed part of the time a sealed offer's pull may take, a backstop to the sink's own
      transfer_floor_bytes_per_s  what the bytes add to it: a slower transfer counts as stalled

    Failures
      retry_budget                new attempts a request may cost through failures of its own; rejects for lack of
                                  room cost nothing
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

    Memory
      faults_kept                 recent faults that status shows
      timelines_kept              timelines of ended requests
    """

    queue_limit: int = 1024
    no_instance_grace_s: float = 10.0
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
    faults_kept: int = 256
    timelines_kept: int = 1024
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        may_be_zero = {
            "retry_budget",
            "loss_budget",
            "repulls",
            "drain_reminders",
            "overtake",
            "overtake_s",
            "pull_lead_s",
        }
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "weights":
                continue
            if value < 0 or (value == 0 and item.name not in may_be_zero):
                least = "at least 0" if item.name in may_be_zero else "above 0"
                raise InputError(f"scheduler setting {item.name} is {value}; it must be {least}")
