"""Shapes of the engine: its configuration, its rooms, and what a decode step reads and writes.

Slots have room for a number of tokens; those of one length are a room. A context of 64K tokens
then costs 64K in few slots, and most have less. Beside the slots lies a pool of pages, the prefix
cache. Not here: programs (`programs`), which slot or page holds what (`slots`, `prefix_cache`).
Axes: S slots, T tokens of a slot, L layers, b prefill batch, P prefill chunk, N pages of the pool,
KV key-value heads, hd head width.
Invariant: everything here is static but the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.quantised import Kept
from clawgym_jax.serving.sampling import Knobs

SwapPolicy = Literal["drain", "continue", "abort"]
KvDtype = Literal["model", "int8"]
_NUMBERS = "slots", "window_tok", "prefill_batch", "prefill_budget_tok", "page_tok", "cache_tok"
_LENGTHS = "prefill_chunks", "decode_rows", "kv_buckets", "room_slots", "room_tok"
Array = Any  # numpy on the way in, traced inside a program


class Room(NamedTuple):
    """Slots of one length."""

    first: int  # number of the first slot
    slots: int
    tokens: int  # T


@dataclass(frozen=True, kw_only=True)  # a place that moves must not change what a caller meant
class EngineConfig:
    """Static shapes of the engine."""

    slots: int = 32  # requests decoded together
    window_tok: int = 1024  # prompt + completion of the longest slot
    prefill_batch: int = 8  # b: prompts prefilled together
    prefill_chunks: tuple[int, ...] = (32, 128, 512)  # P: suffix lengths that have a program
    decode_rows: tuple[int, ...] = ()  # requests for which a decode step has a program, beside all
    kv_buckets: tuple[int, ...] = ()  # lengths up to which attention reads; () = a slot's length
    room_slots: tuple[int, ...] = ()  # slots by length, from the shortest; () = all the longest
    room_tok: tuple[int, ...] = ()  # their lengths
    cache_tok: int = 0  # pool of the prefix cache beside what the slots keep; 0 = none
    page_tok: int = 64  # of the pool
    prefill_budget_tok: int = 1 << 20  # prefilled between two steps that decode; whole chunks
    kv_dtype: KvDtype = "model"  # of keys and values: the model's type, or int8 with scales
    routing: bool = False  # completions carry the experts of every token
    swap_policy: SwapPolicy = "drain"  # of requests in flight: see rounds

    def __post_init__(self) -> None:
        self._check_numbers()
        if not self.prefill_chunks or max(self.prefill_chunks) > self.window_tok:
            raise ConfigError(
                f"engine: prefill_chunks {self.prefill_chunks} must be non-empty and at most "
                f"window_tok={self.window_tok}"
            )
        if self.swap_policy not in get_args(SwapPolicy):
            raise ConfigError(
                f"engine.swap_policy: expected one of {get_args(SwapPolicy)}, got "
                f"{self.swap_policy!r}"
            )
        if self.kv_dtype not in get_args(KvDtype):
            raise ConfigError(
                f"engine.kv_dtype: expected one of {get_args(KvDtype)}, got {self.kv_dtype!r}; "
                'set "model" to keep keys and values in the model\'s type'
            )
        self._check_rooms()
        if self.cache_tok and any(room.tokens % self.page_tok for room in self.rooms):
            raise ConfigError(
                f"engine: with cache_tok, expected slots of whole pages of {self.page_tok} tokens, "
                f"got {[room.tokens for room in self.rooms]}; change page_tok"
            )

    def _check_numbers(self) -> None:
        for name in _NUMBERS:
            least = 0 if name == "cache_tok" else 1
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"engine.{name}: expected an integer >= {least}, got {value!r}")
        for name in _LENGTHS:
            given = getattr(self, name)
            if type(given) not in (tuple, list) or any(type(n) is not int or n < 1 for n in given):
                raise ConfigError(f"engine.{name}: expected integers >= 1, got {given!r}")
        if 0 < self.cache_tok < self.page_tok:
            raise ConfigError(
                f"engine.cache_tok: expected 0 (no pool) or at least a page of {self.page_tok} "
                f"tokens, got {self.cache_tok}; change it or page_tok"
            )

    def _check_rooms(self) -> None:
        lengths, counts = self.room_tok, self.room_slots
        if not lengths and not counts:
            return
        rising = list(lengths) == sorted(set(lengths))
        if len(lengths) != len(counts) or not rising or min(counts, default=0) < 1:
            raise ConfigError(
                "engine: expected room_tok to rise, with as many room_slots (at least 1 each), got "
                f"{lengths} and {counts}"
            )
        if sum(counts) != self.slots or lengths[-1] != self.window_tok:
            raise ConfigError(
                f"engine: expected room_slots to add up to slots={self.slots} and the last "
                f"room_tok to be window_tok={self.window_tok}, got {counts} and {lengths}"
            )

    @property
    def rooms(self) -> tuple[Room, ...]:
        if not self.room_tok:
            return (Room(0, self.slots, self.window_tok),)
        firsts = [sum(self.room_slots[:i]) for i in range(len(self.room_slots))]
        return tuple(map(Room, firsts, self.room_slots, self.room_tok))

    @property
    def pages(self) -> int:
        """N"""
        return self.cache_tok // self.page_tok


class DecodeState(NamedTuple):
    """Everything a decode step reads and writes; the last slot of a room is scratch, so is page N.

    Keys and values of a slot below its length are those of its tokens. What a head reads lies
    together: attention's products need it in this order.
    """

    k: tuple[Cache, ...]  # f[L, S + 1, KV, T, hd] of each room, whole or in pieces
    v: tuple[Cache, ...]
    pool_k: Kept | None  # f[L, N + 1, KV, page, hd]
    pool_v: Kept | None
    length: jax.Array  # i32[S], tokens with keys and values
    last: jax.Array  # i32[S], the token to feed next
    active: jax.Array  # bool[S]
    knobs: Knobs  # [S] each


class Prefill(NamedTuple):
    """One padded batch of prompt suffixes in slots of one room. Padding rows use its scratch."""

    tokens: Array  # i32[b, P]
    slots: Array  # i32[b], where the result goes; counted within the room
    sources: Array  # i32[b], slots whose first `starts` tokens are the prefixes; as `slots`
    # where the engine wants prefixes copied first
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
