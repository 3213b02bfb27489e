"""A Qwen3 engine over static slots: prefill into a slot, decode all slots together.

The method names are those of JetStream 0.2.2's Engine (load_params, init_decode_state, prefill,
insert, generate, max_concurrent_decodes). A slot keeps its keys and values after its request
ended, so that the next turn of the episode prefills only its new tokens; which slot holds what is
the driver's business (`slots`). Not here: queues, threads, stop rules.

Invariants: a program's shapes depend on the configuration only; keys and values of a slot below
its length are those of its tokens under the weights that were given; all sampled tokens, the first
of a completion included, come out of `generate`.
Axes: S slots, T window, L layers, b prefill batch, P prefill chunk, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.qwen3 import Qwen3, all_logits, apply
from clawgym_jax.serving import mesh
from clawgym_jax.serving.attention import attend_chunk, attend_step
from clawgym_jax.serving.sampling import Draw, Knobs, draw

Params = Any
Array = Any  # numpy on the way in, traced inside a program


@dataclass(frozen=True)
class EngineConfig:
    """Static shapes of the engine."""

    slots: int = 32  # requests decoded together
    window_tok: int = 1024  # T: prompt + completion of a slot
    prefill_batch: int = 8  # b: prompts prefilled together
    prefill_chunks: tuple[int, ...] = (32, 128, 512)  # P: suffix lengths that have a program
    kv_buckets: tuple[int, ...] = ()  # lengths up to which attention reads; () = the window


class DecodeState(NamedTuple):
    """Everything a decode step reads and writes. Slot S is scratch, for padding of prefills."""

    k: jax.Array  # f[L, S + 1, T, KV, hd]
    v: jax.Array  # f[L, S + 1, T, KV, hd]
    length: jax.Array  # i32[S], tokens with keys and values
    last: jax.Array  # i32[S], the token to feed next
    active: jax.Array  # bool[S]
    knobs: Knobs  # [S] each


class Prefill(NamedTuple):
    """One padded batch of prompt suffixes. Padding rows use the scratch slot."""

    tokens: Array  # i32[b, P]
    slots: Array  # i32[b], where the result goes
    sources: Array  # i32[b], slot whose first `starts` tokens are the prefix
    starts: Array  # i32[b], tokens before the suffix
    targets: Array  # i32[b, P], token after each (for scoring), 0 where not wanted
    temperature: Array  # f32[b], for scoring


class Rows(NamedTuple):
    """New values for the slots in `mask` (insert)."""

    mask: Array  # bool[S]
    length: Array  # i32[S]
    last: Array  # i32[S]
    active: Array  # bool[S]
    knobs: Knobs  # numpy [S] each


class Engine:
    """Pure programs over explicit state; holds no request and no weights."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        model: Qwen3Config,
        config: EngineConfig,
        parallel: ServingParallel | None = None,
        write_rows: bool | None = None,
    ) -> None:
        """parallel: the chips of a host; `graphdef` is then the one made with it.

        write_rows: new keys and values are written row by row, which a TPU does in place where a
        scatter copies the whole cache; None: on TPUs.
        """
        if min(config.slots, config.prefill_batch, config.window_tok) < 1:
            raise ConfigError(
                f"engine: expected slots, prefill_batch and window_tok of at least 1, got {config}"
            )
        if not config.prefill_chunks or max(config.prefill_chunks) > config.window_tok:
            raise ConfigError(
                f"prefill_chunks {config.prefill_chunks} must be non-empty and at most "
                f"window_tok={config.window_tok}"
            )
        self.model = model
        self.config = config
        self.kv_buckets = tuple(sorted({*config.kv_buckets, config.window_tok}))
        self.parallel = parallel
        if write_rows is None:
            write_rows = mesh.platform(parallel) == "tpu"
        write = _write_rows if write_rows else _scatter
        self._prefill = jax.jit(
            mesh.on_chips(parallel, functools.partial(_prefill, graphdef, write)),
            donate_argnums=(1,),
            static_argnums=(3, 4),
        )
        self._generate = jax.jit(
            mesh.on_chips(parallel, functools.partial(_generate, graphdef, write)),
            donate_argnums=(1,),
            static_argnums=(2,),
        )
        self._insert = jax.jit(_insert, donate_argnums=(0,))
        self._load = mesh.loader(parallel, model.dtype)

    @property
    def max_concurrent_decodes(self) -> int:
        return self.config.slots

    @property
    def max_prefill_length(self) -> int:
        return self.config.window_tok - 1

    def load_params(self, params: Params) -> Params:
        """A copy of the trainer's parameters in the layout and types that the programs expect."""
        return self._load(params)

    def init_decode_state(self) -> DecodeState:
        """Empty slots."""
        return mesh.place_state(self.parallel, self._empty())  # type: ignore[no-any-return]

    def _empty(self) -> DecodeState:
        c, m, s = self.config, self.model, self.config.slots
        shape = (m.num_layers, s + 1, c.window_tok, m.num_kv_heads, m.head_dim)
        zeros = functools.partial(jnp.zeros, (s,))
        knobs = Knobs(
            temperature=jnp.ones((s,), jnp.float32),
            top_p=jnp.ones((s,), jnp.float32),
            top_k=zeros(jnp.int32),
            min_p=zeros(jnp.float32),
            seed=zeros(jnp.uint32),
            step=zeros(jnp.int32),
        )
        return DecodeState(
            k=jnp.zeros(shape, m.dtype),
            v=jnp.zeros(shape, m.dtype),
            length=zeros(jnp.int32),
            last=zeros(jnp.int32),
            active=zeros(jnp.bool_),
            knobs=knobs,
        )

    def lower(self, params: Params) -> dict[str, jax.stages.Lowered]:
        """The largest decode and prefill programs, for parameters or shapes of the trainer's."""
        state = jax.eval_shape(self._empty)
        params = jax.eval_shape(functools.partial(mesh.computed, dtype=self.model.dtype), params)
        params, state = mesh.shaped(self.parallel, params, state)
        b, chunk = self.config.prefill_batch, max(self.config.prefill_chunks)
        rows, tokens = np.zeros(b, np.int32), np.zeros((b, chunk), np.int32)
        batch = Prefill(tokens, rows, rows, rows, tokens, np.ones(b, np.float32))
        window = self.config.window_tok
        return {
            "decode": self._generate.lower(params, state, window),
            "prefill": self._prefill.lower(params, state, batch, window, False),
        }

    def chunk_for(self, suffix_tok: int) -> int:
        """The smallest prefill program that holds the suffix, else the largest."""
        fitting = [p for p in self.config.prefill_chunks if p >= suffix_tok]
        return min(fitting, default=max(self.config.prefill_chunks))

    def bucket_for(self, length_tok: int) -> int:
        """The smallest attention length that covers `length_tok`."""
        return min(bucket for bucket in self.kv_buckets if bucket >= length_tok)

    def prefill(
        self, params: Params, state: DecodeState, batch: Prefill, score: bool = False
    ) -> tuple[DecodeState, tuple[jax.Array, jax.Array] | None]:
        """Writes keys and values of the suffixes into their slots.

        With `score`: also the log-probs f32[b, P] of `targets`, at the temperature and at 1.
        """
        reach = int(np.max(batch.starts)) + batch.tokens.shape[1]
        bucket = self.bucket_for(min(reach, self.config.window_tok))
        return self._prefill(params, state, batch, bucket, score)  # type: ignore[no-any-return]

    def insert(self, state: DecodeState, rows: Rows) -> DecodeState:
        """Starts (or stops) decoding in the slots of `rows.mask`."""
        return self._insert(state, rows)  # type: ignore[no-any-return]

    def generate(
        self, params: Params, state: DecodeState, longest_tok: int
    ) -> tuple[DecodeState, Draw]:
        """One token for every slot; inactive slots yield noise that nobody reads.

        longest_tok: the largest length of an active slot, to choose the attention bucket.
        """
        bucket = self.bucket_for(min(longest_tok + 1, self.config.window_tok))
        return self._generate(params, state, bucket)  # type: ignore[no-any-return]


