"""The draw against the plain formula: what is left out where nobody asks for it changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.serving.sampling import Knobs, _narrow, draw

SLOTS, VOCAB = 5, 13
DRAW = jax.jit(draw)


def one_row(logits: np.ndarray, knobs: Knobs) -> tuple[int, float, float]:
    """id and log-probs of one slot, f32[V], by the definition."""
    raw = jax.nn.log_softmax(logits)
    if knobs.temperature <= 0:
        at = int(jnp.argmax(logits))
        return at, float(raw[at]), float(raw[at])
    scaled = jax.nn.log_softmax(logits / knobs.temperature)
    order = np.argsort(-np.asarray(scaled), kind="stable")
    chances = np.exp(np.asarray(scaled, np.float64)[order])
    before = np.cumsum(chances) - chances
    keep = (before < knobs.top_p) & (chances >= knobs.min_p * chances[0])
    keep &= (knobs.top_k == 0) | (np.arange(VOCAB) < knobs.top_k)
    keep[0] = True
    key = jax.random.fold_in(jax.random.key(knobs.seed), knobs.step)
    noisy = np.full(VOCAB, -np.inf)
    noisy[order[keep]] = np.asarray(scaled + jax.random.gumbel(key, (VOCAB,)))[order[keep]]
    at = int(np.argmax(noisy))
    return at, float(scaled[at]), float(raw[at])


def some_knobs(rng: np.random.Generator, plain: bool) -> Knobs:
    """plain: nothing is narrowed; then all slots are greedy in half of the cases."""
    greedy = rng.random() < 0.5 if plain else rng.random(SLOTS) < 0.3
    off = plain | (rng.random((3, SLOTS)) < 0.5)
    return Knobs(
        temperature=np.where(greedy, 0, rng.uniform(0.3, 2, SLOTS)).astype(np.float32),
        top_p=np.where(off[0], 1, rng.uniform(0.2, 0.9, SLOTS)).astype(np.float32),
        top_k=np.where(off[1], 0, rng.integers(1, VOCAB, SLOTS)).astype(np.int32),
        min_p=np.where(off[2], 0, rng.uniform(0.01, 0.5, SLOTS)).astype(np.float32),
        seed=rng.integers(0, 2**32, SLOTS, dtype=np.uint32),
        step=rng.integers(0, 999, SLOTS).astype(np.int32),
    )


def row_of(knobs: Knobs, slot: int) -> Knobs:
    return Knobs(*(field[slot] for field in knobs))


@given(seed=st.integers(0, 10**6), plain=st.booleans())
@settings(max_examples=40)
def test_every_slot_gets_its_own_draw_whatever_the_others_ask_for(seed: int, plain: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (SLOTS, VOCAB)).astype(np.float32)
    knobs, active = some_knobs(rng, plain), rng.random(SLOTS) < 0.7
    got = DRAW(logits, knobs, active)
    for slot in np.flatnonzero(active):
        at, logprob, raw = one_row(logits[slot], row_of(knobs, slot))
        assert got.ids[slot] == at
        np.testing.assert_allclose(got.logprobs[slot], logprob, atol=2e-6)
        np.testing.assert_allclose(got.raw_logprobs[slot], raw, atol=2e-6)


def test_the_first_of_equals_is_the_greedy_choice() -> None:
    logits = np.zeros((SLOTS, VOCAB), np.float32)
    logits[:, 4:9] = 3.0
    knobs = some_knobs(np.random.default_rng(0), plain=True)._replace(
        temperature=np.zeros(SLOTS, np.float32)
    )
    assert DRAW(logits, knobs, np.full(SLOTS, True)).ids.tolist() == [4] * SLOTS


def test_a_neighbour_that_narrows_takes_no_token_from_the_others() -> None:
    """Rounded, the chances before the last tokens add up to 1: with top_p = 1 they stay."""
    logits = jnp.tile(4 * jax.random.normal(jax.random.key(2), (1, 1024)), (2, 1))
    chances = jax.nn.softmax(-jnp.sort(-logits[:1]))
    assert jnp.any(jnp.cumsum(chances, axis=-1) - chances >= 1.0), "choose other logits"
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.int32)
    top_p = np.array([1, 0.5], np.float32)
    knobs = Knobs(ones, top_p, zeros, np.zeros(2, np.float32), zeros.astype(np.uint32), zeros)
    kept = np.isfinite(_narrow(logits, knobs)).sum(axis=-1)
    assert kept[0] == 1024 and kept[1] < 512
