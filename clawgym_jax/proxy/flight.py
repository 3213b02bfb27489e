"""One sample on its way: from the engine into the log, and from there to whoever still waits.

A flight outlives the connection that started it: a client that went away may send the request
again within `retry_grace_s` and gets the same sample; after that the sample is cancelled. Not
here: which request joins which flight (session.py), HTTP (streaming.py).
Invariant: a sample is in the log before anything of it is sent, and gets at most one outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from clawgym_jax.core.types import Delivery
from clawgym_jax.proxy.turns import Answer


class Flight:
    """State of one sample: waiting clients, result, outcome."""

    def __init__(
        self,
        call_id: str,
        prompt_tok: int,
        retry_grace_s: float,
        cancel: Callable[[], None],
        on_outcome: Callable[[str, Delivery], None],
        on_over: Callable[[Flight], None],
    ) -> None:
        """on_over: called once, when the flight has failed or has its outcome."""
        self.call_id = call_id
        self.prompt_tok = prompt_tok
        self.outcome = Delivery.PENDING
        self.done_s = 0.0  # perf_counter when the task ended
        self.expired = False  # nobody came back in time
        self._if_lost = Delivery.DISCONNECTED
        self._retry_grace_s = retry_grace_s
        self._cancel = cancel
        self._on_outcome = on_outcome
        self._on_over = on_over
        self._clients = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Answer] | None = None

    def launch(self, work: Coroutine[Any, Any, Answer]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(self._settle_if_expired)

    @property
    def task(self) -> asyncio.Task[Answer]:
        assert self._task is not None, "launch first"
        return self._task

    @property
    def done(self) -> bool:
        return self.task.done()

    @property
    def failed(self) -> bool:
        return self.done and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def has_clients(self) -> bool:
        return self._clients > 0

    def attach(self) -> None:
        self._clients += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach(self) -> None:
        """A client is gone: served, or lost."""
        self._clients -= 1
        if self._clients or self.failed or self.outcome is not Delivery.PENDING:
            return
        if self._if_lost is Delivery.SUPERSEDED:
            self.expire()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._retry_grace_s, self.expire)

    def delivered(self) -> None:
        self._decide(Delivery.DELIVERED)

    def supersede(self) -> None:
        """The same request is sampled anew: what is not delivered by now to its client is lost."""
        self._if_lost = Delivery.SUPERSEDED

    def expire(self) -> None:
        """Nobody waits any more: stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.expired = True
        if self.done:
            self._settle_if_expired(self.task)
        else:
            self._cancel()

    def _settle_if_expired(self, _: asyncio.Task[Answer]) -> None:
        self.done_s = self.done_s or time.perf_counter()
        if self.failed:  # this also takes note of an exception
            self._on_over(self)
        elif self.expired:
            self._decide(self._if_lost)

    def _decide(self, outcome: Delivery) -> None:
        if self.outcome is Delivery.PENDING:
            self.outcome = outcome
            self._on_outcome(self.call_id, outcome)
            self._on_over(self)
