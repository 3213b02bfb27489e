"""The tiny model's starting point.

Two choices that made copying appear early: embeddings are noise plus one unit vector shared by
all tokens (attention by position alone needs a direction that every token has), and the rows
of the router are orthogonal to it (else every token would prefer the same experts).  The
query and key norms start at 1.5, which sharpens attention.  No attention pattern is planted.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.model import qwen3
from clawgym_jax.model.config import Qwen3Config

NOISE = 1.0  # norm of an embedding's own part, beside the shared part of norm 1
QK_NORM = 1.5


def initialise(config: Qwen3Config, seed: int) -> tuple[nnx.GraphDef[qwen3.Qwen3], nnx.State]:
    """(graphdef, params) of a fresh model."""
    rng, noise_rng, shared_rng = jax.random.split(jax.random.key(seed), 3)
    graphdef, params = qwen3.init(config, rng)
    model = nnx.merge(graphdef, params)
    shape = (config.vocab_size, config.hidden_size)
    shared = jax.random.normal(shared_rng, shape[1:])
    shared = shared / jnp.linalg.norm(shared)
    noise = jax.random.normal(noise_rng, shape) * NOISE / jnp.sqrt(config.hidden_size)
    model.embed[...] = noise + shared
    for segment in model.segments:
        segment.q_norm[...] = jnp.full_like(segment.q_norm[...], QK_NORM)
        segment.k_norm[...] = jnp.full_like(segment.k_norm[...], QK_NORM)
        for name in ("q", "k", "v", "gate", "up"):
            weight = getattr(segment, name)
            fan_in = weight[...].shape[-2]
            weight[...] = weight[...] / 0.02 / jnp.sqrt(fan_in)
        for name in ("o", "down"):  # the residual stream starts as the embedding
            weight = getattr(segment, name)
            weight[...] = weight[...] * 0.5
        if segment.is_moe:
            router = segment.router[...]  # f[n, D, E]
            along = jnp.einsum("nde,d->ne", router, shared)
            segment.router[...] = router - along[:, None, :] * shared[None, :, None]
    return nnx.split(model, nnx.Param)
