"""Puts finished samples into the log, and remembers of them what later requests need.

Held in memory: completions and what the harness saw of them. Prompts are held once for all calls
(slots.PromptStore) and come back into the records when the episode closes.
Not here: which request gets which sample (session.py), delivery (flight.py).
Invariant: a call is known here exactly when it is in the log.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import CallRecord, Completion, Delivery
from clawgym_jax.proxy.breaks import Earlier, name_breaks
from clawgym_jax.proxy.call_log import delivery_frame
from clawgym_jax.proxy.matching import KnownTurn, SampledTurns
from clawgym_jax.proxy.prepared import Prepared
from clawgym_jax.proxy.slots import Slot, Slots
from clawgym_jax.proxy.turns import Answer

_NO_IDS = np.zeros(0, np.int32)


class Recorder:
    """The calls of one episode."""

    def __init__(self, log: RecordLog, run_id: str, episode_id: str, slots: Slots) -> None:
        self.turns = SampledTurns()
        self._log = log
        self._run_id = run_id
        self._episode_id = episode_id
        self._slots = slots
        self._calls: dict[str, CallRecord] = {}  # prompts taken out, outcomes not yet in
        self._outcomes: dict[str, Delivery] = {}
        self._last_of_chain: dict[str, CallRecord] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def breaks(self, prepared: Prepared, slot: Slot) -> tuple[str, ...]:
        """Why this prompt does not simply append to its chain; looked up before it is sampled."""
        last = self._last_of_chain.get(prepared.chain)
        earlier = None
        if last is not None:
            ids = [self._slots.prompt_ids(last.ordinal), last.completion.ids]
            earlier = Earlier(last.call_id, last.role, np.concatenate(ids))
        return name_breaks(prepared.prompt, prepared.role, earlier, slot.ordinal, slot.attempt)

    def record(
        self,
        prepared: Prepared,
        slot: Slot,
        breaks: tuple[str, ...],
        completion: Completion,
        answer: Answer,
        text: str,
    ) -> None:
        """Raises whatever the log raises; then the call is not known."""
        record = self._call_record(prepared, slot, breaks, completion, text)
        self._log.append(record)
        record = dataclasses.replace(record, prompt_ids=_NO_IDS)
        self._calls[record.call_id] = record
        last = self._last_of_chain.get(record.chain)
        if last is None or last.ordinal < record.ordinal:
            self._last_of_chain[record.chain] = record
        prompt = prepared.prompt
        self.turns.add(
            KnownTurn(
                record.call_id,
                record.ordinal,
                answer.turn,
                completion.ids,
                prompt.history,
                prompt.continues,
                record.chain,
            )
        )

    def deliver(self, call_id: str, delivery: Delivery) -> None:
        self._log.append(delivery_frame(call_id, delivery, time.time()))
        self._outcomes[call_id] = delivery
        if delivery is Delivery.DELIVERED:
            self.turns.mark_delivered(call_id)

    def calls(self) -> tuple[CallRecord, ...]:
        """By ordinal, whole."""
        ordered = sorted(self._calls.values(), key=lambda call: call.ordinal)
        return tuple(
            dataclasses.replace(
                call,
                prompt_ids=self._slots.prompt_ids(call.ordinal),
                delivery=self._outcomes.get(call.call_id, call.delivery),
            )
            for call in ordered
        )

    def _call_record(
        self,
        prepared: Prepared,
        slot: Slot,
        breaks: tuple[str, ...],
        completion: Completion,
        text: str,
    ) -> CallRecord:
        prompt, request, ledger = prepared.prompt, prepared.request, slot.ledger
        return CallRecord(
            run_id=self._run_id,
            episode_id=self._episode_id,
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
            breaks=breaks,
            shared_tok=ledger.shared_tok,
            spliced_tok=ledger.spliced_tok,
            encoded_tok=ledger.encoded_tok,
            requested=request.requested,
            effective=slot.params,
            model=request.model,
            received_at_s=prepared.received_at_s,
            queued_s=time.perf_counter() - prepared.started_s,
            text=text,
        )
