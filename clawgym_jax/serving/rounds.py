"""A queue before a batcher, and one round over both: swap, reap, admit, prefill, step.

All drivers turn the same rounds, so that they give the same tokens. What is in flight when weights
are swapped: `drain` lets it finish first, `continue` swaps between two steps and goes on (each
token carries its version, the keys and values serve nobody else), `abort` ends it with
finish=abort.
Not here: threads and futures (the drivers), batching (`batcher`).
Invariant: the batcher is touched by whoever turns the rounds, and by nobody else meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from clawgym_jax.core.types import Finish
from clawgym_jax.serving.batcher import Batcher
from clawgym_jax.serving.request import Finished, Request
from clawgym_jax.serving.state import SwapPolicy


class Rounds:
    """`waiting` and `pending` are touched under the driver's lock only."""

    def __init__(
        self,
        batcher: Batcher,
        policy: SwapPolicy,
        wake: threading.Condition,
        end: Callable[[Sequence[Finished]], None],
    ) -> None:
        """wake: notified when new weights are served. end: is given what ended."""
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.pending: tuple[Any, int] | None = None  # loaded weights and their version
        self.taken: list[Request] = []  # out of the queue, not yet in the batcher
        self._batcher = batcher
        self._wake = wake
        self._end = end

    def require_newer(self, version: int) -> None:
        """Raises ValueError; under the lock or before it."""
        if version <= self._batcher.version:
            raise ValueError(
                f"versions rise: version {self._batcher.version} is served already, got {version}"
            )
        if self.pending is not None:
            raise ValueError(f"version {self.pending[1]} is being published; wait for it")

    def turn(self) -> None:
        """One round."""
        self.swap_if_due()
        self._reap()
        while self.pending is None and self._take():
            self._batcher.admit(self.taken)
            self.taken = []
            self._end(self._batcher.advance())
        if self._batcher.filling:
            self._end(self._batcher.advance())
        if self._batcher.running:
            self._end(self._batcher.step())

    def swap_if_due(self) -> None:
        if self.pending is None or (self._batcher.busy and self.policy == "drain"):
            return
        if self._batcher.busy and self.policy == "abort":
            self._end(self._batcher.stop(self._batcher.requests()))
        with self._wake:
            self._batcher.swap(*self.pending)
            self.pending = None
            self._wake.notify_all()

    def in_engine(self) -> list[Request]:
        """What a failure of the engine takes with it, each once; what had ended is handed out."""
        self._end(self._batcher.take_ended())
        return list(dict.fromkeys([*self.taken, *self._batcher.requests()]))

    def _take(self) -> bool:
        """Takes the next waiting requests that there is room for."""
        with self._wake:
            self.taken = self._batcher.choose(self.waiting) if self.waiting else []
            for request in self.taken:
                self.waiting.remove(request)
        return bool(self.taken)

    def _reap(self) -> None:
        """Ends cancelled requests, waiting or running."""
        with self._wake:
            gone = [r for r in self.waiting if r.cancelled]
            for request in gone:
                self.waiting.remove(request)
        self._end([(r, r.completion(Finish.ABORT)) for r in gone])
        stopped = [r for r in self._batcher.requests() if r.cancelled]
        if stopped:
            self._end(self._batcher.stop(stopped))
