"""A request on its way through the stock orchestrator, which knows nothing of it but a handle.

Not here: the table of entries (`jetstream_engine`).
Invariant: an entry ends once, with a completion or an error, before its last row is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.core.errors import EngineRestarted, SamplerError
from clawgym_jax.core.types import Completion
from clawgym_jax.serving.jetstream_rows import Outcome
from clawgym_jax.serving.request import Request


@dataclass(slots=True, eq=False)
class Entry:
    """A request on its way through the orchestrator. `request` is None for an unknown handle."""

    handle: int
    request: Request | None
    slot: int = -1  # the orchestrator's, once it was inserted
    sent_tok: int = 0
    forgotten: bool = False
    completion: Completion | None = None
    error: SamplerError | None = None

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None

    def outcome(self) -> Outcome:
        """For a request that has ended, or was cancelled before it got a slot."""
        if self.completion is None or self.request is None:
            cancelled = self.request is not None and self.request.cancelled
            broken = None if cancelled else EngineRestarted("JetStream's stream broke off")
            return Outcome(error=self.error or broken)
        c = self.completion
        scored = c if self.request.forced is not None else None
        return Outcome(c.finish, c.stop_string, c.cached_tok, c.routing, scored, self.error)


class Tokenizer:
    """What the orchestrator asks of one. Handles are not text, and no token stops a row."""

    bos_id = 0
    pad_id = 0
    stop_tokens: frozenset[int] = frozenset()
