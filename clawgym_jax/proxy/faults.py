"""Why a request is refused, in neutral words; each protocol file gives it its own shape.

Not here: sampler errors (core.errors) and faults of an episode (session.py).
Invariant: a message says what was expected, what came and how to fix it.
"""

from __future__ import annotations

import enum

from clawgym_jax.core.errors import ClawgymError


class FaultKind(enum.Enum):
    """Kind of refusal, with its HTTP status."""

    INVALID = 400
    AUTH = 401
    NOT_FOUND = 404
    METHOD = 405
    TOO_LARGE = 413
    ENCODING = 415
    OVERFLOW = -400  # 400 too, but protocols word it apart
    INTERNAL = 500
    OVERLOADED = 503

    @property
    def status(self) -> int:
        return abs(self.value)


class RequestFault(ClawgymError):
    """A request that gets an error instead of an answer."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class EngineAway(RequestFault):
    """The engine did not come back in the time that was set for hiding it."""

    def __init__(self, message: str) -> None:
        super().__init__(FaultKind.OVERLOADED, message)


class PromptOverflow(RequestFault):
    """The prompt leaves no room for a token in the context window."""

    def __init__(self, prompt_tok: int, window_tok: int) -> None:
        super().__init__(
            FaultKind.OVERFLOW,
            f"prompt of {prompt_tok} tokens does not fit the context window of {window_tok}",
        )
        self.prompt_tok = prompt_tok
        self.window_tok = window_tok


def invalid(expected: str, got: object, fix: str = "") -> RequestFault:
    """A malformed request. `got` is shown shortened."""
    shown = repr(got)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return RequestFault(
        FaultKind.INVALID, f"expected {expected}, got {shown}" + (f"; {fix}" if fix else "")
    )
