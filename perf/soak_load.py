"""The load of a soak: requests for as long as wanted, some of them cancelled, each answer checked, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from trtpd.perf.prompt_text import Renderer, Segment, segment_text
from trtpd.perf.soak_watch import Column
from trtpd.perf.transport import Question
from trtpd.perf.triton_transport import TritonTransport

TIMEOUT_S = 120.0
FAULTS_KEPT = 20
KNOWN_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What is asked. Lengths in tokens, drawn evenly from (least, most). `repeated` is the share of requests that ask
    one of `known` prompts, whose tokens are known; `shared` the share of prompts that begin with one of `prefixes`;
    `cancelled` the share of requests that are cancelled after up to `longest_s`."""

    prompt: tuple[int, int] = (24, 200)
    output: tuple[int, int] = (8, 40)
    known: int = 64
    repeated: float = 0.5
    prefixes: int = 4
    prefix_tokens: int = 96
    shared: float = 0.5
    cancelled: float = 0.05
    longest_s: float = 4.0


@dataclass(slots=True)
class Seen:
    """What became of the requests. `outcomes`: "served" (all tokens came, and they were right), "left" (cancelled by
    plan, what came was right), and whatever else by its kind; `checked` of the answers were compared token by token;
    `faults`: the first of the others in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    checked: int = 0
    faults: list[str] = field(default_factory=list)
    recent_ttft_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.outcomes.total()

    @property
    def wrong(self) -> dict[str, int]:
        return {kind: number for kind, number in self.outcomes.items() if kind not in ("served", "left")}


class SoakLoad:
    """Asks one server. Every method in one event loop, between `open` and `close` of the transport."""

    def __init__(self, transport: TritonTransport, mix: Mix, *, seed: int) -> None:
        self._transport = transport
        self._mix = mix
        self._rng = random.Random(seed)
        self._seed = seed << 32
        self._renderer = Renderer(keep=mix.prefixes)
        self._prefixes = [Segment(seed=self._next_seed(), tokens=mix.prefix_tokens) for _ in range(mix.prefixes)]
        for prefix in self._prefixes:
            self._renderer.text([prefix])
        self._answers: dict[str, list[int]] = {}
        self._prompts: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self.seen = Seen()

    async def learn(self) -> None:
        """Asks the known prompts on the idle server: what it answers now is what it must answer ever after."""
        prompts = [self._new_prompt() for _ in range(self._mix.known)]
        for first in range(0, len(prompts), KNOWN_AT_ONCE):
            await asyncio.gather(*(self._learn(prompt) for prompt in prompts[first : first + KNOWN_AT_ONCE]))
        self._prompts = [prompt for prompt in prompts if prompt in self._answers]

    async def capacity_per_s(self, *, users: int, seconds: float) -> float:
        """Requests a second that end when `users` ask one after the other, counted after the first third."""
        begin_s = time.monotonic()
        counted_from_s, until_s = begin_s + seconds / 3, begin_s + seconds
        ended = 0

        async def user() -> None:
            nonlocal ended
            while time.monotonic() < until_s:
                await self._one(cancel=False)
                ended += counted_from_s <= time.monotonic() < until_s

        await asyncio.gather(*(user() for _ in range(users)))
        return ended / (until_s - counted_from_s)

    async def drive(self, rate: float, seconds: float, stop: asyncio.Event) -> None:
        """`rate` a second, Poisson, until `stop`; then waits for what is under way."""
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        end_s = at_s + seconds
        while (at_s := at_s + self._rng.expovariate(rate)) < end_s and not stop.is_set() and self._fault is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0.0, at_s - loop.time()))
            self._begin()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._fault is not None:
            raise self._fault

    def recent(self) -> dict[Column, float]:
        """Columns for the watch: what came since the last call."""
        ttft_s, self.seen.recent_ttft_s = self.seen.recent_ttft_s, []
        found = {("client", "under_way"): float(len(self._tasks))}
        if ttft_s:
            found["client", "ttft_p50_s"] = statistics.median(ttft_s)
        return found

    def _begin(self) -> None:
        task = asyncio.get_running_loop().create_task(self._one(cancel=True))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = error

    async def _learn(self, prompt: str) -> None:
        ids: list[int] = []
        ending = await self._transport.send(self._request(prompt, self._mix.output[1]), _nothing, ids)
        if ending.state == "finished" and len(ids) == self._mix.output[1]:
            self._answers[prompt] = ids
        else:
            self._note(f"{ending.state}:{ending.reason}", f"learning: {ending.message or len(ids)}")

    async def _one(self, *, cancel: bool) -> None:
        mix, rng = self._mix, self._rng
        known = bool(self._prompts) and rng.random() < mix.repeated
        prompt = rng.choice(self._prompts) if known else self._new_prompt()
        max_tokens = rng.randint(*mix.output)
        leaves = cancel and rng.random() < mix.cancelled
        patience_s = rng.uniform(0.0, mix.longest_s) if leaves else TIMEOUT_S
        ids: list[int] = []
        ending = None
        began_s = time.monotonic()

        def arrived(_: int) -> None:
            if not ids:
                self.seen.recent_ttft_s.append(time.monotonic() - began_s)

        try:
            async with asyncio.timeout(patience_s):
                ending = await self._transport.send(self._request(prompt, max_tokens), arrived, ids)
        except TimeoutError:
            if not leaves:
                self._note("lost", f"no end within {TIMEOUT_S:g} s, {len(ids)} of {max_tokens} tokens came")
                return
        self.seen.tokens += len(ids)
        whole = self._answers.get(prompt)
        self.seen.checked += whole is not None
        if whole is not None and ids != whole[: len(ids)]:
            self._note("wrong tokens", f"{ids} is not the beginning of {whole}")
        elif ending is None:
            self._note("left")
        elif ending.state != "finished":
            self._note(f"{ending.state}:{ending.reason}", ending.message)
        elif len(ids) != max_tokens:
            self._note("wrong count", f"{len(ids)} tokens came instead of {max_tokens}")
        else:
            self._note("served")

    def _note(self, outcome: str, message: str = "") -> None:
        self.seen.outcomes[outcome] += 1
        if outcome not in ("served", "left") and len(self.seen.faults) < FAULTS_KEPT:
            self.seen.faults.append(f"{outcome}: {message}")

    def _request(self, prompt: str, max_tokens: int) -> bytes:
        return self._transport.prepare(Question(prompt=prompt, kv_tokens=0, max_tokens=max_tokens, timeout_s=TIMEOUT_S))

    def _new_prompt(self) -> str:
        own = segment_text(Segment(seed=self._next_seed(), tokens=self._rng.randint(*self._mix.prompt)))
        shared = self._rng.random() < self._mix.shared
        return self._renderer.text([self._rng.choice(self._prefixes)]) + own if shared else own

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _nothing(_: int) -> None:
    """What arrives is looked at in the end."""
