"""The `Sampler` side that all drivers share: what a request must be before an engine sees it.

Not here: queues and engines (the drivers).
Invariant: what is wrong is refused, never cut or mended.
"""

from __future__ import annotations

import abc
import itertools
import math

import numpy as np

from clawgym_jax.core.errors import Overlong, SamplerError
from clawgym_jax.core.types import Completion, SamplingParams, Stop

_COLDEST = 1e-6


class Asking(abc.ABC):
    """core.interfaces.Sampler's `sample` and `score`, on top of `_submit`."""

    def __init__(self, vocabulary: int, window_tok: int, strings: bool) -> None:
        """strings: whether the engine can decode, for stop strings."""
        self._vocabulary = vocabulary
        self._window_tok = window_tok
        self._strings = strings
        self._scores = itertools.count()

    @abc.abstractmethod
    async def _submit(
        self,
        request_id: str,
        prompt: np.ndarray,
        params: SamplingParams,
        stop: Stop,
        forced: np.ndarray | None,
    ) -> Completion:
        """prompt: i32[P], checked. forced: i32[C], ids to teacher-force."""

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        """See core.interfaces.Sampler. Cancelling the awaiting task cancels the request."""
        if stop.strings and not self._strings:
            raise SamplerError("stop strings need a driver with `decode`; pass the tokenizer's")
        if "" in stop.strings:
            raise SamplerError("expected stop strings of at least one character, got an empty one")
        prompt = self._checked(prompt_ids, None)
        _check_params(params)
        return await self._submit(request_id, prompt, params, stop, None)

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        """Log-probs that the current weights give `ids` after `prompt_ids`."""
        forced = self._ids("scored", ids)
        prompt = self._checked(prompt_ids, forced)
        params = SamplingParams(temperature=temperature, max_tok=len(forced))
        _check_params(params)
        return await self._submit(f"score-{next(self._scores)}", prompt, params, Stop(), forced)

    def _checked(self, prompt_ids: np.ndarray, forced: np.ndarray | None) -> np.ndarray:
        """i32[P]"""
        prompt = self._ids("prompt", prompt_ids)
        fed = len(prompt) + (len(forced) - 1 if forced is not None else 0)
        if fed >= self._window_tok:
            raise Overlong(fed, self._window_tok)
        return prompt

    def _ids(self, name: str, given: np.ndarray) -> np.ndarray:
        """i32[n]; looked at before they are cast, which would cut what does not fit."""
        ids = np.asarray(given)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise SamplerError(
                f"expected {name} token ids as integers [n], n >= 1, got {ids.dtype} {ids.shape}"
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
            raise SamplerError(
                f"expected {name} token ids in [0, {self._vocabulary}), got {ids.min()} to "
                f"{ids.max()}: is it the tokenizer of another model?"
            )
        return np.ascontiguousarray(ids, np.int32)


def _check_params(p: SamplingParams) -> None:
    """Raises SamplerError. Colder than _COLDEST, logits / temperature have no digits left."""
    warm = p.temperature == 0 or _COLDEST <= p.temperature < math.inf
    whole = all(isinstance(x, int | np.integer) for x in (p.top_k, p.seed, p.max_tok))
    narrowing = 0 <= p.top_p <= 1 and 0 <= p.min_p <= 1
    if not (warm and whole and narrowing and 0 <= p.top_k < 1 << 31 and p.max_tok >= 1):
        raise SamplerError(
            f"expected a temperature of 0 or from {_COLDEST} on, top_p and min_p in [0, 1], and "
            f"integers top_k >= 0, seed and max_tok >= 1, got {p}"
        )
