"""Recorded experts at packed tokens: against a token-by-token twin, and what disagreement means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.batch.from_episodes import PPO, BatchConfig, build_batch, build_sft_batch
from clawgym_jax.batch.routes import UNKNOWN_EXPERT, route_disagreement
from clawgym_jax.batch.tree_batch import Part
from clawgym_jax.core.errors import ConfigError, RecordError
from clawgym_jax.core.types import CallRecord, Episode
from clawgym_jax.serving import engine
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig
from tests.batch.episodes import episode, forked_calls, random_episodes, simple, with_routing

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
CONFIG = BatchConfig(
    PackConfig(row_tok=96, train_tok=48, shorter=(48,)), KEEP_ALL, algorithm=PPO, replay_routes=True
)


def routed(episodes: list[Episode]) -> list[Episode]:
    """Every call with a random record of its own: any two disagree."""
    return [
        dataclasses.replace(e, calls=tuple(with_routing(c, 97 * i + c.ordinal) for c in e.calls))
        for i, e in enumerate(episodes)
    ]


def routes_by_token(part: Part) -> np.ndarray:
    """The twin, i16[R, L, N, k]: for each token, ask every call whose path it is on, in order."""
    rows = part.rows
    out = np.full((len(rows.tokens), 2, rows.tokens.shape[1], 2), -1, np.int16)
    slots: dict[int, tuple[int, set[int]]] = {}
    for r, k in zip(*np.nonzero(rows.mask), strict=True):
        end = rows.end[r]
        target = int(rows.target[r, k])
        path = {j for j in range(target + 1) if end[j] > target}
        slots.setdefault(int(rows.call[r, k]), (int(r), set()))[1].update(path)
    for number in sorted(slots):
        r, path = slots[number]
        routing = rows.calls[number].completion.routing
        assert routing is not None
        for j in path:
            found = routing[rows.position[r, j]]
            if (out[r, :, j] == -1).all() and not (found == UNKNOWN_EXPERT).all():
                out[r, :, j] = found
    return out


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_routes_are_those_of_the_first_record(seed: int) -> None:
    (batch,), report = build_batch(routed(random_episodes(seed, 3)), CONFIG)
    for part in batch:
        np.testing.assert_array_equal(part.arrays.routes, routes_by_token(part))
        assert part.arrays.routes.dtype == np.int16
    assert 0.0 <= report.route_disagreement <= 1.0


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_a_sampled_token_has_its_own_calls_route(seed: int) -> None:
    (batch,), _ = build_batch(routed(random_episodes(seed, 3)), CONFIG)
    for part in batch:
        rows = part.rows
        for r, k in zip(*np.nonzero(rows.mask), strict=True):
            call, offset = rows.calls[rows.call[r, k]], int(rows.offset[r, k])
            if offset + 1 < call.completion_tok:  # the last one is fed by a later call or none
                np.testing.assert_array_equal(
                    part.arrays.routes[r, :, rows.target[r, k]],
                    call.completion.routing[call.prompt_tok + offset],  # type: ignore[index]
                )


def test_a_calls_last_token_takes_the_route_of_the_next_call() -> None:
    calls = [with_routing(c, i) for i, c in enumerate(forked_calls("a"))]
    (batch,), _ = build_batch([episode("a", calls, 1.0)], CONFIG)
    rows, routes = batch[0].rows, batch[0].arrays.routes
    at = {
        (rows.calls[rows.call[r, k]].call_id, int(rows.offset[r, k])): (r, rows.target[r, k])
        for r, k in zip(*np.nonzero(rows.mask), strict=True)
    }
    r, n = at["a.0", 1]
    np.testing.assert_array_equal(routes[r, :, n], calls[1].completion.routing[3])  # type: ignore[index]
    r, n = at["a.1", 0]  # a leaf's last token: nobody fed it
    assert (routes[r, :, n] == -1).all()


def test_the_packer_means_the_same_by_first() -> None:
    """`PackedRows.first`, where its record has the token, is whose route it gets."""
    (batch,), _ = build_batch(routed(random_episodes(5)), CONFIG)
    for part in batch:
        rows = part.rows
        for r, n in zip(*np.nonzero(rows.first >= 0), strict=True):
            route = rows.calls[rows.first[r, n]].completion.routing[rows.position[r, n]]
            if not (route == UNKNOWN_EXPERT).all():
                np.testing.assert_array_equal(part.arrays.routes[r, :, n], route)


def test_padding_is_free() -> None:
    (batch,), _ = build_batch(routed(random_episodes(5)), CONFIG)
    for part in batch:
        longer = part.arrays.padded(part.arrays.rows + 1)
        assert (longer.routes[-1] == -1).all()


def test_without_replay_there_are_no_routes() -> None:
    config = dataclasses.replace(CONFIG, replay_routes=False)
    (batch,), report = build_batch(routed(random_episodes(5)), config)
    assert all(part.arrays.routes is None for part in batch)
    assert report.route_disagreement == 0.0
    supervised, _ = build_sft_batch(random_episodes(5), CONFIG)
    assert all(part.arrays.routes is None for part in supervised)


def test_replay_needs_records() -> None:
    with pytest.raises(ConfigError, match=r"engine\.routing"):
        build_batch(random_episodes(5), CONFIG)
    good = simple("a", 1.0, 4)
    call = with_routing(good.calls[0], 0)
    routing = call.completion.routing
    assert routing is not None
    done = dataclasses.replace(call.completion, routing=routing[:-1])
    bad = dataclasses.replace(good, calls=(dataclasses.replace(call, completion=done),))
    with pytest.raises(RecordError, match="routes of 7 tokens, got 6"):
        build_batch([bad], CONFIG)


def test_the_engine_means_the_same_by_unknown() -> None:
    assert UNKNOWN_EXPERT == engine.UNKNOWN_EXPERT


def set_routing(call: CallRecord, routing: np.ndarray) -> CallRecord:
    done = dataclasses.replace(call.completion, routing=routing.astype(np.uint8))
    return dataclasses.replace(call, completion=done)


def agreeing(share: float = 0.0) -> list[CallRecord]:
    """A fork of two branches whose common tokens have equal sets of experts in both records."""
    calls = forked_calls("a", branches=2)
    out = []
    for i, call in enumerate(calls):
        total = call.prompt_tok + call.completion_tok
        routing = np.stack([np.arange(total * 2).reshape(total, 2)] * 2, -1)
        routing[..., 1] += 100
        if i == 2:
            routing = routing[..., ::-1].copy()  # another order, the same set
            routing[: round(4 * share), 0, 0] = 254
        routing[-1] = UNKNOWN_EXPERT
        out.append(set_routing(call, routing))
    return out


def test_disagreement_is_of_sets_where_both_have_a_record() -> None:
    """Calls 0 (4 tokens, the last unknown) and 1: 3 x 2 pairs; 1 and 2: 4 x 2 pairs."""
    assert route_disagreement([select_calls(agreeing(), KEEP_ALL)]) == 0.0
    half = route_disagreement([select_calls(agreeing(0.5), KEEP_ALL)])
    assert half == pytest.approx(2 / 14)


def test_calls_that_share_nothing_cannot_disagree() -> None:
    assert route_disagreement([]) == 0.0
    alone = [with_routing(simple("a", 1.0, 3).calls[0], 1)]
    assert route_disagreement([select_calls(alone, KEEP_ALL)]) == 0.0


def test_versions_share_no_context_under_replay() -> None:
    """Two rollouts with one prompt: shared where one version sampled both, else computed twice."""

    def unique_tok(versions: tuple[int, int]) -> int:
        episodes = []
        for name, version in zip("ab", versions, strict=True):
            e = simple(name, 1.0, 2)
            done = dataclasses.replace(e.calls[0].completion, versions=np.full(2, version, "u4"))
            call = with_routing(dataclasses.replace(e.calls[0], completion=done), 0)
            episodes.append(dataclasses.replace(e, calls=(call,)))
        _, report = build_batch(episodes, CONFIG)
        return report.unique_tok

    assert unique_tok((1, 1)) == 3 + 2 + 2
    assert unique_tok((1, 2)) == 3 + 2 + 3 + 2
