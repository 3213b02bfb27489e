"""Continuous batching over the engine's slots, one request at a time in and out.

`admit` gives requests slots with the longest known prefix of theirs in them, `advance` prefills,
`step` decodes one token for all, `stop` ends some early. With `run_ahead` the next step is on its
way before this one's tokens are looked at, so that the device does not wait for Python; what it
draws for a request that has ended meanwhile is thrown away. Single-threaded; knows no queue, future
or thread (the drivers do). Not here: programs (`engine`), which slot holds what (`slots`).
Invariant: a completion carries every sampled token with its log-probs and weight version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from clawgym_jax.core.errors import SamplerError
from clawgym_jax.core.types import Completion, Finish
from clawgym_jax.serving import padded
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.padded import Suffix
from clawgym_jax.serving.places import Places
from clawgym_jax.serving.prefix_cache import PrefixCache
from clawgym_jax.serving.request import DriverStats, Finished, Flight, Request, StopRule
from clawgym_jax.serving.routes import Routes
from clawgym_jax.serving.slots import NO_TOKENS, SlotTable


class Batcher:
    """The engine's state and the requests in it."""

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str] | None,
        run_ahead: bool = False,
    ) -> None:
        self.stats = DriverStats()
        self.running: dict[int, Request] = {}  # decoding, by slot
        self.filling: dict[int, Request] = {}  # their prompts are not all in yet
        self.version = 0
        self._engine = engine
        self._stop_rule = StopRule(engine.config.window_tok, decode)
        self._run_ahead = run_ahead
        self._params: Any = None
        self._flight: Flight | None = None  # the step ahead
        self._budget_tok = engine.config.prefill_budget_tok  # left until the next decode step
        self._ended: list[Finished] = []  # not handed out yet
        self._state: Any = None
        self.reset()

    def reset(self) -> None:
        """Empty slots; what ran is forgotten."""
        self.running.clear()
        self.filling.clear()
        self._ended.clear()
        self._state = self._flight = None  # first: there may be no room for old and new slots
        config = self._engine.config
        cache = PrefixCache(config.pages, config.page_tok) if config.pages else None
        self._table = SlotTable(self._engine.rooms, cache)
        self._routes = Routes(self._engine)
        self._places = Places(self._engine, self._table, cache, self._routes, self.stats)
        self._state = self._engine.init_decode_state()

    def swap(self, params: Any, version: int) -> None:
        """New weights; cached keys and values die with the old ones.

        Requests in flight go on with them, and with the keys and values that they have.
        """
        if self.version:
            self._state = self._engine.mend(self._state)
        self._params, self.version = params, version
        self._table.forget()
        for request in self.requests():
            request.mixed = True

    @property
    def busy(self) -> bool:
        return bool(self.running or self.filling)

    def requests(self) -> list[Request]:
        """All that hold a slot."""
        return [*self.filling.values(), *self.running.values()]

    def choose(self, waiting: Sequence[Request]) -> list[Request]:
        """Those of the waiting requests that `admit` takes now; none when a step is due."""
        if not self._may_prefill:
            return []
        chosen = self._table.choose([request.need_tok for request in waiting])
        return [waiting[i] for i in chosen[: self._engine.config.prefill_batch]]

    def stop(self, requests: Sequence[Request]) -> list[Finished]:
        """Ends requests early, with what they have."""
        running = [r for r in requests if r.slot in self.running]
        for r in requests:
            self._finish(r, Finish.ABORT)
        self._deactivate(running)
        return self.take_ended()

    def take_ended(self) -> list[Finished]:
        """What ended and was not handed out: after a failure, those whose tokens were all there."""
        ended, self._ended = self._ended, []
        return ended

    def admit(self, requests: Sequence[Request]) -> None:
        """Gives the requests that `choose` named their slots, with known prefixes in them."""
        now_s = time.perf_counter()
        copying: list[Request] = []  # prefixes of slots in the same room: copied while prefilling
        for request in requests:
            claim = self._table.claim(request.prompt, request.need_tok)
            assert claim is not None, "more requests were admitted than there is room"
            request.slot = claim.slot
            request.filled_tok = request.cached_tok = claim.prefix_tok
            self.filling[claim.slot] = request
            self.stats.admitted(max(now_s - request.arrived_s, 0.0), claim.prefix_tok)
            if self._places.at_once(claim):
                self._fill(copying)  # before what they copy from is written over
                copying = []
                self._state = self._places.place(self._state, claim)
            elif claim.source != claim.slot:
                request.source = claim.source
                copying.append(request)
        self._fill(copying)

    def advance(self) -> list[Finished]:
        """Prefills up to the budget of a step; what is only scored comes back when it is through.

        Where nothing decodes, nobody waits for a step: then there is no limit but a cancelled
        request, which is reaped between two rounds.
        """
        while self.filling and self._may_prefill:
            if any(r.cancelled for r in self.filling.values()):
                break
            group = self._next_group()
            before = self.stats.prefilled_tok
            self._fill(group)
            self._budget_tok -= self.stats.prefilled_tok - before
            self._start([r for r in group if not r.left_tok])
        return self.take_ended()

    @property
    def _may_prefill(self) -> bool:
        return self._budget_tok > 0 or not self.running

    def _next_group(self) -> list[Request]:
        """Requests of one room, oldest first, as many as a batch holds."""
        oldest = next(iter(self.filling.values()))
        (group,) = (rows for _, rows in self._by_room(self.filling.values()) if oldest in rows)
        return group[: self._engine.config.prefill_batch]

    def _fill(self, group: Sequence[Request]) -> None:
        """One chunk of each prompt; the last token is left for the first decode step."""
        for room, rows in self._by_room(group):
            if any(r.left_tok or r.source >= 0 for r in rows):
                self._fill_room(room, rows)

    def _by_room(self, group: Iterable[Request]) -> list[tuple[int, list[Request]]]:
        rooms: dict[int, list[Request]] = {}
        for r in group:
            rooms.setdefault(self._table.room_of(r.slot), []).append(r)
        return sorted(rooms.items())

    def _fill_room(self, room: int, rows: Sequence[Request]) -> None:
        parts, _, experts = self._prefill(room, [padded.unfilled(r) for r in rows])
        for i, (r, part) in enumerate(zip(rows, parts, strict=True)):
            if r.source >= 0:
                self._routes.copy(r.source, r.slot, r.filled_tok)
            self._routes.put(r.slot, r.filled_tok, experts, i, len(part.tokens))
            r.filled_tok += len(part.tokens)
            r.source = -1
            if not r.mixed:
                self._table.fill(r.slot, r.prompt[: r.filled_tok])
            self.stats.prefilled_tok += len(part.tokens)

    def _start(self, through: Sequence[Request]) -> None:
        """Their prompts are in: they decode from here on, or are scored."""
        for r in through:
            del self.filling[r.slot]
            self.running[r.slot] = r
        scored = [r for r in through if r.forced is not None]
        self._activate([r for r in through if r.forced is None])
        self._score(scored)

    def _prefill(
        self, room: int, rows: Sequence[Suffix], score: bool = False
    ) -> tuple[list[Suffix], Any, jax.Array | None]:
        """As much of the suffixes as the largest chunk holds, with (scores, experts)."""
        engine = self._engine
        size = engine.chunk_for(max(len(row.tokens) for row in rows))
        parts = [row.first(size) for row in rows]
        batch = padded.suffixes(parts, engine.config.prefill_batch, size, engine.rooms[room])
        self._state, (scores, experts) = engine.prefill(
            self._params, self._state, batch, score, room
        )
        return parts, scores, experts

    def _score(self, requests: Sequence[Request]) -> None:
        """Teacher-forces the ids of `requests` and ends them."""
        for room, rows in self._by_room(requests):
            while any(len(r.ids) < len(r.targets) for r in rows):
                self._score_chunk(room, rows)
        for r in requests:
            self._finish(r, Finish.STOP)

    def _score_chunk(self, room: int, requests: Sequence[Request]) -> None:
        rows, scores, experts = self._prefill(room, [padded.forced(r) for r in requests], True)
        logprobs, raw = (x.tolist() for x in self._from_device(scores))
        for i, (r, row) in enumerate(zip(requests, rows, strict=True)):
            self._routes.put(r.slot, row.start, experts, i, len(row.tokens))
            for j, token in enumerate(row.targets.tolist()):
                r.take(token, logprobs[i][j], raw[i][j], self.version)

    def _activate(self, requests: Sequence[Request]) -> None:
        if requests:
            rows = padded.starting(self._engine.config.slots, requests)
            self._state = self._engine.insert(self._state, rows)

    def _deactivate(self, requests: Sequence[Request]) -> None:
        if requests:
            rows = padded.stopping(self._engine.config.slots, [r.slot for r in requests])
            self._state = self._engine.insert(self._state, rows)

    def step(self) -> list[Finished]:
        """One token for every running request; returns those that ended with it.

        With `run_ahead`, requests that were activated since the last step get theirs with the next.
        """
        self._budget_tok = self._engine.config.prefill_budget_tok
        flight, self._flight = self._flight, None
        if flight is None or not flight.among(self.running):
            flight = self._launch(None)
        if self._run_ahead and any(not self._ends_with(flight, r) for r in self.running.values()):
            self._flight = self._launch(flight)
        self._land(flight)
        return self.take_ended()

    def _launch(self, before: Flight | None) -> Flight:
        """Starts a decode step; `before` is one whose tokens are not known yet."""
        longest = [0] * len(self._engine.rooms)
        for slot, r in self.running.items():
            room, coming = self._table.room_of(slot), before is not None and before.has(r)
            longest[room] = max(longest[room], len(r.prompt) + len(r.ids) + coming)
        self._state, results = self._engine.generate(
            self._params, self._state, longest, list(self.running)
        )
        return Flight(dict(self.running), self.version, results)

    def _ends_with(self, flight: Flight, r: Request) -> bool:
        """Whether its length says so; a stop token is not known before it is drawn."""
        return flight.has(r) and self._stop_rule.is_last(r, len(r.ids) + 1)

    def _land(self, flight: Flight) -> None:
        """Waits for a step, and gives the requests their tokens."""
        drawn, experts = flight.results
        drawn, experts = self._from_device((tuple(drawn), experts))
        ids, logprobs, raw = (x.tolist() for x in drawn)
        lively = flight.among(self.running)
        self.stats.stepped(len(lively))
        now_s = time.perf_counter()
        ended: list[Request] = []
        for slot, r in lively:
            self._routes.put_step(slot, len(r.prompt) - 1 + len(r.ids), experts)
            if not r.ids:
                self.stats.began(max(now_s - r.arrived_s, 0.0))
            r.take(ids[slot], logprobs[slot], raw[slot], flight.version)
            if self._ends(r):
                ended.append(r)
        self._deactivate(ended)

    def _ends(self, r: Request) -> bool:
        """Whether the last token did; what the tokenizer cannot read fails its own request."""
        try:
            finish, stop_string = self._stop_rule.verdict(r)
        except SamplerError as error:
            self._end(r, error)
            return True
        if finish is not None:
            self._finish(r, finish, stop_string)
        return finish is not None

    def _from_device(self, arrays: Any) -> Any:
        """Waits for the device."""
        start_s = time.perf_counter()
        out = jax.device_get(arrays)
        self.stats.device_s += time.perf_counter() - start_s
        return out

    def _finish(self, r: Request, finish: Finish, stop_string: str | None = None) -> None:
        """Ends a request with what it has."""
        routing = self._routes.of(r.slot, len(r.known), len(r.prompt) + len(r.ids))
        self._end(r, r.completion(finish, stop_string, routing))

    def _end(self, r: Request, result: Completion | SamplerError) -> None:
        """Its slot keeps what it computed."""
        self._table.release(r.slot, NO_TOKENS if r.mixed else r.known)
        self._ended.append((r, result))
        self.running.pop(r.slot, None)
        self.filling.pop(r.slot, None)
