"""Decoder layers of Qwen3: attention, then an MLP or a mixture of experts.

Parameters are those of `count` layers of one kind; a call runs one of them (`qwen3` scans).  On a
mesh they are a chip's shards, gathered here just before use.

Axes: B rows, N tokens, D hidden, H query heads, KV key-value heads, hd head width, F MLP width,
E experts, K experts per token.
Invariant: the router works in at least float32, whatever the activations' type.
Not here: how tokens attend (an argument), how experts run (`moe`, `expert_parallel`).
Source: transformers' modeling_qwen3(_moe).py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from clawgym_jax.model import moe
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel import Parallel
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.remat import worth_keeping
from clawgym_jax.model.rope import Rope, rotate

Cache = Any  # a pytree of arrays with a leading layer axis, or None
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, Cache],  # q f[B,N,H,hd], k, v f[B,N,KV,hd], layer's cache
    tuple[jax.Array, Cache],  # out f[B,N,H,hd], what this layer adds to `Output.cache`
]
Seams = Parallel | ServingParallel  # what a chip's program does together with the others


class Routed(NamedTuple):
    """What a mixture's router did."""

    logits: jax.Array  # f32[B, N, E]
    chosen: jax.Array  # i32[B, N, K], expert ids, largest gate first
    overflow: jax.Array | None  # i32[], on a mesh: rows that this chip's experts had no room for


class Layer(nnx.Module):
    """`count` decoder layers of one kind; called with one layer's slice of the parameters."""

    def __init__(
        self,
        config: Qwen3Config,
        count: int,
        is_moe: bool,
        rngs: nnx.Rngs,
        parallel: Seams | None = None,
    ) -> None:
        d, hd, dtype = config.hidden_size, config.head_dim, config.param_dtype

        def matrix(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, *shape), dtype))

        def ones(size: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones((count, size), dtype))

        self.config = config
        self.is_moe = is_moe
        self.parallel = parallel
        self.input_norm = ones(d)
        self.q = matrix(d, config.num_heads * hd)
        self.k = matrix(d, config.num_kv_heads * hd)
        self.v = matrix(d, config.num_kv_heads * hd)
        self.o = matrix(config.num_heads * hd, d)
        self.q_norm = ones(hd)
        self.k_norm = ones(hd)
        self.post_norm = ones(d)
        if is_moe:
            e, f = config.num_experts, config.moe_intermediate_size
            self.router = matrix(d, e)
            self.gate, self.up, self.down = matrix(e, d, f), matrix(e, d, f), matrix(e, f, d)
        else:
            f = config.intermediate_size
            self.gate, self.up, self.down = matrix(d, f), matrix(d, f), matrix(f, d)

    def __call__(
        self,
        x: jax.Array,  # dtype[B, N, D]
        rope: Rope,
        attend: Attend,
        cache: Cache,
        replay: jax.Array | None,  # i32[B, N, K]
    ) -> tuple[jax.Array, Cache, Routed | None]:
        """New x, attend's addition, and for a mixture where its tokens went."""
        attended, added = self._attention(x, rope, attend, cache)
        x = worth_keeping(x + attended)
        normed = rms_norm(x, self.post_norm[...], self.config.rms_norm_eps)
        if not self.is_moe:
            return x + self._dense_mlp(normed), added, None
        out, routed = self._experts(normed, replay)
        return x + out, added, routed

    def _attention(
        self, x: jax.Array, rope: Rope, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, self.input_norm[...], eps)
        shape = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (worth_keeping(self._project(normed, name)).reshape(shape) for name in "qkv")
        q = rms_norm(q, self.q_norm[...], eps)
        k = rms_norm(k, self.k_norm[...], eps)
        out, added = attend(rotate(q, rope), rotate(k, rope), v, cache)
        return self._joined(self._project(out.reshape(*x.shape[:2], -1), "o")), added

    def _dense_mlp(self, x: jax.Array) -> jax.Array:
        gate, up = (worth_keeping(self._project(x, name)) for name in ("gate", "up"))
        return self._joined(self._project(jax.nn.silu(gate) * up, "down"))

    def _experts(self, x: jax.Array, replay: jax.Array | None) -> tuple[jax.Array, Routed]:
        config, flat = self.config, x.reshape(-1, x.shape[-1])
        precise = jnp.promote_types(x.dtype, jnp.float32)
        router = self._weight("router", precise)
        logits = jnp.matmul(flat.astype(precise), router, precision=jax.lax.Precision.HIGHEST)
        weights, chosen = moe.route(logits, config.num_experts_per_tok, config.norm_topk_prob)
        if replay is not None:
            recorded = replay.reshape(chosen.shape)
            chosen = jnp.where(recorded >= 0, recorded, chosen)
        if replay is not None or self.parallel is not None:
            weights = moe.gate_weights(logits, chosen, config.norm_topk_prob)
        params = moe.Experts(*(self._weight(name, x.dtype) for name in ("gate", "up", "down")))
        overflow = None
        if self.parallel is None:
            out = moe.experts(flat, params, weights, chosen)
        else:
            out, overflow = self.parallel.experts(flat, params, weights, chosen)
        rows = x.shape[:2]
        routed = Routed(logits.reshape(*rows, -1), chosen.reshape(*rows, -1), overflow)
        return out.reshape(x.shape), routed

    def _project(self, x: jax.Array, name: str) -> jax.Array:
        return x @ self._weight(name, x.dtype)

    def _joined(self, x: jax.Array) -> jax.Array:
        """A product over an axis that may be cut."""
        return x if self.parallel is None else self.parallel.joined(x)

    def _weight(self, name: str, dtype: DTypeLike) -> jax.Array:
        """A parameter to compute with: in the wanted type and, on a mesh, gathered."""
        weight: jax.Array = getattr(self, name)[...].astype(dtype)
        if self.parallel is None:
            return weight
        expert = self.is_moe and name in ("gate", "up", "down")
        return self.parallel.whole(f"expert_{name}" if expert else name, weight)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, the division in at least float32."""
    precise = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(precise), axis=-1, keepdims=True) + eps)
    return (precise * scale).astype(x.dtype) * weight.astype(x.dtype)
