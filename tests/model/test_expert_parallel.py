"""Experts on several chips (an axis of `vmap`) equal experts on one; no row gets lost unseen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.model import expert_parallel, moe
from clawgym_jax.model.exchange import Plan, exchange, plan

X, T, K, D, F, E = 4, 10, 2, 8, 6, 8
OWN = E // X
FORMS: tuple[expert_parallel.Form, ...] = ("all_gather", "ragged")


def problem(seed: int, skew: float) -> tuple[Any, ...]:
    """Tokens of all chips, and experts; a positive skew sends most tokens to the first ones."""
    rng = np.random.default_rng(seed)
    shapes = ((E, D, F), (E, D, F), (E, F, D))
    params = moe.Experts(*(jnp.asarray(rng.normal(size=s)) for s in shapes))
    logits = rng.normal(size=(X * T, E)) - skew * np.arange(E)
    weights, chosen = moe.route(jnp.asarray(logits), K, normalise=True)
    x, upstream = (jnp.asarray(rng.normal(size=(X * T, D))) for _ in range(2))
    return x, params, weights, chosen, upstream


@functools.partial(jax.jit, static_argnums=(0, 1))
def over_chips(form: expert_parallel.Form, buffer: float, *args: Any) -> Any:
    """(result, gradients of x, experts and weights, overflow of each chip), cut over chips."""

    def chip(x: Any, params: Any, weights: Any, chosen: Any, upstream: Any) -> Any:
        def apply(x: Any, params: Any, weights: Any) -> Any:
            return expert_parallel.experts(
                x, params, weights, chosen, "x", form, buffer, "blocked", native=False
            )

        out, backward, overflow = jax.vjp(apply, x, params, weights, has_aux=True)
        return out, backward(upstream), overflow

    cut = jax.tree.map(lambda a: a.reshape(X, -1, *a.shape[1:]), args)
    out, grads, overflow = jax.vmap(chip, axis_name="x")(*cut)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (out, grads)), overflow


@jax.jit
def on_one(x: Any, params: Any, weights: Any, chosen: Any, upstream: Any) -> Any:
    def apply(x: Any, params: Any, weights: Any) -> Any:
        return moe.experts(x, params, weights, chosen, "every")

    out, backward = jax.vjp(apply, x, params, weights)
    return out, backward(upstream)


@settings(max_examples=10)
@given(seed=st.integers(0, 99), skew=st.sampled_from([0.0, 0.5, 5.0]))
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_equal_one_chip(form: expert_parallel.Form, seed: int, skew: float) -> None:
    with jax.enable_x64(True):
        args = problem(seed, skew)
        got, overflow = over_chips(form, float(X), *args)  # room for every token on one chip
        assert int(jnp.sum(overflow)) == 0
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(on_one(*args)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_room_are_counted(form: expert_parallel.Form) -> None:
    args = problem(0, 5.0)  # nearly all tokens choose the first chip's two experts
    chosen = np.asarray(args[3])
    wanted = np.bincount(chosen.reshape(-1) // OWN, minlength=X)
    room = expert_parallel.capacity(T, K, X, 1.0)
    (out, _), overflow = over_chips(form, 1.0, *args)
    np.testing.assert_array_equal(overflow, np.maximum(wanted - room, 0))
    assert int(overflow[0]) > 0
    right, _ = on_one(*args)
    assert float(jnp.max(jnp.abs(out - right))) > 0.1  # and it matters


def test_a_buffer_is_never_larger_than_all_there_can_be() -> None:
    assert expert_parallel.capacity(10, 2, 4, 100.0) == 80
    assert expert_parallel.capacity(8192, 8, 8, 2.0) == 131_072
    assert expert_parallel.capacity(8192, 8, 8, 1.001) % 512 == 0


# --- the exchange, against the sentences that define a ragged all-to-all -------------------------


def sent(rows: list[np.ndarray], routes: list[Any], room: int) -> list[np.ndarray]:
    """SEND and RECEIVE, slice by slice, as jax documents `ragged_all_to_all`."""
    out = [np.zeros((room, rows[0].shape[1])) for _ in rows]
    each = len(routes[0].send_sizes) // len(rows)
    for source, route in enumerate(routes):
        for i, size in enumerate(route.send_sizes):
            target, k = divmod(i, each)
            assert size == routes[target].receive_sizes[source * each + k]
            piece = rows[source][route.input_offsets[i] :][:size]
            assert len(piece) == size
            out[target][route.output_offsets[i] :][:size] = piece
    return out


def plans(counts: np.ndarray, room: int) -> list[Plan]:
    return [
        jax.tree.map(np.asarray, plan(jnp.asarray(counts), jnp.int32(chip), room))
        for chip in range(len(counts))
    ]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), most=st.integers(0, 9), room=st.sampled_from([0, 7, 40, 400]))
def test_rows_arrive_by_expert_and_go_home(seed: int, most: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, (X, E)).astype(np.int32)
    ways = plans(counts, room)
    length = int(counts.sum(1).max())
    rows = []  # each row says where it comes from and goes to
    for source in range(X):
        expert = np.repeat(np.arange(E), counts[source])
        told = np.stack([np.full(len(expert), source), expert, np.arange(len(expert))], 1) + 1
        rows.append(np.concatenate([told, np.zeros((length - len(told), 3), int)]))
    arrived = sent(rows, [w.there for w in ways], room)
    everyone = np.concatenate(rows)
    for chip in range(X):
        mine = everyone[(everyone[:, 1] - 1) // OWN == chip]
        mine = mine[np.lexsort((mine[:, 2], mine[:, 0], mine[:, 1]))]  # by expert, then source
        np.testing.assert_array_equal(arrived[chip][: len(mine)], mine[:room])
        assert not arrived[chip][len(mine) :].any()
        own = mine[:room, 1] - 1 - chip * OWN
        np.testing.assert_array_equal(ways[chip].sizes, np.bincount(own, minlength=OWN))
        assert ways[chip].overflow == max(len(mine) - room, 0)
    home = sent(arrived, [w.back for w in ways], length)
    for source in range(X):
        seen = home[source].any(axis=1)
        np.testing.assert_array_equal(home[source][seen], rows[source][seen])
    assert sum(int(h.any(axis=1).sum()) for h in home) == sum(
        min(int(counts[:, c * OWN : (c + 1) * OWN].sum()), room) for c in range(X)
    )


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_the_slow_twin_of_the_collective_moves_the_same_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, (X, E)).astype(np.int32)
    ways = plans(counts, 20)
    length = int(counts.sum(1).max())
    rows = rng.normal(size=(X, length, 3)).astype(np.float32)
    stacked = jax.tree.map(lambda *r: jnp.stack(r), *ways)

    def chip(rows: jax.Array, way: Plan) -> jax.Array:
        return exchange(rows, 20, way.there, way.back, "x", native=False)

    got = jax.vmap(chip, axis_name="x")(jnp.asarray(rows), stacked)
    np.testing.assert_array_equal(got, np.stack(sent(list(rows), [w.there for w in ways], 20)))
