"""The TPU kernels, interpreted, equal the dense oracle: outputs and gradients, on random forests.

Tolerances: 1e-5 in float32; in bfloat16 0.01 of the largest value of each result.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from clawgym_jax.model import attention, live_blocks
from clawgym_jax.model import tree_attention_tpu as tpu
from clawgym_jax.model import tree_attention_tpu_blocks as blocks
from clawgym_jax.model.tree_attention_tpu import Tiling, pallas_tree_attention
from tests.model import forests

LENGTH = 90  # no block divides it
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running, here
Attend = Callable[..., jax.Array]


class Case(NamedTuple):
    heads: int
    groups: int  # key-value heads
    width: int
    tiling: Tiling


CASES = [  # the backward pass is fused where the tiling does not say split
    Case(2, 2, 32, Tiling(16, 16)),
    Case(4, 2, 32, Tiling(32, 16)),
    Case(8, 1, 64, Tiling(16, 32, row_bytes=2 * 4 * 96 * 64)),  # four heads a program, then two
    Case(2, 1, 128, Tiling(48, 24, splits=1)),
    Case(4, 2, 32, Tiling(32, 16, backward="split")),
    Case(8, 1, 64, Tiling(16, 32, backward="split")),
]
PLAIN = Case(1, 1, 32, Tiling(16, 16))  # the cheapest to compile
SPLIT = Case(1, 1, 32, Tiling(16, 16, backward="split"))
BOTH = pytest.mark.parametrize("case", [PLAIN, SPLIT], ids=["fused", "split"])


def _kernel(case: Case) -> Attend:
    return functools.partial(pallas_tree_attention, tiling=case.tiling, interpret=True)


def _inputs(case: Case, rows: int, length: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    heads = case.heads, case.groups, case.groups, case.heads
    return [jnp.asarray(rng.normal(size=(rows, length, h, case.width)), dtype) for h in heads]


def _results(attend: Attend, end: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """The output and the gradients of q, k and v."""
    *qkv, upstream = inputs
    out, pull_back = jax.vjp(lambda *x: attend(*x, end), *qkv)
    return out, *pull_back(upstream)


_oracle = jax.jit(functools.partial(_results, attention.dense_tree_attention))


def _compiled(attend: Attend) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(functools.partial(_results, attend), compiler_options=QUICK)


@functools.cache
def _program(case: Case) -> Callable[..., tuple[jax.Array, ...]]:
    return _compiled(_kernel(case))


def _gap(got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    """The largest difference, NaN if there is one: NumPy's maximum keeps it, XLA's need not."""
    gaps = [np.max(np.abs(np.asarray(a - b))) for a, b in zip(got, expected, strict=True)]
    return float(np.max(gaps))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(end=forests.forests(LENGTH))
def test_equals_the_oracle_on_forests(case: Case, end: np.ndarray) -> None:
    inputs = _inputs(case, *end.shape)
    got, expected = (f(jnp.asarray(end), *inputs) for f in (_program(case), _oracle))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "end",
    [
        np.full(LENGTH, LENGTH),  # one causal sequence
        np.repeat([30, 60, 90], 30),  # three of them, packed
        np.arange(LENGTH) + 1,  # padding only
    ],
    ids=["causal", "packed", "padding"],
)
def test_equals_the_oracle_on_linear_rows(end: np.ndarray) -> None:
    case, ends = CASES[0], jnp.asarray(np.stack([end, end]), jnp.int32)
    inputs = _inputs(case, *ends.shape)
    assert _gap(_program(case)(ends, *inputs), _oracle(ends, *inputs)) < 1e-5


@BOTH
def test_bfloat16_stays_close(case: Case) -> None:
    end = jnp.asarray(_bushy(LENGTH)[None])
    inputs = _inputs(case, *end.shape, jnp.bfloat16)
    got = _program(case)(end, *inputs)
    expected = _oracle(end, *(x.astype(jnp.float32) for x in inputs))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        allowed = 0.01 * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=allowed, rtol=0)


@settings(max_examples=10)
@given(end=forests.forests(LENGTH))
def test_fused_equals_split(end: np.ndarray) -> None:
    """The same rounding of the same terms; only the sums over blocks are taken in other orders."""
    inputs = _inputs(PLAIN, *end.shape)
    fused, split = (_program(case)(jnp.asarray(end), *inputs) for case in (PLAIN, SPLIT))
    assert _gap(fused, split) < 1e-5


def _bushy(length: int) -> np.ndarray:
    """A row with branches, two trees and padding: every kind of block pair occurs in it."""
    return forests.end_of(forests.grow(np.random.default_rng(3), length, 10, 0.05))


def _wrong_sees(
    change: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Callable[..., jax.Array]:
    """`sees` with another relation between query, key and end."""

    def sees(
        plan: blocks.Plan, q_block: Any, k_block: Any, ends: jax.Array, query_axis: int
    ) -> jax.Array:
        shape = (plan.block_q, plan.block_k)
        shape = shape if query_axis == 0 else shape[::-1]
        query = q_block * plan.block_q + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
        key = k_block * plan.block_k + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
        return change(query, key, ends)

    return sees


_full = live_blocks.full_blocks
WRONG = {
    "causal only": (blocks, "sees", _wrong_sees(lambda q, k, e: k <= q)),
    "end inclusive": (blocks, "sees", _wrong_sees(lambda q, k, e: (k <= q) & (q <= e))),
    "not itself": (blocks, "sees", _wrong_sees(lambda q, k, e: (k < q) & (q < e))),
    "no mask": (live_blocks, "full_blocks", live_blocks.live_blocks),
    "full pairs only, and the diagonal": (
        live_blocks,
        "live_blocks",
        lambda end, bq, bk: _full(end, bq, bk) | np.eye(end.shape[1] // bq, dtype=bool),
    ),
    "one row's tokens for another's": (tpu, "_through_rows", lambda end: end.reshape(1, -1)),
}


@BOTH
@pytest.mark.parametrize("name", [*WRONG, "none"])
def test_a_wrong_mask_shows(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in WRONG:
        monkeypatch.setattr(*WRONG[name])
    end = jnp.asarray(np.stack([_bushy(48), _bushy(48)]))
    inputs = _inputs(case, *end.shape)
    got, expected = (f(end, *inputs) for f in (_compiled(_kernel(case)), _oracle))
    gaps = [_gap((a,), (b,)) for a, b in zip(got, expected, strict=True)]
    if name in WRONG:
        assert min(gaps) > 1e-2  # the output and each gradient
    else:
        assert max(gaps) < 1e-5


@BOTH
def test_no_memory_is_read_before_it_is_written(case: Case) -> None:
    """The interpreter that models a TPU's memory fills it with NaN; the other one with zeros."""
    strict: Any = pltpu.InterpretParams(uninitialized_memory="nan")
    attend = functools.partial(pallas_tree_attention, tiling=case.tiling, interpret=strict)
    end = jnp.asarray(np.stack([_bushy(48), _bushy(48)]))
    inputs = _inputs(case, *end.shape)
    assert _gap(_compiled(attend)(end, *inputs), _oracle(end, *inputs)) < 1e-5


