"""One error type per boundary, each saying what was expected, what came, and how to fix it.

Not here: HTTP shapes of errors (the proxy translates), exit codes (launch/ does).
Invariant: an episode that fails raises nothing past `rollout`; it becomes an `Outcome`.
"""

from __future__ import annotations


class ClawgymError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ClawgymError):
    """A flag, override or experiment file is wrong."""


class ModelError(ClawgymError):
    """A model folder's config.json and weights do not fit each other, or this code."""


class CapacityError(ClawgymError):
    """A buffer of fixed size was too small for what came; nothing was dropped, the step failed."""


class RecordError(ClawgymError):
    """A stored record is not what its schema says (torn tails are not errors, they are cut)."""


class TaskError(ClawgymError):
    """A task folder is malformed."""


class SandboxError(ClawgymError):
    """A sandbox could not be made, used or removed: an infrastructure failure."""


class GradingError(ClawgymError):
    """A grader crashed, timed out or printed nothing usable: no reward, never reward 0."""


class LedgerError(ClawgymError):
    """Tokens do not add up: something recorded was lost, doubled or re-encoded."""


class LogprobError(ClawgymError):
    """Log-probs are missing, misaligned or disagree with the training engine."""


class TrainingError(ClawgymError):
    """An update is not finite; the weights before it are those of the latest checkpoint."""


class SamplerError(ClawgymError):
    """Base of what a Sampler may raise."""


class Overlong(SamplerError):
    """The prompt and one token do not fit the context window; nothing was cut."""

    def __init__(self, prompt_tok: int, window_tok: int) -> None:
        super().__init__(
            f"prompt of {prompt_tok} tokens does not fit the context window of {window_tok}; "
            f"expected at most {window_tok - 1}: compact the history or raise the window"
        )
        self.prompt_tok = prompt_tok
        self.window_tok = window_tok


class NoWeights(SamplerError):
    """Sampling was asked for before the first weights were published."""


class EngineRestarted(SamplerError):
    """The engine went away under this request; the request may be sent again."""


class Overloaded(SamplerError):
    """The engine's queue is full; the request may be sent again later."""
