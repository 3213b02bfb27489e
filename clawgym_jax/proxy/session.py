"""One episode at the proxy: from parsed requests to recorded samples.

Decides which chain and role a call has, what its prompt is, and whether it is a repeat of a
request whose sample is still to be delivered.
Not here: HTTP and wire forms; seeds and limits (slots.py); records (recorder.py).
Source: contracts.md, 'Retries and delivery'.
Invariant: the engine gets exactly the ids that are recorded, and the log is written first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Hashable

from clawgym_jax.core.errors import LogprobError, Overlong
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import Completion, Delivery
from clawgym_jax.harness.roles import RoleTracker
from clawgym_jax.proxy.answers import answer_of, visible_text
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.faults import EngineAway, FaultKind, PromptOverflow, RequestFault
from clawgym_jax.proxy.flight import Flight
from clawgym_jax.proxy.ledger import PromptLedger, ledger_of
from clawgym_jax.proxy.prepared import Prepared, prompt_key, repeat_key, view_of
from clawgym_jax.proxy.recorder import Recorder
from clawgym_jax.proxy.rendering import Renderings, Stretch
from clawgym_jax.proxy.sampling import sample_patiently
from clawgym_jax.proxy.settle import settle
from clawgym_jax.proxy.slots import Slot, Slots
from clawgym_jax.proxy.splice import Plan, Prompt, assemble, plan_prompt
from clawgym_jax.proxy.tool_calls import parser_named
from clawgym_jax.proxy.turns import Answer, Request

LONG_CHARS = 8192  # texts from here on are rendered beside the event loop
HUGE_CHARS = 1 << 19
LongWork = tuple[asyncio.Lock, asyncio.Lock]  # for long texts, for huge ones


class Session:
    """State of one open episode. Lives on one event loop."""

    def __init__(
        self,
        spec: EpisodeSpec,
        codec: ChatCodec,
        log: RecordLog,
        run_id: str,
        config: ProxyConfig,
        long_work: LongWork | None = None,
    ) -> None:
        """long_work: held while a long text is rendered; the same for all sessions of a loop."""
        self.spec = spec
        self.key = spec.key or "k" + secrets.token_hex(16)
        self.failed = asyncio.Event()  # set when going on makes no sense
        self._codec = codec
        self._run_id = run_id
        self._config = config
        self._parse = parser_named(config.parser)
        self._tracker = RoleTracker(spec.harness)
        self._slots = Slots(spec, run_id, codec.stop_ids)
        self._renderings = Renderings(codec.cache)
        self._long_work = long_work or (asyncio.Lock(), asyncio.Lock())
        self._calls = Recorder(log, run_id, spec.episode_id, self._slots)
        self._flights: dict[Flight, Hashable] = {}  # those that are not over, with their requests
        self._flight_of_key: dict[Hashable, Flight] = {}  # the newest of each request
        self._quarantine = ""
        self._refusal = FaultKind.INTERNAL  # of requests after a quarantine
        self._closed = False
        self.causes: Counter[str] = Counter()
        self.model_s = 0.0
        self.overhead_s = 0.0

    # ---- requests -----------------------------------------------------------------------------

    async def prepare(self, request: Request) -> Prepared:
        """Composes the prompt; raises RequestFault for what cannot be answered."""
        started_s = time.perf_counter()
        if self._quarantine:
            raise RequestFault(self._refusal, f"episode quarantined: {self._quarantine}")
        chain, role = self._tracker.classify(view_of(request))
        plan = self._plan(request, chain)
        request = self._slim(request, plan)
        prompt = await self._compose(plan)
        if prompt.ids.size >= self.spec.window_tok:
            self.causes["overflow"] += 1
            raise PromptOverflow(int(prompt.ids.size), self.spec.window_tok)
        return Prepared(request, chain, role, prompt, time.time(), started_s)

    async def count_tokens(self, request: Request) -> int:
        chain = self._tracker.chain_of(view_of(request))
        return int((await self._compose(self._plan(request, chain))).ids.size)

    def _plan(self, request: Request, chain: str) -> Plan:
        turns, mode = self._calls.turns, self._config.history
        return plan_prompt(turns, request.turns, request.tools, mode, chain)

    def _slim(self, request: Request, plan: Plan) -> Request:
        """What is kept while the engine works: no turns, and one copy of the tools for all."""
        tools = self._codec.cache.one_copy(plan.stretches[0].tools_key, request.tools)
        return dataclasses.replace(request, turns=(), tools=tools)

    async def _compose(self, plan: Plan) -> Prompt:
        least_tok = sum(s.chars for s in plan.stretches) // self._codec.longest_token_chars
        if least_tok > self.spec.window_tok:  # whatever it is, it does not fit
            self.causes["overflow"] += 1
            raise PromptOverflow(least_tok, self.spec.window_tok)
        for stretch in plan.stretches:
            if stretch.chars >= LONG_CHARS:
                await self._render_aside(stretch)
        return assemble(self._codec, self._renderings, plan)

    async def _render_aside(self, stretch: Stretch) -> None:
        """In a thread, one at a time: the loop goes on, and equal texts are rendered once.

        Texts that take seconds have a lane of their own, so that they hold up no others.
        """
        key = stretch.key
        if self._renderings.find(key) is None:
            async with self._long_work[stretch.chars >= HUGE_CHARS]:
                if self._renderings.find(key) is None:
                    rendering = await asyncio.to_thread(self._codec.render, stretch)
                    self._renderings.keep(key, rendering)

    def submit(self, prepared: Prepared) -> Flight:
        """The flight that answers a request: the undelivered one of the same request, or new."""
        if self._closed:
            raise RequestFault(FaultKind.NOT_FOUND, f"episode {self.spec.episode_id} is closed")
        prompt = prompt_key(prepared)
        key = repeat_key(prepared, prompt)
        flight = self._flight_of_key.get(key)
        if flight is not None and _joins(flight, prepared.request):
            self.causes["repeat joined"] += 1
        else:
            if flight is not None:
                flight.supersede()
            flight = self._start(prepared, prompt, key)
        flight.attach()
        return flight

    def _start(self, prepared: Prepared, prompt: bytes, key: Hashable) -> Flight:
        slot = self._slots.reserve(prepared, prompt)
        breaks = self._calls.breaks(prepared, slot)
        self.causes.update(breaks)
        flight = Flight(
            slot.call_id,
            int(prepared.prompt.ids.size),
            self._config.retry_grace_s,
            lambda: self.spec.sampler.cancel(slot.call_id),
            self._calls.deliver,
            self._forget,
        )
        self._flight_of_key[key] = flight
        self._flights[flight] = key
        flight.launch(self._fly(prepared, slot, breaks, flight))
        return flight

    def _forget(self, flight: Flight) -> None:
        """It is over: nobody can join it, and what it holds is let go."""
        key = self._flights.pop(flight, None)
        if self._flight_of_key.get(key) is flight:
            del self._flight_of_key[key]

    # ---- samples ------------------------------------------------------------------------------

    async def _fly(
        self, prepared: Prepared, slot: Slot, breaks: tuple[str, ...], flight: Flight
    ) -> Answer:
        """Samples, records, and only then lets the answer out."""
        began_s = time.perf_counter()
        try:
            completion = await sample_patiently(
                self.spec.sampler,
                slot.call_id,
                prepared.prompt.ids,
                slot.params,
                slot.stop,
                self._config.engine_wait_s,
                self._count_transient,
                lambda: flight.expired,
            )
        except BaseException as error:
            self._slots.give_back(slot)
            raise self._fault_of(error, flight) from error
        finally:
            self.model_s += time.perf_counter() - began_s
        sampled_s = time.perf_counter()
        answer = self._record(prepared, slot, breaks, completion)
        self.overhead_s += time.perf_counter() - sampled_s
        return answer

    def _fault_of(self, error: BaseException, flight: Flight) -> BaseException:
        if isinstance(error, Overlong):
            self.causes["overflow"] += 1
            return PromptOverflow(error.prompt_tok, error.window_tok)
        if isinstance(error, EngineAway) and not flight.expired:
            self._refusal = error.kind
            return self._quarantined(error)  # the harness is about to see a fault of ours
        if isinstance(error, RequestFault) or not isinstance(error, Exception):
            return error
        return self._quarantined(error)

    def _count_transient(self, name: str) -> None:
        self.causes[f"hidden {name}"] += 1

    def _quarantined(self, error: Exception) -> RequestFault:
        """Nothing of this episode may be trained on: a sample is incomplete or lost."""
        kind = "log-probs" if isinstance(error, LogprobError) else type(error).__name__
        self._quarantine = self._quarantine or f"{kind}: {error}"
        self.causes["quarantined"] += 1
        self.failed.set()
        return RequestFault(self._refusal, self._quarantine)

    def _record(
        self, prepared: Prepared, slot: Slot, breaks: tuple[str, ...], completion: Completion
    ) -> Answer:
        try:
            text = visible_text(self._codec, completion)
            answer = answer_of(
                self._codec,
                self._run_id,
                slot.call_id,
                prepared.prompt,
                completion,
                text,
                prepared.received_at_s,
                self._parse,
                prepared.request.tools,
                prepared.request.carries_raw_calls,
            )
            self._calls.record(prepared, slot, breaks, completion, answer, text)
        except Exception as error:  # sampled but not recorded, for whatever reason
            raise self._quarantined(error) from error
        if answer.malformed_calls:
            self.causes["malformed tool call"] += answer.malformed_calls
        return answer

    # ---- the end ------------------------------------------------------------------------------

    async def close(self) -> EpisodeTrace:
        """Waits until the records are settled, cancels what is left, and hands everything over."""
        for flight in list(self._flights):
            if not flight.has_clients and not flight.done:
                flight.expire()  # the harness ended: nobody will ask for it again
        await settle(
            count=lambda: len(self._calls),
            pending=lambda: sum(not flight.done for flight in self._flights),
            config=self._config,
        )
        self._closed = True
        await self._cancel_rest()
        for flight in list(self._flights):
            if not flight.failed and flight.outcome is Delivery.PENDING:
                flight.expire()
        calls = self._calls.calls()
        ledger = sum(map(ledger_of, calls), PromptLedger())
        ledger.require_balance(self.spec.episode_id)
        return EpisodeTrace(
            calls=calls,
            ledger=ledger,
            model_s=self.model_s,
            overhead_s=self.overhead_s,
            causes=self.causes,
            quarantine=self._quarantine,
        )

    async def _cancel_rest(self) -> None:
        rest = [flight for flight in self._flights if not flight.done]
        if not rest:
            return
        for flight in rest:
            flight.expire()
        tasks = {flight.task for flight in rest}
        _, stuck = await asyncio.wait(tasks, timeout=self._config.cancel_timeout_s)
        for task in stuck:
            task.cancel()
        if stuck:
            self.causes["engine ignored a cancel"] += len(stuck)
            await asyncio.wait(stuck)


def _joins(flight: Flight, request: Request) -> bool:
    """Whether a repeated request gets the flight's sample rather than a new one."""
    if flight.expired or flight.failed or flight.outcome is not Delivery.PENDING:
        return False
    return request.is_retry or not flight.has_clients
