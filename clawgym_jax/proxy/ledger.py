"""The prompt balance: every prompt token is shared, spliced or newly encoded.

shared: equal to the longest prefix that this prompt has in common with an earlier prompt of the
episode; spliced: sampled ids put in verbatim beyond that; encoded: the rest, environment text.
The three are counted independently (a comparison, spans, rendered pieces) and must add up.
Not here: the packing and sampled balances (batch). Source: contracts.md, 'Ledgers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import LedgerError
from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord, Span


@dataclass(frozen=True, slots=True)
class PromptLedger:
    """Token counts of one prompt, or of many when added up."""

    prompt_tok: int = 0
    shared_tok: int = 0
    spliced_tok: int = 0
    encoded_tok: int = 0

    def __add__(self, other: PromptLedger) -> PromptLedger:
        return PromptLedger(
            self.prompt_tok + other.prompt_tok,
            self.shared_tok + other.shared_tok,
            self.spliced_tok + other.spliced_tok,
            self.encoded_tok + other.encoded_tok,
        )

    def require_balance(self, what: str) -> None:
        if self.shared_tok + self.spliced_tok + self.encoded_tok != self.prompt_tok:
            raise LedgerError(
                f"{what}: {self.shared_tok} shared + {self.spliced_tok} spliced + "
                f"{self.encoded_tok} encoded tokens, expected {self.prompt_tok} in all"
            )


def longest_shared(prompt: np.ndarray, earlier: Sequence[np.ndarray]) -> int:
    """Longest prefix in common with any earlier prompt: the slow twin of PromptStore.add."""
    best = 0
    for other in reversed(earlier):
        if other.size > best and prompt.size > best and other[best] == prompt[best]:
            best = max(best, common_prefix(prompt, other))
    return best


def balance(
    prompt_tok: int,
    shared_tok: int,
    spans: Iterable[Span],
    encoded_pieces: Iterable[tuple[int, int]],
) -> PromptLedger:
    """encoded_pieces: (start, length) of what was rendered."""
    spliced = sum(_beyond(shared_tok, span.start, span.length) for span in spans)
    encoded = sum(_beyond(shared_tok, start, length) for start, length in encoded_pieces)
    ledger = PromptLedger(prompt_tok, shared_tok, spliced, encoded)
    ledger.require_balance("prompt")
    return ledger


def ledger_of(call: CallRecord) -> PromptLedger:
    return PromptLedger(call.prompt_tok, call.shared_tok, call.spliced_tok, call.encoded_tok)


def _beyond(limit: int, start: int, length: int) -> int:
    return max(0, start + length - max(start, limit))
