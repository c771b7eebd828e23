"""Sessions that leave their decode instance: because it goes, or because they would be served much better elsewhere.

No engine can offer KV of a sequence that decodes, so a session moves as after a failure, only planned: it is
prefilled again from prompt and journal on another pair, one at a time per prefill instance, those with the most left
to write first. Its client sees a pause and no seam.
"""

from __future__ import annotations

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.instance import Hold, Instance
from trtpd.runtime.core.lifecycle import State
from trtpd.runtime.core.requests import Request

STAY_AWAY_S = 10.0
NOT_AGAIN_S = 20.0
"""A session that has moved stays for so long."""

LEAST_LEFT_TOKENS = 8
"""What ends this soon ends sooner where it is."""


class Moves:
    """Looks now and then (see Watch); every look moves at most what its pace allows."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._moved_s: dict[int, float] = {}

    def look(self) -> None:
        books = self._books
        self._moved_s = {key: at_s for key, at_s in self._moved_s.items() if at_s > books.now_s - NOT_AGAIN_S}
        for model in list(books.cluster.groups):
            places = self._places(model)
            for instance in list(books.cluster.of_model(model)):
                if places > 0 and instance.sequences and instance.healthy:
                    places -= self._leave(instance, places)

    def _places(self, model: str) -> int:
        books = self._books
        prefillers = sum(table.open for table in books.cluster.prefillers(model))
        queue = books.backlog.queues.get(model)
        under_way = books.reprefills + (len(queue.again) if queue is not None else 0)
        return books.policy.moves_per_prefiller * prefillers - under_way

    def _leave(self, instance: Instance, places: int) -> int:
        """Moves up to `places` of its sessions; returns how many."""
        if instance.moves_out:
            reason, least = "drain", float(LEAST_LEFT_TOKENS)
        elif self._is_hot(instance):
            reason, least, places = "hot_spot", float(self._books.policy.move_left_tokens), 1
        else:
            return 0
        holds = [hold for hold in instance.holds.values() if self._may_leave(hold, least)]
        holds.sort(key=lambda hold: (-hold.left_tokens, hold.request_id))
        for hold in holds[:places]:
            self._move(self._books.requests[hold.request_id], instance, reason)
        return len(holds[:places])

    def _may_leave(self, hold: Hold, least_left_tokens: float) -> bool:
        if not hold.decodes or not hold.sent or hold.left_tokens < least_left_tokens:
            return False
        request = self._books.requests[hold.request_id]
        return request.state is State.DECODING and hold.request_id not in self._moved_s

    def _is_hot(self, instance: Instance) -> bool:
        """Its steps are much longer than those of the best instance of its group would be with one more sequence,
        and there is prefill to spare."""
        books, table = self._books, instance.table
        if books.ladder.rung > Rung.NORMAL or table.open < 2 or instance.hello.role == "prefill":
            return False
        if not books.cluster.costs.known(instance.hello, table.role):
            return False
        now_s = table.one_s + table.each_s * (table.sequences - 1.0).clip(0.0)
        joined_s = table.one_s + table.each_s * table.sequences
        joined_s[table.whole_fits < instance.capacity_tokens / 8] = float("inf")
        joined_s[instance.row] = float("inf")
        return bool(now_s[instance.row] >= books.policy.move_gain * joined_s.min())

    def _move(self, request: Request, instance: Instance, reason: str) -> None:
        books = self._books
        self._moved_s[request.id] = books.now_s
        request.avoid[instance.name] = books.now_s + STAY_AWAY_S
        books.wake_for_room(books.now_s + STAY_AWAY_S)
        books.tally.moves[reason] += 1
        books.tally.retries[f"moved_{reason}"] += 1
        books.drop_attempt(request, f"moved_{reason}")
        books.requeue(request)
