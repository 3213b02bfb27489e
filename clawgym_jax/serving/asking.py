"""The `Sampler` side that all drivers share: what a request must be before an engine sees it.

Not here: queues and engines (the drivers).
Invariant: what is wrong is refused, never cut or mended.
"""

from __future__ import annotations

import abc
import itertools

import numpy as np

from clawgym_jax.core.errors import Overlong, SamplerError
from clawgym_jax.core.types import Completion, SamplingParams, Stop


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
        return await self._submit(request_id, self._checked(prompt_ids, None), params, stop, None)

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        """Log-probs that the current weights give `ids` after `prompt_ids`."""
        forced = np.asarray(ids, np.int32)
        if not len(forced):
            raise SamplerError("score needs at least one token id, got none")
        prompt = self._checked(prompt_ids, forced)
        params = SamplingParams(temperature=temperature, max_tok=len(forced))
        return await self._submit(f"score-{next(self._scores)}", prompt, params, Stop(), forced)

    def _checked(self, prompt_ids: np.ndarray, forced: np.ndarray | None) -> np.ndarray:
        """i32[P]"""
        prompt = np.ascontiguousarray(prompt_ids, np.int32)
        if prompt.ndim != 1 or not len(prompt):
            raise SamplerError(f"expected a prompt of token ids [P], P >= 1, got {prompt.shape}")
        for name, ids in (("prompt", prompt), ("scored", forced)):
            if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
                raise SamplerError(
                    f"expected {name} token ids in [0, {self._vocabulary}), got {ids.min()} to "
                    f"{ids.max()}: is it the tokenizer of another model?"
                )
        if len(prompt) + (len(forced) if forced is not None else 1) > self._window_tok:
            raise Overlong(len(prompt), self._window_tok)
        return prompt
