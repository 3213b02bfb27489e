"""One episode at the proxy: from parsed requests to recorded samples.

Decides which chain and role a call has, what its prompt is, with which parameters it is sampled,
and whether it is a repeat of a request whose sample is still to be delivered.
Not here: HTTP and wire forms. Source: contracts.md, 'Sampling that harnesses ask for' and
'Retries and delivery'.
Invariant: the engine gets exactly the ids that are recorded, and the log is written first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import LogprobError, Overlong
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import (
    CallRecord,
    Completion,
    Delivery,
    SamplingParams,
    Stop,
)
from clawgym_jax.harness.roles import RoleTracker
from clawgym_jax.proxy.answers import answer_of, visible_text
from clawgym_jax.proxy.breaks import name_breaks
from clawgym_jax.proxy.call_log import delivery_frame
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.faults import FaultKind, PromptOverflow, RequestFault
from clawgym_jax.proxy.flight import Flight
from clawgym_jax.proxy.ledger import PromptLedger, balance, ledger_of
from clawgym_jax.proxy.prepared import Prepared, repeat_key, view_of
from clawgym_jax.proxy.sampling import sample_patiently, stable_seed
from clawgym_jax.proxy.settle import settle
from clawgym_jax.proxy.splice import KnownTurn, Prompt, SampledTurns, compose
from clawgym_jax.proxy.turns import Answer, Request


@dataclass(frozen=True, slots=True)
class _Slot:
    """What is fixed about a sample before the engine is asked."""

    call_id: str
    ordinal: int
    attempt: int
    params: SamplingParams
    stop: Stop
    breaks: tuple[str, ...]
    ledger: PromptLedger


class Session:
    """State of one open episode. Lives on one event loop."""

    def __init__(
        self, spec: EpisodeSpec, codec: ChatCodec, log: RecordLog, run_id: str, config: ProxyConfig
    ) -> None:
        self.spec = spec
        self.key = "k" + secrets.token_hex(16)
        self.failed = asyncio.Event()  # set when going on makes no sense
        self._codec = codec
        self._log = log
        self._run_id = run_id
        self._config = config
        self._tracker = RoleTracker(spec.harness)
        self._sampled = SampledTurns()
        self._calls: dict[str, CallRecord] = {}
        self._last_of_chain: dict[str, CallRecord] = {}
        self._prompts: dict[int, np.ndarray] = {}  # by ordinal
        self._flights: list[Flight] = []
        self._flight_of_key: dict[bytes, Flight] = {}
        self._attempts: Counter[bytes] = Counter()
        self._chain_ordinals: dict[bytes, int] = {}
        self._chain_lengths: defaultdict[str, int] = defaultdict(int)
        self._quarantine = ""
        self._closed = False
        self.causes: Counter[str] = Counter()
        self.model_s = 0.0
        self.overhead_s = 0.0

    # ---- requests -----------------------------------------------------------------------------

    def prepare(self, request: Request) -> Prepared:
        """Composes the prompt; raises RequestFault for what cannot be answered."""
        started_s = time.perf_counter()
        if self._quarantine:
            raise RequestFault(FaultKind.INTERNAL, f"episode quarantined: {self._quarantine}")
        chain, role = self._tracker.classify(view_of(request))
        prompt = self._compose(request)
        if prompt.ids.size >= self.spec.window_tok:
            self.causes["overflow"] += 1
            raise PromptOverflow(int(prompt.ids.size), self.spec.window_tok)
        return Prepared(request, chain, role, prompt, time.time(), started_s)

    def count_tokens(self, request: Request) -> int:
        return int(self._compose(request).ids.size)

    def _compose(self, request: Request) -> Prompt:
        return compose(
            self._codec, self._sampled, request.turns, request.tools, self._config.history
        )

    def submit(self, prepared: Prepared) -> Flight:
        """The flight that answers a request: the undelivered one of the same request, or new."""
        if self._closed:
            raise RequestFault(FaultKind.NOT_FOUND, f"episode {self.spec.episode_id} is closed")
        key = repeat_key(prepared)
        flight = self._flight_of_key.get(key)
        if flight is not None and _joins(flight, prepared.request):
            self.causes["repeat joined"] += 1
        else:
            if flight is not None:
                flight.supersede()
            flight = self._start(prepared, key)
        flight.attach()
        return flight

    def _start(self, prepared: Prepared, key: bytes) -> Flight:
        slot = self._reserve(prepared, key)
        flight = Flight(
            slot.call_id,
            int(prepared.prompt.ids.size),
            self._config.retry_grace_s,
            lambda: self.spec.sampler.cancel(slot.call_id),
            self._record_outcome,
        )
        self._flight_of_key[key] = flight
        self._flights.append(flight)
        flight.launch(self._fly(prepared, slot, flight))
        return flight

    def _reserve(self, prepared: Prepared, key: bytes) -> _Slot:
        prompt, request, spec = prepared.prompt, prepared.request, self.spec
        ordinal = len(self._flights)
        attempt = self._attempts[key]
        self._attempts[key] += 1
        if key not in self._chain_ordinals:
            self._chain_ordinals[key] = self._chain_lengths[prepared.chain]
            self._chain_lengths[prepared.chain] += 1
        seed = stable_seed(
            self._run_id,
            spec.episode_id,
            spec.seed,
            prepared.chain,
            self._chain_ordinals[key],
            attempt,
        )
        room = spec.window_tok - int(prompt.ids.size)
        limits = [room, spec.max_tok]
        if request.max_tok is not None:
            limits.append(request.max_tok)
        ledger = balance(prompt.ids, prompt.spans, prompt.encoded, [*self._prompts.values()])
        self._prompts[ordinal] = prompt.ids
        breaks = name_breaks(
            prompt, prepared.role, self._last_of_chain.get(prepared.chain), ordinal, attempt
        )
        self.causes.update(breaks)
        return _Slot(
            call_id=f"{spec.call_prefix or spec.episode_id}.{ordinal}",
            ordinal=ordinal,
            attempt=attempt,
            params=dataclasses.replace(spec.sampling, seed=seed, max_tok=min(limits)),
            stop=Stop(self._codec.stop_ids, request.stop_strings),
            breaks=breaks,
            ledger=ledger,
        )

    # ---- samples ------------------------------------------------------------------------------

    async def _fly(self, prepared: Prepared, slot: _Slot, flight: Flight) -> Answer:
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
            del self._prompts[slot.ordinal]
            raise self._fault_of(error) from error
        finally:
            self.model_s += time.perf_counter() - began_s
        sampled_s = time.perf_counter()
        answer = self._record(prepared, slot, completion)
        self.overhead_s += time.perf_counter() - sampled_s
        return answer

    def _fault_of(self, error: BaseException) -> BaseException:
        if isinstance(error, Overlong):
            self.causes["overflow"] += 1
            return PromptOverflow(error.prompt_tok, error.window_tok)
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
        return RequestFault(FaultKind.INTERNAL, self._quarantine)

    def _record(self, prepared: Prepared, slot: _Slot, completion: Completion) -> Answer:
        prompt, request = prepared.prompt, prepared.request
        text = visible_text(self._codec, completion)
        answer = answer_of(
            self._codec,
            self._run_id,
            slot.call_id,
            prompt,
            completion,
            text,
            prepared.received_at_s,
        )
        if answer.malformed_calls:
            self.causes["malformed tool call"] += answer.malformed_calls
        record = CallRecord(
            run_id=self._run_id,
            episode_id=self.spec.episode_id,
            call_id=slot.call_id,
            ordinal=slot.ordinal,
            attempt=slot.attempt,
            chain=prepared.chain,
            role=prepared.role,
            protocol=request.protocol,
            prompt_ids=prompt.ids,
            completion=completion,
            spans=prompt.spans,
            continues=prompt.continues,
            breaks=slot.breaks,
            shared_tok=slot.ledger.shared_tok,
            spliced_tok=slot.ledger.spliced_tok,
            encoded_tok=slot.ledger.encoded_tok,
            requested=request.requested,
            effective=slot.params,
            model=request.model,
            received_at_s=prepared.received_at_s,
            queued_s=time.perf_counter() - prepared.started_s,
            text=text,
        )
        try:
            self._log.append(record)
        except Exception as error:  # sampled but not recorded, for whatever reason
            raise self._quarantined(error) from error
        self._calls[record.call_id] = record
        last = self._last_of_chain.get(record.chain)
        if last is None or last.ordinal < record.ordinal:
            self._last_of_chain[record.chain] = record
        self._sampled.add(
            KnownTurn(
                record.call_id,
                record.ordinal,
                answer.turn,
                completion.ids,
                prompt.history,
                prompt.continues,
            )
        )
        return answer

    def _record_outcome(self, call_id: str, delivery: Delivery) -> None:
        record = self._calls[call_id]
        self._log.append(delivery_frame(call_id, delivery, time.time()))
        self._calls[call_id] = dataclasses.replace(record, delivery=delivery)
        if delivery is Delivery.DELIVERED:
            self._sampled.mark_delivered(call_id)

    # ---- the end ------------------------------------------------------------------------------

    async def close(self) -> EpisodeTrace:
        """Waits until the records are settled, cancels what is left, and hands everything over."""
        for flight in self._flights:
            if not flight.has_clients and not flight.done:
                flight.expire()  # the harness ended: nobody will ask for it again
        await settle(
            count=lambda: len(self._calls),
            pending=lambda: sum(not flight.done for flight in self._flights),
            config=self._config,
        )
        self._closed = True
        await self._cancel_rest()
        for flight in self._flights:
            if not flight.failed and flight.outcome is Delivery.PENDING:
                flight.expire()
        calls = tuple(sorted(self._calls.values(), key=lambda call: call.ordinal))
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