def _insert(state: DecodeState, rows: Rows) -> DecodeState:
    def pick(new: Array, old: jax.Array) -> jax.Array:
        return jnp.where(rows.mask, new, old)

    return state._replace(
        length=pick(rows.length, state.length),
        last=pick(rows.last, state.last),
        active=pick(rows.active, state.active),
        knobs=jax.tree.map(pick, rows.knobs, state.knobs),
    )


Write = Callable[[jax.Array, jax.Array, Array, Array | None], jax.Array]


def _scatter(cache: jax.Array, new: jax.Array, slots: Array, starts: Array | None) -> jax.Array:
    """`cache` f[L, S, T, KV, hd] with `new` f[L, b, P, KV, hd] at [:, slots, starts:starts + P].

    P is 1, or starts is None: from 0 on.
    """
    if starts is None:
        return cache.at[:, slots, : new.shape[2]].set(new)
    return cache.at[:, slots, starts].set(new[:, :, 0])


def _write_rows(cache: jax.Array, new: jax.Array, slots: Array, starts: Array | None) -> jax.Array:
    """As `_scatter`, one slot after another."""
    slots = jnp.asarray(slots)
    starts = jnp.zeros_like(slots) if starts is None else starts

    def one(row: jax.Array, cache: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=1)
        return jax.lax.dynamic_update_slice(cache, part, (0, slots[row], starts[row], 0, 0))

    out: jax.Array = jax.lax.fori_loop(0, new.shape[1], one, cache)
    return out


