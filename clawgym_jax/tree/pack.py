"""Many rollouts' trees in rows of one static length.

Rollouts of a row share their common context (system prompt, tools, task prompt): it is computed
once; weights stay per rollout. A rollout that does not fit a row is cut between calls; the pieces
repeat the ancestors they need as context, and every sampled token is trainable in one piece only.
Not here: weights, advantages, log-probs (`batch.tree_batch`).
Invariant (packing ledger): rows x length = unique + repeated ancestors + padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.filters import Selection
from clawgym_jax.tree.flatten import NO_PRED, flatten
from clawgym_jax.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class PackConfig:
    """Static shapes: one compilation per (row_tok, train_tok)."""

    row_tok: int = 2048  # N; at least the context window
    train_tok: int = 1024  # K: most trainable tokens in a row
    share_context: bool = True  # between rollouts of a row; off where routes differ by version


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows. Padding: end = j + 1, mask False, pred = NO_PRED, call = -1."""

    tokens: np.ndarray  # i32[R, N]
    position: np.ndarray  # i32[R, N]
    end: np.ndarray  # i32[R, N]
    target: np.ndarray  # i32[R, K], index into the row
    pred: np.ndarray  # i32[R, K], index into the row
    mask: np.ndarray  # bool[R, K], True at trainable tokens
    rollout: np.ndarray  # i32[R, K], number of the rollout in the batch, -1 at padding
    call: np.ndarray  # i32[R, K], number of the call in `calls`, -1 at padding
    offset: np.ndarray  # i32[R, K], index in that call's completion
    calls: tuple[CallRecord, ...]  # every call that is trained here
    unique_tok: int  # tokens in the rows that stand there for the first time
    repeated_tok: int  # ancestors repeated because their tree was cut or spread over rows
    linear_tok: int  # what one row per call would have held (prompt + completion of each)

    @property
    def padding_tok(self) -> int:
        return int(self.tokens.size) - self.unique_tok - self.repeated_tok


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some kept calls of one rollout that go into one row together."""

    rollout: int
    calls: tuple[CallRecord, ...]
    tree_tok: int
    train_tok: int


def pack(selections: Sequence[Selection], config: PackConfig) -> PackedRows:
    """Packs the kept calls of each rollout; rollout numbers are indices of `selections`."""
    pieces = [
        piece
        for number, selection in enumerate(selections)
        for piece in _pieces(number, selection, config)
    ]
    rows = _assign(pieces, config)
    return _to_arrays(rows, pieces, config)


def concatenate(parts: Sequence[PackedRows]) -> PackedRows:
    """Rows of several packs below each other; rollouts and calls are renumbered in order."""
    rollouts = np.cumsum([0, *(int(p.rollout.max(initial=-1)) + 1 for p in parts)])
    calls = np.cumsum([0, *(len(p.calls) for p in parts)])

    def stack(name: str, shift: np.ndarray | None = None) -> np.ndarray:
        arrays = [getattr(p, name) for p in parts]
        if shift is not None:
            arrays = [np.where(a < 0, a, a + s) for a, s in zip(arrays, shift[:-1], strict=True)]
        return np.concatenate(arrays)

    return PackedRows(
        tokens=stack("tokens"),
        position=stack("position"),
        end=stack("end"),
        target=stack("target"),
        pred=stack("pred"),
        mask=stack("mask"),
        rollout=stack("rollout", rollouts),
        call=stack("call", calls),
        offset=stack("offset"),
        calls=tuple(call for p in parts for call in p.calls),
        unique_tok=sum(p.unique_tok for p in parts),
        repeated_tok=sum(p.repeated_tok for p in parts),
        linear_tok=sum(p.linear_tok for p in parts),
    )


def _pieces(number: int, selection: Selection, config: PackConfig) -> list[_Piece]:
    """The rollout whole if it fits a row, else cut between calls in depth-first order."""
    calls = [selection.tree.calls[i] for i in _depth_first_calls(selection)]
    if not calls:
        return []
    whole = _piece(number, calls)
    if _fits(whole, config):
        return [whole]
    pieces: list[_Piece] = []
    current: list[CallRecord] = []
    tree = PrefixTree()
    for call in calls:
        tree.add(call)
        trainable = sum(c.completion_tok for c in tree.calls)
        if not _fits(_Piece(number, (), tree.total_tok, trainable), config):
            if current:
                pieces.append(_piece(number, current))
            _check_alone(call, config)
            current, tree = [], PrefixTree()
            tree.add(call)
        current.append(call)
    return [*pieces, _piece(number, current)]


def _check_alone(call: CallRecord, config: PackConfig) -> None:
    if call.prompt_tok + call.completion_tok > config.row_tok or (
        call.completion_tok > config.train_tok
    ):
        raise ConfigError(
            f"call {call.call_id} has {call.prompt_tok} prompt and {call.completion_tok} sampled "
            f"tokens; rows have row_tok={config.row_tok}, train_tok={config.train_tok}: "
            "raise them above the context window"
        )


def _depth_first_calls(selection: Selection) -> list[int]:
    """Kept calls so that neighbours share as much as possible."""
    tree = selection.tree
    keys: dict[int, list[int]] = {}
    for index in selection.kept:
        keys[index] = [_rank(tree, s) for s in tree.path(tree.sampled[index])]
    return sorted(selection.kept, key=lambda index: keys[index])


def _rank(tree: PrefixTree, segment: int) -> int:
    return tree.segments[tree.segments[segment].parent].children.index(segment)


def _piece(rollout: int, calls: Sequence[CallRecord]) -> _Piece:
    tree = _forest([(rollout, call) for call in calls])
    return _Piece(rollout, tuple(calls), tree.total_tok, sum(c.completion_tok for c in calls))


def _forest(calls: Sequence[tuple[int, CallRecord]]) -> PrefixTree:
    """One forest of several rollouts' calls, each rollout's in sampling order."""
    tree = PrefixTree()
    for rollout, call in sorted(calls, key=lambda rc: (rc[0], rc[1].ordinal)):
        tree.add(call, rollout)
    return tree


def _fits(piece: _Piece, config: PackConfig) -> bool:
    return piece.tree_tok <= config.row_tok and piece.train_tok <= config.train_tok


@dataclass(slots=True)
class _Row:
    """A row being filled. `tree_tok` is an upper bound until the row is flattened."""

    pieces: list[int]
    tree: PrefixTree  # first prompts of its pieces, to measure sharing
    tree_tok: int = 0
    train_tok: int = 0


def _assign(pieces: Sequence[_Piece], config: PackConfig) -> list[list[int]]:
    """Best fit: each piece goes where it adds the fewest tokens, then where least room is left."""
    rows: list[_Row] = []
    by_size = sorted(range(len(pieces)), key=lambda p: -pieces[p].tree_tok)
    for number in by_size:
        piece = pieces[number]
        best: tuple[int, int, _Row] | None = None
        for row in rows:
            added = piece.tree_tok - _shared(row, piece, config)
            room = config.row_tok - row.tree_tok - added
            if room >= 0 and row.train_tok + piece.train_tok <= config.train_tok:
                key = (added, room, row)
                if best is None or key[:2] < best[:2]:
                    best = key
        row = best[2] if best else _Row([], PrefixTree())
        if best is None:
            rows.append(row)
        row.tree_tok += best[0] if best else piece.tree_tok
        row.train_tok += piece.train_tok
        row.pieces.append(number)
        row.tree.add(piece.calls[0], rollout=number)
    return [row.pieces for row in rows]


def _shared(row: _Row, piece: _Piece, config: PackConfig) -> int:
    """Tokens of the piece that the row holds already (a lower bound: its first prompt's)."""
    if not config.share_context:
        return 0
    return row.tree.shared_context_tok(np.asarray(piece.calls[0].prompt_ids, np.int32))


def _to_arrays(
    rows: Sequence[Sequence[int]], pieces: Sequence[_Piece], config: PackConfig
) -> PackedRows:
    shape_n, shape_k = (len(rows), config.row_tok), (len(rows), config.train_tok)
    tokens, position = np.zeros(shape_n, np.int32), np.zeros(shape_n, np.int32)
    end = np.tile(np.arange(1, config.row_tok + 1, dtype=np.int32), (len(rows), 1))
    target, offset = np.zeros(shape_k, np.int32), np.zeros(shape_k, np.int32)
    pred, rollout, call = (np.full(shape_k, NO_PRED, np.int32) for _ in range(3))
    mask = np.zeros(shape_k, bool)
    calls: list[CallRecord] = []
    used = 0
    for r, row in enumerate(rows):
        members = [(pieces[p].rollout, c) for p in row for c in pieces[p].calls]
        trees = [_forest(members)] if config.share_context else _forests(members)
        at_n = at_k = 0
        for tree in trees:
            flat = flatten(tree)
            n, k = len(flat.tokens), len(flat.target)
            slots_n, slots_k = slice(at_n, at_n + n), slice(at_k, at_k + k)
            tokens[r, slots_n], position[r, slots_n] = flat.tokens, flat.position
            end[r, slots_n] = flat.end + at_n
            target[r, slots_k] = flat.target + at_n
            pred[r, slots_k] = np.where(flat.pred == NO_PRED, NO_PRED, flat.pred + at_n)
            rollout[r, slots_k] = np.asarray(tree.rollout, np.int32)[flat.call]
            call[r, slots_k] = flat.call + len(calls)
            offset[r, slots_k], mask[r, slots_k] = flat.offset, True
            calls.extend(tree.calls)
            at_n, at_k = at_n + n, at_k + k
        used += at_n
    unique = _unique_tok(pieces, config)
    return PackedRows(
        tokens, position, end, target, pred, mask, rollout, call, offset, tuple(calls),
        unique_tok=unique,
        repeated_tok=used - unique,
        linear_tok=sum(c.prompt_tok + c.completion_tok for c in calls),
    )  # fmt: skip


def _forests(members: Sequence[tuple[int, CallRecord]]) -> list[PrefixTree]:
    """One tree per rollout, nothing shared between rollouts."""
    rollouts = sorted({rollout for rollout, _ in members})
    return [_forest([m for m in members if m[0] == rollout]) for rollout in rollouts]


def _unique_tok(pieces: Sequence[_Piece], config: PackConfig) -> int:
    """Tokens of the whole batch as one forest without cuts or row borders."""
    members = [(piece.rollout, call) for piece in pieces for call in piece.calls]
    trees = [_forest(members)] if config.share_context else _forests(members)
    return sum(tree.total_tok for tree in trees)
