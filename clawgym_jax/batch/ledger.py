"""The sampled-token ledger: what the log holds = what is trained + what is dropped, by reason.

One side is counted from the call records, the other from the arrays of the batch; they share no
intermediate result. Not here: the prompt ledger (`proxy`), the packing ledger (`tree.pack`).
Invariant: each sampled token is trained exactly once or dropped under exactly one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import LedgerError
from clawgym_jax.tree.filters import Selection
from clawgym_jax.tree.pack import PackedRows


@dataclass(frozen=True, slots=True)
class SampledLedger:
    """Tokens of one batch."""

    sampled_tok: int  # in the call records
    trained_tok: int  # in the batch arrays
    dropped_tok: Counter[str]  # by reason


def check_ledger(
    selections: Sequence[Selection], reasons: Sequence[str], *parts: PackedRows
) -> SampledLedger:
    """Raises LedgerError unless both sides agree, token for token.

    reasons: per rollout, why none of its tokens is trained; "" where some are.
    parts: the whole batch, in as many buckets as it has.
    """
    dropped: Counter[str] = Counter()
    expected: dict[str, int] = {}
    sampled = 0
    for selection, reason in zip(selections, reasons, strict=True):
        for number, call in enumerate(selection.tree.calls):
            sampled += call.completion_tok
            why = selection.dropped.get(number, reason)
            if why:
                dropped[why] += call.completion_tok
            else:
                expected[call.call_id] = call.completion_tok
    trained = _trained(parts)
    _compare(expected, trained)
    for rows in parts:
        _check_ids(rows)
        _check_packing(rows)
    total = sum(len(offsets) for offsets in trained.values())
    if sampled != total + sum(dropped.values()):
        raise LedgerError(
            f"{sampled} sampled tokens, but {total} trained and {dict(dropped)} dropped: "
            f"{sampled - total - sum(dropped.values())} are unaccounted for"
        )
    return SampledLedger(sampled, total, dropped)


def _trained(parts: Sequence[PackedRows]) -> dict[str, np.ndarray]:
    """call id -> offsets that the arrays train, sorted, from the arrays alone."""
    offsets: dict[str, list[np.ndarray]] = {}
    for rows in parts:
        r, k = np.nonzero(rows.mask)
        order = np.argsort(rows.call[r, k], kind="stable")
        calls, found = rows.call[r, k][order], rows.offset[r, k][order]
        numbers, starts = np.unique(calls, return_index=True)
        for number, own in zip(numbers, np.split(found, starts[1:]), strict=False):
            offsets.setdefault(rows.calls[number].call_id, []).append(own)
    return {call_id: np.sort(np.concatenate(found)) for call_id, found in offsets.items()}


def _compare(expected: dict[str, int], trained: dict[str, np.ndarray]) -> None:
    if expected.keys() != trained.keys():
        lost = sorted(expected.keys() - trained.keys())[:3]
        extra = sorted(trained.keys() - expected.keys())[:3]
        raise LedgerError(f"calls missing from the batch: {lost}; not expected there: {extra}")
    for call_id, count in expected.items():
        if not np.array_equal(trained[call_id], np.arange(count)):
            raise LedgerError(
                f"call {call_id} sampled {count} tokens, each to be trained once; the batch "
                f"trains offsets {trained[call_id].tolist()}"
            )


def _check_ids(rows: PackedRows) -> None:
    """The ids at the trainable slots are those that were sampled."""
    if not rows.calls:
        return
    starts = np.cumsum([0, *(c.completion_tok for c in rows.calls)])
    sampled = np.concatenate([c.completion.ids for c in rows.calls])
    ids = np.take_along_axis(rows.tokens, rows.target, axis=1)[rows.mask]
    wrong = ids != sampled[starts[rows.call[rows.mask]] + rows.offset[rows.mask]]
    if wrong.any():
        call = rows.calls[rows.call[rows.mask][wrong][0]]
        raise LedgerError(f"call {call.call_id} was sampled as other ids than are trained")


def _check_packing(rows: PackedRows) -> None:
    """The slots that hold a token, counted in the arrays, are those that the packer counted."""
    real = int(np.count_nonzero(rows.first >= 0))
    if rows.unique_tok < 0 or rows.repeated_tok < 0 or real != rows.tokens.size - rows.padding_tok:
        raise LedgerError(
            f"packing: {rows.tokens.size} slots, {real} of them hold a token; unique "
            f"{rows.unique_tok}, repeated {rows.repeated_tok}, padding {rows.padding_tok}: "
            "they do not add up"
        )
