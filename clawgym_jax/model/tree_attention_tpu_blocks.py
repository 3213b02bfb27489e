"""What the four attention kernels share: static sizes, block specifications, the mask, products.

The grid is (programs, live pairs).  A program owns some query heads of one key-value head; the
second dimension walks a list of live block pairs (`live_blocks.list_pairs`) that lies in scalar
memory, and its length is the traced *number* of live pairs: dead pairs are not grid steps, so
they cost neither products nor copies.  Of each pair one block is held and the other streamed;
what belongs to the held block stands in columns (prepared once), what belongs to the streamed
block in rows, so no step of the loop transposes anything.

Scores are in units of log 2: the hardware has exp2, and the factor goes into the softmax scale.
Invariant: every call holds whole rows; tokens are numbered through all rows of the call.
Not here: the kernels' bodies (`tree_attention_tpu_forward`, `_backward`, `_fused`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from clawgym_jax.model import live_blocks
from clawgym_jax.model.live_blocks import PairList

LANES = 128  # width of a vector register; a column is stored this wide
LOWEST = -1e30  # below any score, yet finite: differences of two of them are not NaN
MAX_LIST_BYTES = 1 << 19  # half of a core's scalar memory


class Plan(NamedTuple):
    """Static sizes of one call."""

    block_q: int
    block_k: int
    kv_heads: int
    splits: int  # programs that share the query heads of one key-value head
    heads: int  # query heads of one program
    fused_heads: int  # the same in the fused backward kernel, dividing `heads`; 0: split kernels
    width: int  # of a head
    interpret: bool

    @property
    def programs(self) -> int:
        return self.kv_heads * self.splits

    def fused(self) -> "Plan":
        """The plan of the fused backward kernel."""
        share = self.heads // self.fused_heads
        return self._replace(splits=self.splits * share, heads=self.fused_heads)

    @property
    def scale(self) -> float:
        """From a product of a query and a key to a score in units of log 2."""
        return math.log2(math.e) / math.sqrt(self.width)

    def head(self, index: int) -> slice:
        """Columns of one of the program's heads."""
        return slice(index * self.width, (index + 1) * self.width)


class Specs(NamedTuple):
    """How each kind of operand is cut into blocks; T tokens in all rows together."""

    query: pl.BlockSpec  # of f[T, H * hd]
    key: pl.BlockSpec  # of f[T, KV * hd]
    part: pl.BlockSpec  # of f[splits, T, KV * hd], one summand per program
    stat: pl.BlockSpec  # of f32[programs, heads, T], a number per query and head
    end: pl.BlockSpec  # of i32[1, T]


def make_specs(plan: Plan, hold_queries: bool) -> Specs:
    hold, stream = live_blocks.held, live_blocks.streamed
    at_q, at_k = (hold, stream) if hold_queries else (stream, hold)
    bq, bk, splits = plan.block_q, plan.block_k, np.int32(plan.splits)

    def key_index(p: Any, t: Any, words: Any) -> tuple[Any, Any]:
        return at_k(words[t]), jax.lax.div(p, splits)

    return Specs(
        query=pl.BlockSpec((bq, plan.heads * plan.width), lambda p, t, w: (at_q(w[t]), p)),
        key=pl.BlockSpec((bk, plan.width), key_index),
        part=pl.BlockSpec(
            (None, bk, plan.width), lambda p, t, w: (jax.lax.rem(p, splits), *key_index(p, t, w))
        ),
        stat=pl.BlockSpec((None, plan.heads, bq), lambda p, t, w: (p, 0, at_q(w[t]))),
        end=pl.BlockSpec((1, bk), lambda p, t, w: (0, at_k(w[t]))),
    )


def call(
    kernel: Callable[..., None],
    plan: Plan,
    pairs: PairList,
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[tuple[int, ...], Any, pl.BlockSpec]],  # shape, dtype, blocks
    scratch: Sequence[Any],
    products: int,  # matrix products per head and pair, for the compiler's estimate
    vmem_bytes: int | None = None,  # most vector memory in use; None: what the compiler grants
) -> tuple[jax.Array, ...]:
    """Runs `kernel(words, *inputs, *outputs, *scratch)` once per program and live pair."""
    if pairs.words.size * 4 > MAX_LIST_BYTES:
        raise ValueError(
            f"expected a list of at most {MAX_LIST_BYTES // 4} block pairs, got room for "
            f"{pairs.words.size}: use larger blocks or fewer rows in a call"
        )
    arrays = [array for array, _ in inputs]
    varying = jax.typeof(arrays[0]).mat  # inside shard_map: over which mesh axes outputs differ
    steps = plan.programs * pairs.words.size
    area = steps * plan.heads * plan.block_q * plan.block_k
    bytes_accessed = steps * plan.width * 2 * arrays[1].dtype.itemsize * plan.block_k
    results = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.programs, pairs.number),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, _, spec in outputs],
            scratch_shapes=list(scratch),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for shape, dtype, _ in outputs
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * area * plan.width,
            transcendentals=area,
            bytes_accessed=bytes_accessed,
        ),
        interpret=plan.interpret,
        name=kernel.__name__.strip("_"),
    )(pairs.words, *arrays)
    return tuple(results)


def when_masked_or_full(word: jax.Array, step: Callable[[bool], None]) -> None:
    """Runs `step(masked)`: the mask is computed only where a pair needs one."""
    full = live_blocks.has(word, live_blocks.FULL)
    pl.when(full)(functools.partial(step, False))
    pl.when(jnp.logical_not(full))(functools.partial(step, True))


def sees(
    plan: Plan, q_block: jax.Array, k_block: jax.Array, ends: jax.Array, query_axis: int
) -> jax.Array:
    """bool[bq, bk] (query_axis 0) or bool[bk, bq] (1): the tree mask between two blocks.

    `ends` is the key block's `end`, as a row or as columns so that it broadcasts.
    """
    shape = (plan.block_q, plan.block_k) if query_axis == 0 else (plan.block_k, plan.block_q)
    query = q_block * plan.block_q + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    key = k_block * plan.block_k + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
    return (key <= query) & (query < ends)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """f32[m, n] = a[m, k] b[k, n]."""
    return _dot(a, b, 0)


def dot_t(a: jax.Array, b: jax.Array) -> jax.Array:
    """f32[m, n] = a[m, k] b[n, k]^T."""
    return _dot(a, b, 1)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def column(row: jax.Array) -> jax.Array:
    """[n, LANES] from [1, n]: a row turned upright, the same value in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(columns: jax.Array) -> jax.Array:
    """[1, n] from [n, LANES]: the inverse of `column`."""
    return columns.T[:1]


def across(columns: jax.Array, width: int) -> jax.Array:
    """[n, width] from [n, LANES], each number repeated."""
    if width <= LANES:
        return columns[:, :width]
    return jnp.tile(columns, (1, width // LANES))
