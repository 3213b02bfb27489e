"""Qwen3, dense and mixture of experts, in Flax nnx.

Reading order: `Qwen3` (embed, scan over layers, norm, head) -> `Layer` (attention, then MLP or
experts) -> norm.  Consecutive layers of one kind are one `Layer` whose parameters carry a leading
axis, scanned over.

How a token attends is an argument: training passes tree attention, the serving engine passes a
key-value cache, both share this file.

Axes: B rows, N tokens, D hidden, H query heads, KV key-value heads, hd head width, F MLP
width, E experts, K experts per token, L layers, V vocabulary.

Invariant: the output at a token depends only on that token, its position and what `attend`
lets it see: nothing couples the tokens of a batch.
Not here: sharding, sampling, losses.  Source: transformers' modeling_qwen3(_moe).py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.model import moe
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.rope import Rope, rotary, rotate

Cache = Any  # a pytree of arrays with a leading layer axis, or None
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, Cache],  # q f[B,N,H,hd], k, v f[B,N,KV,hd], layer's cache
    tuple[jax.Array, Cache],  # out f[B,N,H,hd], what this layer adds to `Output.cache`
]


class Output(NamedTuple):
    """What a forward pass returns."""

    hidden: jax.Array  # dtype[B, N, D], after the final norm
    cache: Cache  # attend's second results stacked over layers [L, ...], or None
    router_logits: jax.Array | None  # f32[L_moe, B, N, E]
    routing: jax.Array | None  # i32[L_moe, B, N, K], expert ids, largest gate first


class Layer(nnx.Module):
    """`count` decoder layers of one kind; called with one layer's slice of the parameters."""

    def __init__(self, config: Qwen3Config, count: int, is_moe: bool, rngs: nnx.Rngs) -> None:
        d, hd, dtype = config.hidden_size, config.head_dim, config.param_dtype

        def matrix(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, *shape), dtype))

        def ones(size: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jnp.ones((count, size), dtype))

        self.config = config
        self.is_moe = is_moe
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
    ) -> tuple[jax.Array, Cache, jax.Array | None, jax.Array | None]:
        """New x, attend's addition, router logits f32[B, N, E] and routing i32[B, N, K]."""
        attended, added = self._attention(x, rope, attend, cache)
        x = x + attended
        normed = rms_norm(x, self.post_norm[...], self.config.rms_norm_eps)
        if not self.is_moe:
            return x + self._dense_mlp(normed), added, None, None
        out, logits, chosen = self._experts(normed, replay)
        return x + out, added, logits, chosen

    def _attention(
        self, x: jax.Array, rope: Rope, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        eps = self.config.rms_norm_eps
        normed = rms_norm(x, self.input_norm[...], eps)
        shape = (*x.shape[:2], -1, self.config.head_dim)
        q = rms_norm(_project(normed, self.q).reshape(shape), self.q_norm[...], eps)
        k = rms_norm(_project(normed, self.k).reshape(shape), self.k_norm[...], eps)
        v = _project(normed, self.v).reshape(shape)
        out, added = attend(rotate(q, rope), rotate(k, rope), v, cache)
        return _project(out.reshape(*x.shape[:2], -1), self.o), added

    def _dense_mlp(self, x: jax.Array) -> jax.Array:
        return _project(jax.nn.silu(_project(x, self.gate)) * _project(x, self.up), self.down)

    def _experts(
        self, x: jax.Array, replay: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config, flat = self.config, x.reshape(-1, x.shape[-1])
        precise = jnp.promote_types(x.dtype, jnp.float32)
        logits = flat.astype(precise) @ self.router[...].astype(precise)
        weights, chosen = moe.route(logits, config.num_experts_per_tok, config.norm_topk_prob)
        if replay is not None:
            recorded = replay.reshape(chosen.shape)
            chosen = jnp.where(recorded >= 0, recorded, chosen)
            weights = moe.gate_weights(logits, chosen, config.norm_topk_prob)
        params = moe.Experts(*(w[...].astype(x.dtype) for w in (self.gate, self.up, self.down)))
        out = moe.experts(flat, params, weights, chosen)
        rows = x.shape[:2]
        return out.reshape(x.shape), logits.reshape(*rows, -1), chosen.reshape(*rows, -1)


class Qwen3(nnx.Module):
    """The language model: `model(...)` gives hidden states, `model.logits` scores them."""

    def __init__(self, config: Qwen3Config, rngs: nnx.Rngs, remat: bool = False) -> None:
        d, v, dtype = config.hidden_size, config.vocab_size, config.param_dtype
        self.config = config
        self.remat = remat  # recompute each layer in the backward pass
        self.embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), (v, d), dtype))
        self.segments = nnx.List(
            [Layer(config, count, is_moe, rngs) for is_moe, count in config.segments]
        )
        self.norm = nnx.Param(jnp.ones((d,), dtype))
        if not config.tie_word_embeddings:
            self.head = nnx.Param(0.02 * jax.random.normal(rngs.params(), (d, v), dtype))

    def __call__(
        self,
        tokens: jax.Array,  # i32[B, N]
        positions: jax.Array,  # i32[B, N], depth on the path
        attend: Attend,
        cache: Cache = None,
        want_routing: bool = False,
        replay: jax.Array | None = None,  # i32[L_moe, B, N, K]
    ) -> Output:
        """Runs every layer.

        `replay` gives the experts to use (their gate weights still come from this model's
        router); a token whose ids are -1 is routed as usual.

        `cache` is sliced per layer and handed to `attend`; what `attend` returns is stacked
        over layers into `Output.cache` and need not have the cache's structure (return only
        the new keys and values, and the caller can write them in place once per step).
        """
        config = self.config
        rope = rotary(positions, config)
        x = self.embed[...].astype(config.dtype)[tokens]
        added, logits, routing, start, start_moe = [], [], [], 0, 0
        for segment, (is_moe, count) in zip(self.segments, config.segments, strict=True):
            part = jax.tree.map(lambda leaf, s=start, c=count: leaf[s : s + c], cache)
            forced = None
            if replay is not None and is_moe:
                forced = replay[start_moe : start_moe + count]
                start_moe += count
            x, ys = self._scan(segment, x, rope, attend, part, forced)
            added.append(ys[0])
            if segment.is_moe:
                logits.append(ys[1])
                routing.append(ys[2])
            start += count
        return Output(
            hidden=rms_norm(x, self.norm[...], config.rms_norm_eps),
            cache=_concatenate(added),
            router_logits=_concatenate(logits),
            routing=_concatenate(routing) if want_routing else None,
        )

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[..., V] (at least float32) for hidden states f[..., D]."""
        precise = jnp.promote_types(hidden.dtype, jnp.float32)
        if self.config.tie_word_embeddings:
            weight = self.embed[...].astype(hidden.dtype)
            return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=precise)
        weight = self.head[...].astype(hidden.dtype)
        return jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=precise)

    def _scan(
        self,
        segment: Layer,
        x: jax.Array,
        rope: Rope,
        attend: Attend,
        cache: Cache,
        replay: jax.Array | None,
    ) -> tuple[jax.Array, tuple[Cache, jax.Array | None, jax.Array | None]]:
        graphdef, stacked = nnx.split(segment)

        def step(carry: jax.Array, layer: tuple[Any, Cache, Any]) -> tuple[jax.Array, Any]:
            state, *inputs = layer
            out, *rest = nnx.merge(graphdef, state)(carry, rope, attend, *inputs)
            return out, tuple(rest)

        if self.remat:
            step = jax.checkpoint(step, prevent_cse=False)  # scan needs no CSE barrier
        return jax.lax.scan(step, x, (stacked, cache, replay))


def init(
    config: Qwen3Config, rng: jax.Array, remat: bool = False
) -> tuple[nnx.GraphDef[Qwen3], nnx.State]:
    """A random model as (graphdef, params); params is a pytree of arrays."""
    return nnx.split(Qwen3(config, nnx.Rngs(params=rng), remat), nnx.Param)


def abstract(config: Qwen3Config, remat: bool = False) -> tuple[nnx.GraphDef[Qwen3], nnx.State]:
    """Like `init`, with shapes in place of arrays: nothing is allocated."""
    model = nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(params=0), remat))
    return nnx.split(model, nnx.Param)


def apply(
    graphdef: nnx.GraphDef[Qwen3],
    params: nnx.State,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cache: Cache = None,
    want_routing: bool = False,
    replay: jax.Array | None = None,
) -> Output:
    """`Qwen3.__call__` as a pure function of the parameters."""
    model = nnx.merge(graphdef, params)
    return model(tokens, positions, attend, cache, want_routing, replay)


def apply_logits(graphdef: nnx.GraphDef[Qwen3], params: nnx.State, hidden: jax.Array) -> jax.Array:
    """`Qwen3.logits` as a pure function of the parameters."""
    return nnx.merge(graphdef, params).logits(hidden)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, the division in at least float32."""
    precise = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(precise), axis=-1, keepdims=True) + eps)
    return (precise * scale).astype(x.dtype) * weight.astype(x.dtype)


def _project(x: jax.Array, weight: nnx.Param[jax.Array]) -> jax.Array:
    return x @ weight[...].astype(x.dtype)


def _concatenate(parts: list[Any]) -> Any:
    if not parts or parts[0] is None:
        return None
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
