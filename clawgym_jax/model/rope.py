"""Rotary position embedding, plain and stretched by YaRN.

Frequencies depend on the configuration only: they are numpy, computed when a program is traced,
rounded where transformers rounds them (float32 after each operation).  An angle is frequency x
position, so at position 40,000 a frequency that is off by one unit in the last place turns a
query by 0.002: "the same up to rounding" would not be the same model.

Invariant: what attention sees of two tokens depends on the difference of their positions only.
Not here: frequencies that depend on the length of the input (dynamic NTK, LongRoPE).
Source: transformers' modeling_rope_utils.py; YaRN is arXiv:2309.00071.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from clawgym_jax.model.config import Qwen3Config, Yarn

Rope = tuple[jax.Array, jax.Array]  # cos and sin, dtype[B, N, 1, hd/2]


def rotary(positions: jax.Array, config: Qwen3Config) -> Rope:
    """cos and sin at `positions` i32[B, N], each dtype[B, N, 1, hd/2]; angles in >= float32."""
    precise = jnp.promote_types(config.dtype, jnp.float32)
    frequencies, scale = inverse_frequencies(config)
    angles = positions[..., None, None].astype(precise) * frequencies.astype(precise)
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    return cos.astype(config.dtype), sin.astype(config.dtype)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates pairs (i, i + hd/2), the half-rotation layout of Hugging Face."""
    cos, sin = rope
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def inverse_frequencies(config: Qwen3Config) -> tuple[np.ndarray, float]:
    """f32[hd/2], radians per position of each pair, and the factor on cos and sin."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    # The power in float64, then rounded: what a correctly rounded float32 power gives.
    periods = np.power(float(np.float32(config.rope_theta)), exponents.astype(np.float64))
    periods = periods.astype(np.float32)
    if config.yarn is None:
        return np.float32(1.0) / periods, 1.0
    plain = np.float32(1.0) / periods
    stretched = np.float32(1.0) / (np.float32(config.yarn.factor) * periods)
    keep = np.float32(1.0) - _ramp(config.yarn, config.head_dim, config.rope_theta)
    return stretched * (np.float32(1.0) - keep) + plain * keep, attention_factor(config.yarn)


def attention_factor(yarn: Yarn) -> float:
    """What cos and sin are multiplied by; the scores thus by its square (0.1 ln s + 1)."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if yarn.factor <= 1 else 0.1 * mscale * math.log(yarn.factor) + 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return temperature(yarn.mscale) / temperature(yarn.mscale_all_dim)
    return temperature(1.0)


def _ramp(yarn: Yarn, head_dim: int, theta: float) -> np.ndarray:
    """f32[hd/2]: 0 for pairs that turn fast and stay as trained, 1 for those fully stretched."""

    def pair_that_turns(times: float) -> float:  # over the trained length
        trained = yarn.original_max_position_embeddings
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp: np.ndarray = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    return ramp
