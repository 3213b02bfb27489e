"""Recorded experts of packed tokens, for routing replay.

A packed token's route is that of its first computation: row `position` in the record of the first
call of its row that has it. The last token that a call samples is not fed in that call; its route
is the one of the first call that runs through it, and free where none does.
Not here: how programs use routes (`model.moe`), how the engine records them (`serving.routes`).
Invariant: a trainable token stays one token whatever the calls' records say about it.
Source: the shared definitions, "Routing replay" (R3: rollout routing replay, Ma et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_jax.batch.tree_batch import UNKNOWN_ROUTE
from clawgym_jax.core.errors import ConfigError, RecordError
from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.filters import Selection
from clawgym_jax.tree.pack import PackedRows

UNKNOWN_EXPERT = 255  # in a completion's routing; `serving.engine` has the same


def route_shape(calls: Sequence[CallRecord]) -> tuple[int, int]:
    """(MoE layers, experts per token), the same in all calls that have routes."""
    shapes = {c.completion.routing.shape[1:] for c in calls if c.completion.routing is not None}
    if len(shapes) != 1:
        raise ConfigError(
            f"batch.replay_routes: expected calls with recorded experts of one shape, got shapes "
            f"{sorted(shapes)} in {len(calls)} calls; set engine.routing=True for the rollouts"
        )
    layers, k = shapes.pop()
    return layers, k


def routes_of(rows: PackedRows, shape: tuple[int, int]) -> np.ndarray:
    """i16[R, L, N, k]: of each packed token the first record, calls in sampling order."""
    n_rows, n = rows.tokens.shape
    out = np.full((n_rows, n, *shape), UNKNOWN_ROUTE, np.int16)
    known = np.zeros((n_rows, n), bool)
    starts = np.nonzero(rows.mask & (rows.offset == 0))
    order = np.argsort(rows.call[starts], kind="stable")
    for r, k in zip(starts[0][order], starts[1][order], strict=True):
        call, own = rows.calls[rows.call[r, k]], int(rows.target[r, k])
        above = np.nonzero(rows.end[r, :own] > own)[0]
        path = np.append(above, np.arange(own, own + call.completion_tok))
        new = path[~known[r, path]]
        out[r, new] = _recorded(call, rows.position[r, new], shape)
        known[r, new] = (out[r, new] != UNKNOWN_ROUTE).all((1, 2))
    return np.ascontiguousarray(out.transpose(0, 2, 1, 3))


def _recorded(call: CallRecord, positions: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """i16[len(positions), L, k]"""
    routing = call.completion.routing
    if routing is None:
        return np.full((len(positions), *shape), UNKNOWN_ROUTE, np.int16)
    total = call.prompt_tok + call.completion_tok
    if len(routing) != total:
        raise RecordError(
            f"call {call.call_id}: expected routes of {total} tokens, got {len(routing)}"
        )
    found = routing[positions].astype(np.int16)
    return np.where(found == UNKNOWN_EXPERT, np.int16(UNKNOWN_ROUTE), found)


def route_disagreement(selections: Sequence[Selection]) -> float:
    """Share of (token, layer) whose sets of experts differ between two kept calls of a rollout.

    Each call is compared with the earlier kept call that it shares the longest prefix with (the
    latest of several), over that prefix, where both have a record. 0 where nothing was compared.
    """
    differ = compared = 0
    for selection in selections:
        calls = [selection.tree.calls[i] for i in selection.kept]
        calls = [c for c in calls if c.completion.routing is not None]
        ids = [np.concatenate([c.prompt_ids, c.completion.ids]) for c in calls]
        for i in range(1, len(calls)):
            shared = [common_prefix(ids[j], ids[i]) for j in range(i)]
            n, other = max((n, j) for j, n in enumerate(shared))
            counts = _compare(calls[other].completion.routing, calls[i].completion.routing, n)
            differ, compared = differ + counts[0], compared + counts[1]
    return differ / compared if compared else 0.0


def _compare(a: np.ndarray | None, b: np.ndarray | None, n: int) -> tuple[int, int]:
    """(differing, compared) of the first n tokens' (token, layer) pairs."""
    assert a is not None
    assert b is not None
    a, b = a[:n], b[:n]
    known = (a != UNKNOWN_EXPERT).all(-1) & (b != UNKNOWN_EXPERT).all(-1)
    unequal = known & (a != b).any(-1)  # as lists; few, so that sorting them is cheap
    as_sets = np.sort(a[unequal], -1) != np.sort(b[unequal], -1)
    return int(as_sets.any(-1).sum()), int(known.sum())
