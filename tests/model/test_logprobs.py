"""Chunked log-probs against the obvious computation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.model import logprobs

B, N, D, V, K = 2, 9, 6, 11, 7


def _problem() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, N, D)))
    head = jnp.asarray(rng.normal(size=(D, V)))
    pred = jnp.asarray(rng.integers(0, N, size=(B, K)), jnp.int32).at[:, -2:].set(-1)
    target = jnp.asarray(rng.integers(0, V, size=(B, K)), jnp.int32)
    temperature = jnp.asarray(rng.uniform(0.5, 2.0, size=(B, K)))
    return hidden, head, pred, target, temperature


def _obvious(
    hidden: jax.Array, head: jax.Array, pred: jax.Array, target: jax.Array, heat: jax.Array
) -> logprobs.TokenLogprobs:
    z = hidden[jnp.arange(B)[:, None], pred] @ head
    scaled = jax.nn.log_softmax(z / heat[..., None])

    def at(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, target[..., None], -1)[..., 0] * (pred >= 0)

    entropy = -jnp.sum(jnp.exp(scaled) * scaled, -1) * (pred >= 0)
    return logprobs.TokenLogprobs(at(scaled), at(jax.nn.log_softmax(z)), entropy)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_equals_the_obvious_form(chunk: int) -> None:
    with jax.enable_x64(True):
        hidden, head, pred, target, heat = _problem()

        def chunked(hidden: jax.Array, head: jax.Array) -> logprobs.TokenLogprobs:
            return logprobs.token_logprobs(lambda h: h @ head, hidden, pred, target, heat, chunk)

        def obvious(hidden: jax.Array, head: jax.Array) -> logprobs.TokenLogprobs:
            return _obvious(hidden, head, pred, target, heat)

        got, got_vjp = jax.vjp(chunked, hidden, head)
        expected, expected_vjp = jax.vjp(obvious, hidden, head)
        for a, b in zip(got, expected, strict=True):
            assert a.shape == (B, K)
            np.testing.assert_allclose(a, b, atol=1e-12)
        upstream = logprobs.TokenLogprobs(
            *(jnp.cos(jnp.arange(B * K) + i).reshape(B, K) for i in range(3))
        )
        for a, b in zip(got_vjp(upstream), expected_vjp(upstream), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_padding_gives_zeros_and_finite_gradients() -> None:
    hidden, head, pred, target, _ = _problem()
    nowhere = jnp.full_like(pred, -1)

    def total(hidden: jax.Array) -> jax.Array:
        heat = jnp.zeros(pred.shape)  # what a padded slot may hold
        out = logprobs.token_logprobs(lambda h: h @ head, hidden, nowhere, target, heat)
        return sum(jnp.sum(x) for x in out)  # type: ignore[return-value]

    value, grad = jax.value_and_grad(total)(hidden)
    assert value == 0.0
    np.testing.assert_array_equal(grad, 0.0)


def test_logits_of_all_tokens_never_exist() -> None:
    """The compiled program's temporaries stay far below K x V floats."""
    many, vocabulary, width = 4096, 8192, 8
    hidden = jnp.zeros((1, many, width))
    head = jnp.zeros((width, vocabulary))
    index = jnp.arange(many, dtype=jnp.int32)[None]
    heat = jnp.ones((1, many))

    def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
        out = logprobs.token_logprobs(lambda h: h @ head, hidden, index, index, heat, 64)
        return jnp.sum(out.logprobs)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(hidden, head).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < many * vocabulary * 4 / 8


CHIPS = 3


def test_a_vocabulary_over_chips_gives_the_same() -> None:
    """Chips are an axis of `vmap`; each has its part of the head and some of the tokens."""
    with jax.enable_x64(True):
        hidden, _, pred, target, heat = _problem()
        head = jnp.asarray(np.random.default_rng(1).normal(size=(D, 4 * CHIPS)))
        upstream = [jnp.cos(jnp.arange(B * K) + i).reshape(B, K) for i in range(3)]

        def total(out: logprobs.TokenLogprobs) -> jax.Array:
            return sum(jnp.sum(u * x) for u, x in zip(upstream, out, strict=True))

        def chip(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, logprobs.TokenLogprobs]:
            out = logprobs.token_logprobs(
                lambda h: h @ head, hidden, pred, target, heat, 3, axis="x"
            )
            return total(out) / CHIPS, out  # all chips hold the same: each counts for its share

        def whole(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, logprobs.TokenLogprobs]:
            out = logprobs.token_logprobs(lambda h: h @ head, hidden, pred, target, heat, 3)
            return total(out), out

        gradient = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
        cut = (jnp.stack(jnp.split(hidden, CHIPS, 1)), jnp.stack(jnp.split(head, CHIPS, 1)))
        grads, out = jax.jit(jax.vmap(gradient(chip), axis_name="x"))(*cut)
        expected_grads, expected = jax.jit(gradient(whole))(hidden, head)
        for a, b in zip(out, expected, strict=True):
            for one in a:
                np.testing.assert_allclose(one, b, atol=1e-12)
        for a, b in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(jnp.concatenate(list(a), 1), b, atol=1e-12)


def test_shapes_must_agree() -> None:
    hidden, head, pred, target, heat = _problem()
    with pytest.raises(ValueError, match="expected one shape"):
        logprobs.token_logprobs(lambda h: h @ head, hidden, pred, target[:, 1:], heat)
