"""The law of the loss, in fp64: training on packed trees equals training on separate paths.

The twin below knows nothing of trees: it runs every call as a row of its own, with a plain causal
mask, and adds up W_v l_v. The wrong forms of the law are tried too, and each must show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.batch.fill import at_rollouts, fill
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.types import Span
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.qwen3 import apply, apply_logits, init
from clawgym_jax.train.policy import LossConfig, loss_sums, score_rows
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig, PackedRows, pack
from tests.tree.histories import make_call, random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
ADVANTAGE = np.array([1.3, -0.7, 0.4, -1.1], np.float32)
WEIGHT = np.array([0.02, 0.05, 0.01, 0.03], np.float32)
LOSS = LossConfig(clip_low=0.1, clip_high=0.15, logit_chunk=10)


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


SINGLE = Qwen3Config(
    vocab_size=11, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    config = SINGLE.replace(dtype=np.dtype("float64"), param_dtype=np.dtype("float64"))
    graphdef, params = init(config, jax.random.key(0))
    return graphdef, jax.tree.map(lambda x: 4.0 * x if x.ndim > 2 else x, params)


def rollouts(seed: int):
    made = [random_rollout(seed + i, episode=f"e{i}", max_prompt=40) for i in range(4)]
    return [select_calls(calls, KEEP_ALL) for calls in made]


def forked():
    """Rollouts with all that the wrong forms get wrong: forks behind a turn, and many retries."""
    out = []
    for r in range(4):
        name = f"e{r}"
        calls = [make_call(0, [1, 2, r], [5, 6], episode=name)]
        spans = (Span(3, 2, f"{name}.0"),)
        for i in range(1, 8):
            prompt = [1, 2, r, 5, 6, 7 + i % 3]
            calls.append(make_call(i, prompt, [i, 3][: 1 + i % 2], spans, episode=name))
        out.append(select_calls(calls, KEEP_ALL))
    return out


def packed(selections, row_tok: int, share: bool = True) -> PackedRows:
    (rows,) = pack(selections, PackConfig(row_tok=row_tok, train_tok=64, share_context=share))
    return rows


def filled(rows: PackedRows) -> TreeBatch:
    return fill(rows, at_rollouts(rows, WEIGHT), at_rollouts(rows, ADVANTAGE))


def batch_of(selections, row_tok: int, share: bool = True) -> TreeBatch:
    batch = filled(packed(selections, row_tok, share))
    old = np.where(batch.mask, batch.rollout_logprobs * 0.9, 0.0).astype(np.float32)
    ratio = np.exp(old.astype(np.float64) - batch.rollout_logprobs)
    correction = np.where(batch.mask, np.minimum(ratio, 1.5), 1.0)
    return batch.replace(old_logprobs=old, correction=correction)


PATHS, LENGTH = 32, 64  # static shape of the twin
ROWS = 8  # of every batch: one compilation per row length


def path_rows(selections) -> dict[str, np.ndarray]:
    """Every call as a row of its own: prompt, completion, padding."""
    rows = {
        "tokens": np.zeros((PATHS, LENGTH), np.int32),
        "next": np.zeros((PATHS, LENGTH), np.int32),  # the token that a position predicts
        "old": np.zeros((PATHS, LENGTH)),
        "rollout": np.zeros((PATHS, LENGTH)),
        "weight": np.zeros((PATHS, LENGTH)),  # 0 where nothing is trained
        "advantage": np.zeros((PATHS, LENGTH)),
    }
    calls = [
        (number, selection.tree.calls[i])
        for number, selection in enumerate(selections)
        for i in selection.kept
    ]
    for r, (number, call) in enumerate(calls):
        ids = np.concatenate([call.prompt_ids, call.completion.ids])
        at = slice(call.prompt_tok - 1, len(ids) - 1)
        rows["tokens"][r, : len(ids)] = ids
        rows["next"][r, at] = call.completion.ids
        rows["rollout"][r, at] = call.completion.logprobs
        rows["old"][r, at] = (call.completion.logprobs * 0.9).astype(np.float32)
        rows["weight"][r, at], rows["advantage"][r, at] = WEIGHT[number], ADVANTAGE[number]
    return rows


def separate_paths(graphdef, params, rows) -> jax.Array:
    """The twin: plain causal rows, the clipped surrogate written out."""
    end = jnp.full((PATHS, LENGTH), LENGTH, jnp.int32)
    position = jnp.tile(jnp.arange(LENGTH), (PATHS, 1))

    def attend(q, k, v, cache):
        return dense_tree_attention(q, k, v, end), cache

    hidden = apply(graphdef, params, rows["tokens"], position, attend).hidden
    logprobs = jax.nn.log_softmax(apply_logits(graphdef, params, hidden))
    new = jnp.take_along_axis(logprobs, rows["next"][..., None], -1)[..., 0]
    ratio = jnp.exp(new - rows["old"])
    a = rows["advantage"]
    surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.9, 1.15) * a)
    correction = jnp.minimum(jnp.exp(rows["old"] - rows["rollout"]), 1.5)
    return -jnp.sum(rows["weight"] * correction * surrogate)


def tree_loss(graphdef, params, batch, loss=LOSS) -> jax.Array:
    return loss_sums(graphdef, loss, params, batch)[0]


PATHS_GRAD = jax.jit(jax.value_and_grad(separate_paths, argnums=1), static_argnums=0)
TREE_GRAD = jax.jit(jax.value_and_grad(tree_loss, argnums=1), static_argnums=(0, 3))


def gradient_error(a, b) -> float:
    """|a - b| / |a| over all parameters together."""
    norm = [float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(a)]
    gaps = [
        float(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(jax.tree.map(jnp.subtract, a, b))
    ]
    return float(np.sqrt(sum(gaps) / sum(norm)))


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    row_tok=st.sampled_from([64, 256]),
    share=st.booleans(),
    attention=st.sampled_from(["blocked", "dense"]),
)
def test_trees_packed_any_way_train_like_separate_paths(
    model, seed: int, row_tok: int, share: bool, attention: str
) -> None:
    """Loss and gradients to 1e-12; rows of 64 tokens cut some of the trees."""
    graphdef, params = model
    loss = dataclasses.replace(LOSS, attention=attention)
    selections = rollouts(seed)
    batch = batch_of(selections, row_tok, share).padded(ROWS)
    value, grads = TREE_GRAD(graphdef, params, batch, loss)
    expected, twin = PATHS_GRAD(graphdef, params, path_rows(selections))
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-12, atol=1e-15)
    assert gradient_error(twin, grads) < 1e-12


@pytest.mark.parametrize("row_tok", [64, 256])
def test_in_single_precision_they_agree_to_1e_5(row_tok: int) -> None:
    with jax.enable_x64(False):
        graphdef, params = init(SINGLE, jax.random.key(0))
        params = jax.tree.map(lambda x: 4.0 * x if x.ndim > 2 else x, params)
        for seed in (1, 2):
            selections = rollouts(seed)
            batch = batch_of(selections, row_tok).padded(ROWS)
            value, grads = TREE_GRAD(graphdef, params, batch, LOSS)
            expected, twin = PATHS_GRAD(graphdef, params, path_rows(selections))
            np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
            assert gradient_error(twin, grads) < 1e-5


def test_logprobs_agree_to_double_precision(model) -> None:
    graphdef, params = model
    selections = rollouts(7)
    score = jax.jit(lambda batch: score_rows(graphdef, LOSS, params, batch))
    packings = []
    for row_tok, share in ((64, True), (128, False), (256, True)):
        rows = packed(selections, row_tok, share)
        values = np.asarray(score(filled(rows)).logprobs)
        packings.append(
            {
                (rows.calls[rows.call[r, k]].call_id, int(rows.offset[r, k])): values[r, k]
                for r, k in zip(*np.nonzero(rows.mask), strict=True)
            }
        )
    for other in packings[1:]:
        assert other.keys() == packings[0].keys()
        for key, value in other.items():
            assert abs(value - packings[0][key]) < 1e-12


def wrong_positions(batch: TreeBatch) -> TreeBatch:
    return batch.replace(position=np.tile(np.arange(batch.tokens.shape[1]), (batch.rows, 1)))


def wrong_mask(batch: TreeBatch) -> TreeBatch:
    return batch.replace(end=np.full_like(batch.end, batch.tokens.shape[1]))


def wrong_labels(batch: TreeBatch) -> TreeBatch:
    """Scored from the token before it in the array instead of its parent."""
    rows = packed(forked(), 256)
    return batch.replace(pred=np.where(rows.mask, rows.target - 1, -1))


def wrong_leaf_weights(batch: TreeBatch) -> TreeBatch:
    """Every path trained separately: shared sampled tokens count once per leaf below them."""
    rows = packed(forked(), 256)
    leaves = np.zeros_like(batch.weight)
    for r, k in zip(*np.nonzero(rows.mask), strict=True):
        start, stop = rows.target[r, k], rows.end[r, rows.target[r, k]]
        tips = {int(t) for t in rows.target[r][rows.mask[r]] if start <= t < stop}
        leaves[r, k] = sum(1 for t in tips if rows.end[r, t] == t + 1)
    return batch.replace(weight=batch.weight * leaves)


@pytest.mark.parametrize("wrong", [wrong_positions, wrong_mask, wrong_labels, wrong_leaf_weights])
def test_wrong_forms_show(model, wrong) -> None:
    graphdef, params = model
    batch = batch_of(forked(), 256)
    _, right = TREE_GRAD(graphdef, params, batch.padded(ROWS), LOSS)
    _, bad = TREE_GRAD(graphdef, params, wrong(batch).padded(ROWS), LOSS)
    assert gradient_error(right, bad) > 0.05


def test_mixed_signs_summed_before_the_clip_show(model) -> None:
    """A shared context state with advantages of both signs must be clipped per token."""
    graphdef, params = model
    batch = batch_of(forked(), 256)
    mean = np.where(batch.mask, np.mean(ADVANTAGE), 0.0).astype(np.float32)
    _, right = TREE_GRAD(graphdef, params, batch.padded(ROWS), LOSS)
    _, bad = TREE_GRAD(graphdef, params, batch.replace(advantage=mean).padded(ROWS), LOSS)
    assert gradient_error(right, bad) > 0.1


def test_padding_contributes_exactly_nothing(model) -> None:
    graphdef, params = model
    batch = batch_of(rollouts(3), 256)
    empty = batch.padded(batch.rows + ROWS).rows_between(batch.rows, batch.rows + ROWS)
    value, grads = TREE_GRAD(graphdef, params, empty, LOSS)
    assert float(value) == 0.0
    assert all(float(jnp.max(jnp.abs(x))) == 0.0 for x in jax.tree.leaves(grads))
