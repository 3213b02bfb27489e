"""Qwen3, dense and mixture of experts, in Flax nnx.

Reading order: `Qwen3` (embed, scan over layers, norm, head) -> `layer.Layer` (attention, then MLP
or experts).  Consecutive layers of one kind are one `Layer` whose parameters carry a leading axis,
scanned over.

How a token attends is an argument: training passes tree attention, the serving engine passes a
key-value cache, both share this file.  Given a `Parallel` it is the program of one chip of a
mesh: tokens and positions are those of whole rows, hidden states this chip's tokens only.

Axes: B rows, N tokens, D hidden, H query heads, KV key-value heads, hd head width, E experts,
K experts per token, L layers, V vocabulary, X chips of a row.

Invariant: the output at a token depends only on that token, its position and what `attend`
lets it see: nothing couples the tokens of a batch.
Not here: collectives (`parallel`), sampling, losses.
Source: transformers' modeling_qwen3(_moe).py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.layer import Attend, Cache, Layer, Routed, Seams, rms_norm
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.remat import Remat, rematerialised
from clawgym_jax.model.rope import Rope, rotary


class Output(NamedTuple):
    """What a forward pass returns."""

    hidden: jax.Array  # dtype[B, N, D], after the final norm
    cache: Cache  # attend's second results stacked over layers [L, ...], or None
    router_logits: jax.Array | None  # f32[L_moe, B, N, E]
    routing: jax.Array | None  # i32[L_moe, B, N, K], expert ids, largest gate first
    overflow: jax.Array | None = None  # i32[], on a mesh: rows that this chip's experts had no
    # room for, over all layers; above 0 nothing else here is worth anything


class Qwen3(nnx.Module):
    """The language model: `model(...)` gives hidden states, `model.logits` scores them."""

    def __init__(
        self,
        config: Qwen3Config,
        rngs: nnx.Rngs,
        remat: Remat = "none",
        parallel: Seams | None = None,
    ) -> None:
        d, v, dtype = config.hidden_size, config.vocab_size, config.param_dtype
        self.config = config
        self.remat = remat
        self.parallel = parallel
        self.embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), (v, d), dtype))
        self.segments = nnx.List(
            [Layer(config, count, is_moe, rngs, parallel) for is_moe, count in config.segments]
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
        if self.parallel is None:
            x = self.embed[...].astype(config.dtype)[tokens]
        else:
            x = self.parallel.look_up(self.embed[...], tokens, config.dtype)
            positions = self.parallel.mine(positions)
            replay = None if replay is None else self.parallel.mine(replay, axis=2)
        rope = rotary(positions, config)
        added, routed, start, start_moe = [], [], 0, 0
        for segment, (is_moe, count) in zip(self.segments, config.segments, strict=True):
            part = jax.tree.map(lambda leaf, s=start, c=count: leaf[s : s + c], cache)
            forced = None
            if replay is not None and is_moe:
                forced = replay[start_moe : start_moe + count]
                start_moe += count
            x, (extra, went) = self._scan(segment, x, rope, attend, part, forced)
            added.append(extra)
            if went is not None:
                routed.append(went)
            start += count
        every: Routed | None = _concatenate(routed)
        return Output(
            hidden=rms_norm(x, self.norm[...], config.rms_norm_eps),
            cache=_concatenate(added),
            router_logits=every and every.logits,
            routing=every.chosen if every and want_routing else None,
            overflow=self._overflow(every),
        )

    def _overflow(self, every: Routed | None) -> jax.Array | None:
        if self.parallel is None:
            return None
        if every is None or every.overflow is None:
            return jnp.zeros((), jnp.int32)
        return jnp.sum(every.overflow)

    def logits(self, hidden: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        """f32[..., V] (at least float32) for hidden states f[..., D]; V / X of them on a mesh.

        `weight` is what `head_weight` gives, for a caller that needs it more than once.
        """
        precise = jnp.promote_types(hidden.dtype, jnp.float32)
        weight = (self.head_weight() if weight is None else weight).astype(hidden.dtype)
        spec = "...d,vd->...v" if self.config.tie_word_embeddings else "...d,dv->...v"
        return jnp.einsum(spec, hidden, weight, preferred_element_type=precise)

    def head_weight(self) -> jax.Array:
        """f[V, D] where embeddings are tied, else f[D, V]; V / X on a mesh."""
        name = "embed" if self.config.tie_word_embeddings else "head"
        weight: jax.Array = getattr(self, name)[...]
        if self.parallel is None:
            return weight
        gathered = self.parallel.whole(name, weight.astype(self.config.dtype))
        return gathered.astype(weight.dtype)  # a loop over chunks adds up gradients in this type

    def _scan(
        self,
        segment: Layer,
        x: jax.Array,
        rope: Rope,
        attend: Attend,
        cache: Cache,
        replay: jax.Array | None,
    ) -> tuple[jax.Array, tuple[Cache, Routed | None]]:
        graphdef, stacked = nnx.split(segment)

        def step(carry: jax.Array, layer: tuple[Any, Cache, Any]) -> tuple[jax.Array, Any]:
            state, *inputs = layer
            out, *rest = nnx.merge(graphdef, state)(carry, rope, attend, *inputs)
            return out, tuple(rest)

        return jax.lax.scan(rematerialised(step, self.remat), x, (stacked, cache, replay))


def init(
    config: Qwen3Config, rng: jax.Array, remat: Remat = "none"
) -> tuple[nnx.GraphDef[Qwen3], nnx.State]:
    """A random model as (graphdef, params); params is a pytree of arrays."""
    return nnx.split(Qwen3(config, nnx.Rngs(params=rng), remat), nnx.Param)


def abstract(
    config: Qwen3Config, remat: Remat = "none", parallel: Seams | None = None
) -> tuple[nnx.GraphDef[Qwen3], nnx.State]:
    """Like `init`, with shapes (of the whole arrays) in place of arrays: nothing is allocated."""
    model = nnx.eval_shape(lambda: Qwen3(config, nnx.Rngs(params=0), remat, parallel))
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


def all_logits(graphdef: nnx.GraphDef[Qwen3], params: nnx.State, hidden: jax.Array) -> jax.Array:
    """f32[..., V] for hidden states f[..., D], the whole vocabulary, for serving."""
    model = nnx.merge(graphdef, params)
    logits = model.logits(hidden)
    if isinstance(model.parallel, ServingParallel):
        return model.parallel.all_logits(logits)
    return logits


def make_head(graphdef: nnx.GraphDef[Qwen3], params: nnx.State) -> Callable[[jax.Array], jax.Array]:
    """`apply_logits` of these parameters, for a loop: the weight is made ready once."""
    model = nnx.merge(graphdef, params)
    weight = model.head_weight()
    return lambda hidden: model.logits(hidden, weight)


def _concatenate(parts: list[Any]) -> Any:
    if not parts or parts[0] is None:
        return None
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
