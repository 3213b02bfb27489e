"""Many rollouts' trees in rows of static lengths.

Rollouts of a row share their common context (system prompt, tools, task prompt): it is computed
once; weights stay per rollout. A rollout that does not fit a row is cut between calls (`cut`); the
pieces repeat the ancestors they need as context, and every sampled token is trainable in one piece
only. Pieces that share most go into one row (`assign`), and every row is as short as it can be.
Not here: weights, advantages, log-probs (`batch.tree_batch`).
Invariant (packing ledger): rows x length, over all buckets = unique + repeated ancestors + padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.assign import FilledRow, assign
from clawgym_jax.tree.cut import Piece, cut_forest
from clawgym_jax.tree.filters import Selection
from clawgym_jax.tree.forest import Forest
from clawgym_jax.tree.rows import PackedRows, fill_rows

__all__ = ["PackConfig", "PackedRows", "pack"]

Sharers = tuple[int, int, str]  # calls that share context have it equal, see _sharers


@dataclass(frozen=True)
class PackConfig:
    """Static shapes: one compilation for each of `buckets`."""

    row_tok: int = 2048  # N; at least the context window
    train_tok: int = 1024  # K: most trainable tokens in a row
    shorter: tuple[int, ...] = ()  # lengths of smaller rows, for what does not fill a large one
    share_context: bool = True  # between rollouts of a row
    share_versions: bool = True  # between calls of different weight versions; off: routing replay

    def __post_init__(self) -> None:
        if self.row_tok < 1 or self.train_tok < 1:
            raise ConfigError(
                f"pack: expected row_tok and train_tok above 0, got {self.row_tok} and "
                f"{self.train_tok}"
            )
        if len(set(self.shorter)) < len(self.shorter) or not all(
            0 < n < self.row_tok for n in self.shorter
        ):
            raise ConfigError(
                f"pack.shorter: expected different lengths from 1 to row_tok - 1 = "
                f"{self.row_tok - 1}, got {self.shorter}"
            )

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(row_tok, train_tok) of every kind of row, ascending."""
        lengths = [*sorted(self.shorter), self.row_tok]
        return tuple((n, max(1, self.train_tok * n // self.row_tok)) for n in lengths)


def pack(selections: Sequence[Selection], config: PackConfig) -> tuple[PackedRows, ...]:
    """Packs the kept calls of each rollout; rollout numbers are indices of `selections`.

    -> one part for each bucket that has rows, ascending; one empty part of the largest bucket where
    there is nothing to pack. A token that stands in several parts is unique in the first of them.
    Raises ConfigError where a call alone is longer than a row.
    """
    kept = [
        (rollout, call) for rollout, selection in enumerate(selections) for call in selection.kept
    ]
    pieces = [
        piece
        for number, forest in enumerate(_forests(selections, kept, config))
        for piece in cut_forest(forest, number, config.row_tok, config.train_tok)
    ]
    rows = assign(pieces, config.row_tok, config.train_tok)
    counted: set[tuple[int, int]] = set()
    parts: list[PackedRows] = []
    for bucket in config.buckets:
        members = [row for row in rows if _bucket(row, config) == bucket]
        if members or (not rows and bucket == config.buckets[-1]):
            unique = _unique_tok(members, counted)
            filled = [_forests(selections, _calls(row.pieces), config) for row in members]
            parts.append(fill_rows(filled, *bucket, unique))
    return tuple(parts)


def _forests(
    selections: Sequence[Selection], members: Iterable[tuple[int, int]], config: PackConfig
) -> list[Forest]:
    """Calls in forests, so that those which may share context are in one.

    members: (rollout, call number), ascending.
    """
    forests: dict[Sharers, Forest] = {}
    for rollout, call in members:
        tree = selections[rollout].tree
        key = _sharers(rollout, tree.calls[call], config)
        forests.setdefault(key, Forest()).graft(tree, call, rollout)
    return list(forests.values())


def _sharers(rollout: int, call: CallRecord, config: PackConfig) -> Sharers:
    """Rollout, weight version and call id, each where it must agree for context to be shared.

    A completion of several versions shares its context with nobody: its prompt has routes of the
    version that it began with, and who began with that one is not known.
    """
    of = -1 if config.share_context else rollout
    if config.share_versions:
        return of, -1, ""
    versions = call.completion.versions
    if versions.size == call.completion_tok and (versions == versions[0]).all():
        return of, int(versions[0]), ""
    return of, -1, call.call_id


def _calls(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    return sorted((piece.rollout, call) for piece in pieces for call in piece.calls)


def _bucket(row: FilledRow, config: PackConfig) -> tuple[int, int]:
    """The smallest that holds the row."""
    return next(b for b in config.buckets if row.tree_tok <= b[0] and row.train_tok <= b[1])


def _unique_tok(rows: Sequence[FilledRow], counted: set[tuple[int, int]]) -> int:
    """Tokens of these rows that no row before them has; `counted` remembers what is shared."""
    unique = 0
    for piece in (piece for row in rows for piece in row.pieces):
        unique += piece.own_tok
        for segment, size in piece.shared.items():
            if (piece.forest, segment) not in counted:
                counted.add((piece.forest, segment))
                unique += size
    return unique