def test_runs_in_shard_map() -> None:
    """Interpreted it needs check_vma=False; compiled (the next file) it does not."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",))
    end = jnp.asarray(_bushy(32)[None])
    inputs = _inputs(PLAIN, 1, 32)
    heads = P(None, None, "x")
    sharded = jax.shard_map(
        _kernel(PLAIN),
        mesh=mesh,
        in_specs=(heads, P(), P(), P()),
        out_specs=heads,
        check_vma=False,
    )
    assert _gap(_compiled(sharded)(end, *inputs), _oracle(end, *inputs)) < 1e-5


def test_vmap_is_a_loop_over_calls() -> None:
    end = jnp.asarray(np.stack([_bushy(32), _bushy(32)]))
    *inputs, _ = _inputs(PLAIN, 2, 32)
    one_row = jax.vmap(_kernel(PLAIN))
    got = jax.jit(one_row, compiler_options=QUICK)(*(x[:, None] for x in (*inputs, end)))
    expected = attention.dense_tree_attention(*inputs, end)
    assert _gap((got[:, 0],), (expected,)) < 1e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "splits"),
    [(4, 1, 2), (8, 1, 2), (32, 4, 2), (16, 1, 4), (8, 4, 1), (3, 1, 1), (1, 1, 1), (12, 1, 4)],
)
def test_heads_are_split_for_two_cores_and_small_programs(
    heads: int, kv_heads: int, splits: int
) -> None:
    q, kv = (jnp.zeros((1, 8, h, 128), jnp.bfloat16) for h in (heads, kv_heads))
    plan, _ = tpu._plan(q, kv, kv, jnp.ones((1, 8), jnp.int32), Tiling(), interpret=False)
    assert plan.splits == splits


HEAD_64K = 4 * 65536 * 128  # the query gradient of one head in a row, in bytes


@pytest.mark.parametrize(
    ("tiling", "row_tok", "fused_heads"),
    [
        (Tiling(), 65536, 1),
        (Tiling(), 65537, 0),  # too long by a block
        (Tiling(), 32768, 2),
        (Tiling(splits=1), 16384, 4),
        (Tiling(splits=1, row_bytes=3 * HEAD_64K), 65536, 2),  # three would not divide four
        (Tiling(splits=4), 1024, 1),
        (Tiling(backward="split"), 1024, 0),
        (Tiling(384, 256), 1536, 0),  # neither block divides the other
        (Tiling(256, 512), 1536, 2),
        (Tiling(512, 128), 100, 2),
    ],
)
def test_the_backward_pass_is_fused_where_rows_fit(
    tiling: Tiling, row_tok: int, fused_heads: int
) -> None:
    q, kv = (jax.ShapeDtypeStruct((1, row_tok, h, 128), jnp.bfloat16) for h in (4, 1))
    end = jax.ShapeDtypeStruct((1, row_tok), jnp.int32)
    plan, _ = tpu._plan(q, kv, kv, end, tiling, interpret=False)
    assert plan.fused_heads == fused_heads
    one = tpu.matmul_flops(1, tiling, 4, 128, row_tok)[0] // 2
    products = 5 if fused_heads else 7
    assert tpu.matmul_flops(1, tiling, 4, 128, row_tok) == (2 * one, products * one)


def test_matmul_flops_count_two_products_forward_and_five_or_seven_backward() -> None:
    live = int(live_blocks.count_pairs(np.full(256, 256, np.int32), 128, 128).live)
    one = 2 * 3 * 128 * 128 * 4 * 64  # three live pairs, four heads of 64
    for backward, products in (("auto", 5), ("split", 7)):
        tiling = Tiling(128, 128, backward=backward)
        flops = tpu.matmul_flops(live, tiling, heads=4, width=64, row_tok=256)
        assert flops == (2 * one, products * one)


def test_arguments_that_do_not_fit_are_named() -> None:
    q, k, v, _ = _inputs(PLAIN, 1, 32)
    end = jnp.ones((1, 32), jnp.int32)
    with pytest.raises(ValueError, match="expected q"):
        pallas_tree_attention(q, k, v, end[:, :5])
    with pytest.raises(ValueError, match="times 4 splits, got 1"):
        pallas_tree_attention(q, k, v, end, Tiling(128, 128, splits=4))
    with pytest.raises(TypeError, match="of one dtype"):
        pallas_tree_attention(q, k, v.astype(jnp.bfloat16), end)
    with pytest.raises(ValueError, match="multiples of 128"):
        pallas_tree_attention(q, k, v, end)
    with pytest.raises(ValueError, match="row_bytes of at least 65536 for a row of 128 tokens"):
        too_small = Tiling(128, 128, backward="fused", row_bytes=65535)
        tpu._plan(*[jnp.zeros((1, 128, 1, 128))] * 3, jnp.ones((1, 128)), too_small, False)
    wide = [jax.ShapeDtypeStruct((1, 65536, 1, 128), jnp.bfloat16)] * 3
    attend = functools.partial(pallas_tree_attention, tiling=Tiling(128, 128))
    with pytest.raises(ValueError, match="larger blocks or fewer rows"):
        jax.eval_shape(attend, *wide, jax.ShapeDtypeStruct((1, 65536), jnp.int32))
