"""What is fixed about a sample before the engine is asked: its name, seed, limits and balance.

Seeds derive from (run, episode, chain, call ordinal in the chain, attempt), so a repeated episode
samples the same whatever else runs beside it.
Not here: asking the engine (sampling.py), records (recorder.py).
Source: contracts.md, 'Sampling that harnesses ask for' and 'Retries and delivery'.
Invariant: ordinals are given once, in the order of sampling, and a slot that fails gives its
prompt back, so that the prompt balance counts recorded calls only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.types import SamplingParams, Stop
from clawgym_jax.proxy.episode import EpisodeSpec
from clawgym_jax.proxy.ledger import PromptLedger, balance
from clawgym_jax.proxy.prepared import Prepared
from clawgym_jax.proxy.prompt_store import PromptStore
from clawgym_jax.proxy.sampling import stable_seed


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the episode's order of samples."""

    call_id: str
    ordinal: int
    attempt: int  # how many times the same request was sampled before
    params: SamplingParams
    stop: Stop
    ledger: PromptLedger


class Slots:
    """Gives out the slots of one episode."""

    def __init__(self, spec: EpisodeSpec, run_id: str, stop_ids: tuple[int, ...]) -> None:
        self._spec = spec
        self._run_id = run_id
        self._stop_ids = stop_ids
        self._prompts = PromptStore()
        self._given = 0
        self._attempts: Counter[bytes] = Counter()
        self._place: dict[bytes, int] = {}  # of a request in its chain
        self._chain_length: defaultdict[str, int] = defaultdict(int)

    def reserve(self, prepared: Prepared, key: bytes) -> Slot:
        """key: equal for requests of one chain with the same prompt."""
        prompt = prepared.prompt
        ordinal, attempt = self._given, self._attempts[key]
        self._given += 1
        self._attempts[key] += 1
        prompt_tok = int(prompt.ids.size)
        shared_tok = self._prompts.add(ordinal, prompt.ids)
        return Slot(
            call_id=f"{self._spec.call_prefix or self._spec.episode_id}.{ordinal}",
            ordinal=ordinal,
            attempt=attempt,
            params=self._params(prepared, key, attempt),
            stop=Stop(self._stop_ids, prepared.request.stop_strings),
            ledger=balance(prompt_tok, shared_tok, prompt.spans, prompt.encoded),
        )

    def give_back(self, slot: Slot) -> None:
        """Nothing was sampled in it."""
        self._prompts.remove(slot.ordinal)

    def prompt_ids(self, ordinal: int) -> np.ndarray:
        """i32[P]"""
        return self._prompts.get(ordinal)

    def _params(self, prepared: Prepared, key: bytes, attempt: int) -> SamplingParams:
        """The run's sampling; of what the harness asks for, only a smaller limit counts."""
        spec, chain = self._spec, prepared.chain
        if key not in self._place:
            self._place[key] = self._chain_length[chain]
            self._chain_length[chain] += 1
        seed = stable_seed(
            self._run_id, spec.episode_id, spec.seed, chain, self._place[key], attempt
        )
        limits = [spec.window_tok - int(prepared.prompt.ids.size), spec.max_tok]
        if prepared.request.max_tok is not None:
            limits.append(prepared.request.max_tok)
        return dataclasses.replace(spec.sampling, seed=seed, max_tok=min(limits))
