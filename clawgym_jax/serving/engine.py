"""A Qwen3 engine over static slots: prefill into a slot, decode all slots together.

The method names are those of JetStream 0.2.2's Engine (load_params, init_decode_state, prefill,
insert, generate, max_concurrent_decodes). A slot keeps its keys and values after its request
ended, so that the next turn of the episode prefills only its new tokens; which slot holds what is
the driver's business (`slots`, `prefix_cache`). Not here: queues, threads, stop rules.

Invariants: a program's shapes depend on the configuration only; keys and values of a slot below
its length are those of its tokens under the weights that were given; all sampled tokens, the first
of a completion included, come out of `generate`.
Axes: see `state`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.qwen3 import Qwen3
from clawgym_jax.serving import decode, mesh, moves, pieces, programs, quantised
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.programs import Scores
from clawgym_jax.serving.quantised import Kept
from clawgym_jax.serving.sampling import Draw, Knobs
from clawgym_jax.serving.state import DecodeState, EngineConfig, Prefill, Room, Rows

__all__ = ["UNKNOWN_EXPERT", "DecodeState", "Engine", "EngineConfig", "Prefill", "Rows"]

Params = Any
UNKNOWN_EXPERT = 255  # in a completion's routing: this token's route was not recorded


class Engine:
    """Pure programs over explicit state; holds no request and no weights."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Qwen3],
        model: Qwen3Config,
        config: EngineConfig,
        parallel: ServingParallel | None = None,
        forms: programs.Forms | None = None,
    ) -> None:
        """parallel: the chips of a host; `graphdef` is then the one made with it.

        forms: those of programs.TPU move less on a TPU, those of programs.PLAIN are faster on a
        CPU; None: by platform.
        """
        self.routing = config.routing and model.num_experts > 0
        if self.routing and model.num_experts > UNKNOWN_EXPERT:
            raise ConfigError(
                f"engine.routing: expected at most {UNKNOWN_EXPERT} experts (one byte each), got "
                f"{model.num_experts}; switch it off"
            )
        self.model = model
        self.config = config
        self.rooms = config.rooms
        self.parallel = parallel
        if forms is None:
            forms = programs.TPU if mesh.platform(parallel) == "tpu" else programs.PLAIN
        self.copies_first = forms.cut  # prefill wants prefixes in their slots
        prefill = functools.partial(programs.prefill, graphdef, forms, self.routing)
        generate = functools.partial(decode.generate, graphdef, forms, self.rooms, self.routing)
        self._prefill = jax.jit(
            mesh.on_chips(parallel, prefill), donate_argnums=(1,), static_argnums=(3, 4, 5)
        )
        self._generate = jax.jit(
            mesh.on_chips(parallel, generate), donate_argnums=(1,), static_argnums=(3, 4)
        )
        self._insert = jax.jit(programs.insert, donate_argnums=(0,))
        self._copy = jax.jit(moves.copy, donate_argnums=(0,), static_argnums=(3, 4, 5))
        self._save = jax.jit(moves.save, donate_argnums=(0,), static_argnums=(5,))
        self._restore = jax.jit(moves.restore, donate_argnums=(0,), static_argnums=(4,))
        self._mend = jax.jit(moves.mend, donate_argnums=(0,))
        self._load = mesh.loader(parallel, model.dtype)
        self._kept = jnp.int8 if config.kv_dtype == "int8" else model.dtype

    @property
    def max_concurrent_decodes(self) -> int:
        return self.config.slots

    @property
    def max_prefill_length(self) -> int:
        return self.config.window_tok - 1

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, on all chips together."""
        m = self.model
        return 2 * m.num_layers * m.num_kv_heads * quantised.token_bytes(m.head_dim, self._kept)

    def load_params(self, params: Params) -> Params:
        """A copy of the trainer's parameters in the layout and types that the programs expect."""
        return self._load(params)

    def init_decode_state(self) -> DecodeState:
        """Empty slots."""
        return mesh.fresh(self.parallel, self._empty)  # type: ignore[no-any-return]

    def _empty(self) -> DecodeState:
        m, s = self.model, self.config.slots
        zeros = functools.partial(jnp.zeros, (s,))
        knobs = Knobs(
            temperature=jnp.ones((s,), jnp.float32),
            top_p=jnp.ones((s,), jnp.float32),
            top_k=zeros(jnp.int32),
            min_p=zeros(jnp.float32),
            seed=zeros(jnp.uint32),
            step=zeros(jnp.int32),
        )

        def shape(count: int, tokens: int) -> tuple[int, int, int, int, int]:
            return m.num_layers, count + 1, m.num_kv_heads, tokens, m.head_dim

        def cache(room: Room) -> Cache:
            edges = [n for n in sorted({*self.config.kv_buckets}) if n < room.tokens]
            cuts = [*edges, room.tokens] if self.copies_first else []
            return pieces.empty(shape(room.slots, room.tokens), self._kept, cuts)

        def pool() -> Kept | None:
            pages, size = self.config.pages, self.config.page_tok
            return quantised.zeros(shape(pages, size), self._kept) if pages else None

        return DecodeState(
            k=tuple(cache(room) for room in self.rooms),
            v=tuple(cache(room) for room in self.rooms),
            pool_k=pool(),
            pool_v=pool(),
            length=zeros(jnp.int32),
            last=zeros(jnp.int32),
            active=zeros(jnp.bool_),
            knobs=knobs,
        )

    def shapes(self, params: Params) -> tuple[Any, DecodeState]:
        """Shapes of the serving copy and of the state; on a mesh they know their sharding."""
        state = jax.eval_shape(self._empty)
        params = jax.eval_shape(functools.partial(mesh.computed, dtype=self.model.dtype), params)
        return mesh.shaped(self.parallel, params, state)

    def lower(self, params: Params) -> dict[str, jax.stages.Lowered]:
        """The largest programs, for parameters or shapes of the trainer's.

        decode, prefill, and with `decode_rows` decode_few, that of the fewest requests.
        """
        params, state = self.shapes(params)
        b, chunk = self.config.prefill_batch, max(self.config.prefill_chunks)
        rows, tokens = np.zeros(b, np.int32), np.zeros((b, chunk), np.int32)
        batch = Prefill(tokens, rows, rows, rows, tokens, np.ones(b, np.float32))
        whole = tuple(room.tokens for room in self.rooms)
        last = len(self.rooms) - 1
        slots, counts = self._rows_for(None)
        lowered = {
            "decode": self._generate.lower(params, state, slots, counts, whole),
            "prefill": self._prefill.lower(params, state, batch, last, whole[last], False),
        }
        if self.config.decode_rows:
            slots, counts = self._rows_for([room.first for room in self.rooms])
            lowered["decode_few"] = self._generate.lower(params, state, slots, counts, whole)
        return lowered

    def chunk_for(self, suffix_tok: int) -> int:
        """The smallest prefill program that holds the suffix, else the largest."""
        fitting = [p for p in self.config.prefill_chunks if p >= suffix_tok]
        return min(fitting, default=max(self.config.prefill_chunks))

    def bucket_for(self, length_tok: int, room: int) -> int:
        """The smallest attention length of a room that covers `length_tok`."""
        whole = self.rooms[room].tokens
        return min([b for b in self.config.kv_buckets if length_tok <= b < whole], default=whole)

    def prefill(
        self,
        params: Params,
        state: DecodeState,
        batch: Prefill,
        score: bool = False,
        room: int = 0,
    ) -> tuple[DecodeState, tuple[Scores | None, jax.Array | None]]:
        """Writes keys and values of the suffixes into their slots of a room.

        -> (with `score` the log-probs f32[b, P] of `targets` at the temperature and at 1, with
        routing on the experts u8[L, b, P, K]).
        """
        if self.copies_first and (batch.sources != batch.slots).any():
            raise ValueError(
                f"expected prefixes in their slots {batch.slots}, got sources {batch.sources}; "
                "copy them first"
            )
        reach = int(np.max(batch.starts))
        if not self.copies_first:
            reach = min(reach + batch.tokens.shape[1], self.rooms[room].tokens)
        bucket = self.bucket_for(reach, room) if reach else 0
        return self._prefill(params, state, batch, room, bucket, score)  # type: ignore[no-any-return]

    def insert(self, state: DecodeState, rows: Rows) -> DecodeState:
        """Starts (or stops) decoding in the slots of `rows.mask`."""
        return self._insert(state, rows)  # type: ignore[no-any-return]

    def generate(
        self,
        params: Params,
        state: DecodeState,
        longest_tok: int | Sequence[int],
        busy: Sequence[int] | None = None,
    ) -> tuple[DecodeState, tuple[Draw, jax.Array | None]]:
        """One token for every active slot; the others yield noise that nobody reads.

        longest_tok: the largest length of an active slot in each room, 0 for a room without one.
        busy: the active slots, where the caller knows them; then the smallest program with a row
        for each runs (`EngineConfig.decode_rows`).
        -> (the draw, with routing on the experts u8[L, S, K] of the tokens that were fed)
        """
        longest = [longest_tok] if isinstance(longest_tok, int) else longest_tok
        buckets = tuple(
            self.bucket_for(min(n + 1, room.tokens), i) if n else 0
            for i, (n, room) in enumerate(zip(longest, self.rooms, strict=True))
        )
        slots, counts = self._rows_for(busy)
        return self._generate(params, state, slots, counts, buckets)  # type: ignore[no-any-return]

    def _rows_for(self, busy: Sequence[int] | None) -> tuple[np.ndarray, tuple[int, ...]]:
        """Slots i32[R] of a decode step, padded with S; and how many of each room."""
        slots, counts = np.arange(self.config.slots), [room.slots for room in self.rooms]
        if busy is None or not self.config.decode_rows:
            return slots, tuple(counts)
        rows: list[int] = []
        for i, room in enumerate(self.rooms):
            every = range(room.first, room.first + room.slots)
            here = sorted(slot for slot in busy if slot in every)
            fitting = [n for n in (0, *self.config.decode_rows) if len(here) <= n < room.slots]
            counts[i] = min(fitting, default=room.slots)
            padding = [len(slots)] * (counts[i] - len(here))
            rows += every if counts[i] == room.slots else [*here, *padding]
        return np.array(rows), tuple(counts)

    def copy(
        self, state: DecodeState, source: tuple[int, int], target: tuple[int, int], tokens: int
    ) -> DecodeState:
        """The first `tokens` keys and values of a slot in another; (room, slot within)."""
        room = (
            source[0] if self.rooms[source[0]].tokens < self.rooms[target[0]].tokens else target[0]
        )
        bucket = self.bucket_for(tokens, room)
        return self._copy(  # type: ignore[no-any-return]
            state, np.int32(source[1]), np.int32(target[1]), source[0], target[0], bucket
        )

    def save(
        self, state: DecodeState, room: int, slot: int, first_page: int, pages: Sequence[int]
    ) -> DecodeState:
        """Copies pages of a slot, from its page `first_page` on, into pages of the pool."""
        numbers = self._page_numbers(room, pages)
        count = np.int32(len(pages))
        return self._save(  # type: ignore[no-any-return]
            state, np.int32(slot), np.int32(first_page), numbers, count, room
        )

    def restore(
        self, state: DecodeState, room: int, slot: int, pages: Sequence[int]
    ) -> DecodeState:
        """Copies pages of the pool to the beginning of a slot."""
        numbers = self._page_numbers(room, pages)
        count = np.int32(len(pages))
        return self._restore(state, np.int32(slot), numbers, count, room)  # type: ignore[no-any-return]

    def mend(self, state: DecodeState) -> DecodeState:
        """Without what weights that are not finite left: under a mask, 0 times NaN is NaN."""
        return self._mend(state)  # type: ignore[no-any-return]

    def _page_numbers(self, room: int, pages: Sequence[int]) -> np.ndarray:
        """i32[T / page], padded with the scratch page."""
        numbers = np.full(self.rooms[room].tokens // self.config.page_tok, self.config.pages)
        numbers[: len(pages)] = pages
        return numbers.astype(np.int32)