def _generate(
    graphdef: nnx.GraphDef[Qwen3], write: Write, params: Params, state: DecodeState, bucket: int
) -> tuple[DecodeState, Draw]:
    slots = state.length.shape[0]
    position = jnp.minimum(state.length, state.k.shape[2] - 1)
    mask = jnp.arange(bucket)[None, :] < position[:, None]  # bool[S, T']

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        # `cache` is the layer's number: picked here, the layer is read in place; the scan copies.
        past_k, past_v = (x[cache, :slots, :bucket] for x in (state.k, state.v))
        return attend_step(q, k, v, past_k, past_v, mask), (k[:, 0], v[:, 0])

    layers = jnp.arange(state.k.shape[0])
    out = apply(graphdef, params, state.last[:, None], position[:, None], attend, layers)
    drawn = draw(all_logits(graphdef, params, out.hidden[:, 0]), state.knobs)
    new_k, new_v = out.cache  # f[L, S, KV, hd]
    rows = jnp.where(state.active, jnp.arange(slots), slots)  # idle slots write to scratch
    step = state.active.astype(jnp.int32)
    return (
        state._replace(
            k=write(state.k, new_k[:, :, None], rows, position),
            v=write(state.v, new_v[:, :, None], rows, position),
            length=state.length + step,
            last=jnp.where(state.active, drawn.ids, state.last),
            knobs=state.knobs._replace(step=state.knobs.step + step),
        ),
        drawn,
    )


def _prefill(
    graphdef: nnx.GraphDef[Qwen3],
    write: Write,
    params: Params,
    state: DecodeState,
    batch: Prefill,
    bucket: int,
    score: bool,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array] | None]:
    size = batch.tokens.shape[1]
    position = batch.starts[:, None] + jnp.arange(size)[None, :]  # i32[b, P]
    position = jnp.minimum(position, state.k.shape[2] - 1)
    rows = jnp.arange(batch.tokens.shape[0])[:, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        past_k = cache[0].at[rows, position].set(k, mode="drop")
        past_v = cache[1].at[rows, position].set(v, mode="drop")
        return attend_chunk(q, past_k, past_v, position), (past_k, past_v)

    cache = (state.k[:, batch.sources, :bucket], state.v[:, batch.sources, :bucket])
    out = apply(graphdef, params, jnp.asarray(batch.tokens), position, attend, cache)
    new_k, new_v = out.cache
    state = state._replace(
        k=write(state.k, new_k, batch.slots, None),
        v=write(state.v, new_v, batch.slots, None),
    )
    if not score:
        return state, None
    logits = all_logits(graphdef, params, out.hidden).astype(jnp.float32)
    temperature = jnp.where(batch.temperature <= 0, 1.0, batch.temperature)[:, None, None]
    return state, (_pick(logits / temperature, batch.targets), _pick(logits, batch.targets))


def _pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(logits)[target]: f32[b, P]"""
    chosen = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
