"""A decode step of a few rows gives what one with a row for each slot does."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.serving import programs
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver
from clawgym_jax.serving.pieces import Cache
from clawgym_jax.serving.quantised import Int8, Kept, kept_as, with_entries
from clawgym_jax.serving.sampling import Knobs
from clawgym_jax.serving.state import DecodeState, KvDtype, Rows
from tests.serving.test_native_driver import GRAPH, MODEL, PARAMS, go, prompt_of

ALL = EngineConfig(
    slots=7,
    window_tok=64,
    prefill_chunks=(4, 16),
    kv_buckets=(40,),
    room_slots=(4, 3),
    room_tok=(32, 64),
    routing=True,
)
FEW = dataclasses.replace(ALL, decode_rows=(1, 2))
FORMS = {"pieces": programs.PLAIN, "whole": programs.TPU}
KINDS: tuple[KvDtype, ...] = ("model", "int8")
ENGINES = {
    (form, kind): [
        Engine(GRAPH, MODEL, dataclasses.replace(config, kv_dtype=kind), forms=forms)
        for config in (ALL, FEW)
    ]
    for form, forms in FORMS.items()
    for kind in KINDS
}


def filled(engine: Engine, lengths: np.ndarray, active: np.ndarray) -> DecodeState:
    """Keys and values that differ everywhere but in scratch, all slots at their lengths."""
    count, order = engine.config.slots, np.arange(engine.config.slots)
    ones, zeros = np.ones(count, np.float32), np.zeros(count, np.int32)
    knobs = Knobs(ones, ones, zeros, 0 * ones, order.astype(np.uint32), 5 + zeros)
    state = engine.init_decode_state()

    def fill(kept: Kept) -> Kept:
        order = jnp.arange(math.prod(kept[:, :-1].shape), dtype=jnp.float32)
        some = kept_as(kept, 0.5 * jnp.sin(order).reshape(kept[:, :-1].shape))
        return with_entries(kept, some, (slice(None), slice(-1)))

    def filled_in(caches: tuple[Cache, ...]) -> tuple[Cache, ...]:
        return jax.tree.map(fill, caches, is_leaf=lambda x: isinstance(x, Int8))

    state = state._replace(k=filled_in(state.k), v=filled_in(state.v))
    return engine.insert(state, Rows(active | ~active, lengths, order, active, knobs))


@pytest.mark.parametrize("form", ENGINES, ids="-".join)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_slots_that_decode_get_the_same_and_the_others_keep_what_they_have(
    form: tuple[str, KvDtype], data: st.DataObject
) -> None:
    some = st.lists(st.booleans(), min_size=7, max_size=7).filter(any)
    active = np.array(data.draw(some))
    tokens = np.array([32] * 4 + [64] * 3)
    lengths = np.array([data.draw(st.integers(0, n - 1)) for n in tokens], np.int32)
    reach = lengths + 1
    longest = [int(max(reach[part] * active[part])) for part in (slice(4), slice(4, 7))]
    busy = np.flatnonzero(active).tolist()
    whole, few = ENGINES[form]
    expected, (drawn, experts) = whole.generate(PARAMS, filled(whole, lengths, active), longest)
    state, (got, went) = few.generate(PARAMS, filled(few, lengths, active), longest, busy)
    for name in ("ids", "logprobs", "raw_logprobs"):
        np.testing.assert_allclose(
            getattr(got, name)[active], getattr(drawn, name)[active], atol=2e-5, err_msg=name
        )
    assert experts is not None and went is not None
    np.testing.assert_array_equal(went[:, active], experts[:, active])
    assert_same_state(state, expected)


def assert_same_state(state: DecodeState, expected: DecodeState) -> None:
    """To rounding; scratch may hold anything."""
    for part in ("k", "v"):
        pairs = zip(*(jax.tree.leaves(getattr(x, part)) for x in (state, expected)), strict=True)
        for got, old in pairs:
            off = 1.01 if got.dtype == jnp.int8 else 2e-5  # rounded the other way
            np.testing.assert_allclose(
                got[:, :-1].astype(float), old[:, :-1].astype(float), atol=off
            )
    for name in ("length", "last", "active"):
        np.testing.assert_array_equal(getattr(state, name), getattr(expected, name))
    np.testing.assert_array_equal(state.knobs.step, expected.knobs.step)


@pytest.mark.parametrize(
    ("busy", "counts"),
    [
        ([3], (1, 0)), ([4], (0, 1)), ([1, 2], (2, 0)), ([0, 5, 6], (1, 2)),
        ([0, 1, 2, 6], (4, 1)), ([*range(7)], (4, 3)), (None, (4, 3)),
    ],
)  # fmt: skip
def test_the_smallest_program_with_a_row_for_each_is_taken(
    busy: list[int] | None, counts: tuple[int, int]
) -> None:
    slots, got = ENGINES["pieces", "model"][1]._rows_for(busy)
    assert got == counts and len(slots) == sum(counts)
    assert set(slots) >= set(busy or range(7))


def test_one_request_alone_costs_one_row_and_many_the_same_tokens() -> None:
    def play(config: EngineConfig) -> tuple[list[Any], set[int]]:
        engine, rows = Engine(GRAPH, MODEL, config), set()
        generate = engine._generate

        def noted(*arguments: Any) -> Any:
            rows.add(sum(arguments[3]))
            return generate(*arguments)

        engine._generate = noted

        async def several(driver: NativeDriver, count: int) -> list[Any]:
            jobs = [
                go(driver, f"{count}.{i}", prompt_of(i, 4 + i), seed=i, max_tok=3 + i)
                for i in range(count)
            ]
            return await asyncio.gather(*jobs)

        with NativeDriver(engine) as driver:
            driver.publish(PARAMS, 1)
            done = [asyncio.run(several(driver, count)) for count in (1, 5)]
        return [one for many in done for one in many], rows

    config = EngineConfig(slots=6, window_tok=64, prefill_batch=1, prefill_chunks=(16,))
    expected, all_rows = play(config)
    got, rows = play(dataclasses.replace(config, decode_rows=(3, 1)))
    assert (all_rows, rows) == ({6}, {1, 3, 6})
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_rows_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.decode_rows: expected integers >= 1"):
        EngineConfig(decode_rows=(8, 0))
