"""The step benchmark's forms do the same work, and its counts are exact. Nothing is timed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord, Episode
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.live_blocks import count_pairs
from clawgym_jax.tree.filters import FilterConfig, select_calls
from experiments.bench import tree_step
from experiments.bench.tree_parts import counts, forms, models, structure, synthetic
from experiments.bench.tree_parts.ours import Ours, difference
from experiments.bench.tree_parts.record import check, form_of, whole
from tests.batch.episodes import forked_calls
from tests.tree.histories import random_rollout

KEEP_ALL = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
SMALL = Qwen3Config(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    tie_word_embeddings=True,
)  # fmt: skip
THIN = 64


def thinned(name: str) -> list[Episode]:
    return structure.episodes(structure.expand(structure.stored(name), thin=THIN))


def paths_and_tree(
    episodes: list[Episode], filters: FilterConfig = forms.TRAINED
) -> tuple[list[forms.Path], forms.Form]:
    paths = forms.paths_of(forms.selections_of(episodes, filters))
    return paths, forms.tree_form(episodes, filters)


# ---- recorded trees ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", tree_step.RECORDED)
def test_expanded_calls_coincide_as_recorded(name: str) -> None:
    """With every earlier call of the group at most as far as recorded, and that far with one."""
    group = structure.stored(name)
    made = structure.expand(group)
    assert len(made) == 8
    assert all(len(rollout) == 10 for rollout in made)
    earlier: list[np.ndarray] = []
    for forms_of_rollout, calls in zip(group.rollouts, made, strict=True):
        for form, call in zip(forms_of_rollout, calls, strict=True):
            assert (call.prompt_tok, call.completion_tok) == (form.prompt, form.completion)
            most = max((common_prefix(ids, call.prompt_ids) for ids in earlier), default=0)
            assert most == (form.like[2] if form.like else 0)
            earlier.append(whole(call))


@pytest.mark.parametrize("name", tree_step.RECORDED)
def test_thinning_keeps_the_shape_and_every_token_everywhere_or_nowhere(name: str) -> None:
    group = structure.stored(name)
    full, thin = (structure.expand(group, thin=n) for n in (1, THIN))
    kept = np.unique(np.concatenate([whole(call) for calls in thin for call in calls]))
    for calls, thinned_calls in zip(full, thin, strict=True):
        for call, small in zip(calls, thinned_calls, strict=True):
            for ids, few in zip(parts(call), parts(small), strict=True):
                np.testing.assert_array_equal(ids[np.isin(ids, kept)], few)
        trees = [select_calls(c, FilterConfig()) for c in (calls, thinned_calls)]
        assert trees[0].tree.extends == trees[1].tree.extends
        assert (trees[0].kept, trees[0].leaves) == (trees[1].kept, trees[1].leaves)


def parts(call: CallRecord) -> tuple[np.ndarray, np.ndarray]:
    return call.prompt_ids, call.completion.ids


def test_copies_of_a_group_share_the_programs_prompt_and_no_more() -> None:
    group = structure.stored("claude_code")
    one, two = (structure.expand(group, number) for number in (0, 3))
    assert common_prefix(one[0][0].prompt_ids, two[0][0].prompt_ids) == group.other_task_tok
    rest = [whole(calls[-1])[group.other_task_tok :] for calls in (one[0], two[0])]
    assert not np.isin(*rest).any()


@pytest.mark.parametrize(("name", "fewer"), [("claude_code", 20.0), ("openclaw", 20.0)])
def test_a_group_has_a_twentieth_of_the_tokens_of_one_row_per_call(name: str, fewer: float) -> None:
    row = counts.counts(name)
    group = structure.stored(name)
    calls = sum(form.prompt + form.completion for calls in group.rollouts for form in calls)
    assert row["call_tok"] == calls
    assert calls / row["unique_tok"] >= fewer
    assert row["trained_tok"] == sum(f.completion for calls in group.rollouts for f in calls)
    assert row["tree_live"] < row["path_live"] < row["call_live"]


def test_operations_alone_counted_by_hand() -> None:
    """One dense layer of width 2, one head of 4; a trunk of 128 tokens and two branches of 64."""
    config = Qwen3Config(vocab_size=5, hidden_size=2, num_layers=1, num_heads=1, num_kv_heads=1,
                         head_dim=4, intermediate_size=3)  # fmt: skip
    tree = models.Work(256, 10, 3 + 3 + 3)  # 64 x 64: the trunk's, and 3 of each branch
    paths = models.Work(384, 10, 6 + 6)
    layers, head = 2 * (4 * 2 * 4 + 3 * 2 * 3), 2 * 10 * 5 * 2  # a token's; all trained ones'
    block = 2 * 2 * 4 * 64 * 64  # scores, and the weighted sum of values
    total = 256 * layers + head + 9 * block
    share, ratio = models.expected(config, tree, paths)
    assert share == pytest.approx(9 * block / total)
    assert ratio == pytest.approx((384 * layers + head + 12 * block) / total / 1.5)


@given(st.integers(0, 10_000))
def test_what_is_written_down_has_the_recorded_trees(seed: int) -> None:
    """check() compares; ids are drawn from so many that nothing coincides by chance."""
    rollouts = [random_rollout(seed + i, f"e{i}", vocab=10**6) for i in range(3)]
    made = tuple(
        tuple(form_of(rollouts, r, c) for c in range(len(calls)))
        for r, calls in enumerate(rollouts)
    )
    check(structure.Group("p", "anthropic", "now", 1, made), rollouts)


def test_a_wrong_record_is_refused() -> None:
    rollouts = [random_rollout(5 + i, f"e{i}", vocab=10**6, calls=6) for i in range(3)]
    made = [[form_of(rollouts, r, c) for c in range(6)] for r in range(3)]
    last = next(form for form in reversed(made[2]) if form.like and form.like[2] > 3)
    assert last.like
    at = made[2].index(last)
    made[2][at] = structure.CallForm(
        last.role, last.prompt, last.completion, (*last.like[:2], 3), last.spans, last.continues
    )
    with pytest.raises(AssertionError):
        check(structure.Group("p", "anthropic", "now", 1, tuple(map(tuple, made))), rollouts)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    group = structure.stored("openclaw_completions")
    structure.write(tmp_path / "again.json", group)
    assert structure.read(tmp_path / "again.json") == group


# ---- forms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", tree_step.SHARING)
def test_forks_share_as_often_as_asked(sharing: int) -> None:
    paths, tree = paths_and_tree(structure.episodes(synthetic.forks(4096, sharing)))
    assert tree.rows.unique_tok == tree.rows.tokens.size == 4096
    assert len(paths) == 2 * sharing
    assert sum(len(path.tokens) for path in paths) / 4096 == pytest.approx(sharing, rel=0.06)


@given(st.integers(0, 10_000))
def test_paths_hold_every_kept_call_and_train_it_once(seed: int) -> None:
    chosen = [select_calls(random_rollout(seed + i, f"e{i}"), KEEP_ALL) for i in range(3)]
    paths = forms.paths_of(chosen)
    trained = Counter(path.calls[i].call_id for path in paths for i in path.trained)
    kept = Counter(s.tree.calls[i].call_id for s in chosen for i in s.kept)
    assert trained == kept
    for path in paths:
        for call in path.calls:
            assert path.tokens[: len(whole(call))].tolist() == whole(call).tolist()


@pytest.mark.parametrize("name", tree_step.RECORDED)
def test_a_tree_has_each_prefix_once_and_packed_paths_have_all(name: str) -> None:
    """The twin counts prefixes: ids coincide only where a token is the same."""
    paths, tree = paths_and_tree(thinned(name))
    assert tree.rows.unique_tok == len({tuple(p.tokens[:n]) for p in paths for n in ends(p)})
    packed = forms.packed_form(tree, paths)
    rows = packed.rows
    assert rows.tokens.size - rows.padding_tok == sum(len(path.tokens) for path in paths)
    assert rows.tokens.shape[1] <= tree.rows.tokens.shape[1]
    sums = [(b.mask.sum(), *map(np.sum, (b.weight, b.weight * b.advantage)))
            for b in (tree.batch, packed.batch)]  # fmt: skip
    assert sums[0] == pytest.approx(sums[1], abs=1e-5)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_live_blocks_of_sequences_are_those_of_causal_rows(lengths: list[int]) -> None:
    rows = [np.full(forms.blocks(n), forms.blocks(n), np.int32) for n in lengths]
    live = sum(int(count_pairs(row, forms.BLOCK, forms.BLOCK).live) for row in rows)
    assert forms.causal_live(lengths, forms.BLOCK) == live


def ends(path: forms.Path) -> range:
    return range(1, len(path.tokens) + 1)


def test_paths_for_another_program_say_the_same_as_the_packed_rows() -> None:
    episodes = thinned("openclaw_completions")
    paths, tree = paths_and_tree(episodes)
    table = forms.id_table(episodes, 64)
    data = forms.flat_paths(tree, paths, table)
    starts = np.cumsum([0, *data["lengths"]])
    at = starts[data["path"]] + data["pred"] + 1
    np.testing.assert_array_equal(data["tokens"][at], data["target"])
    batch = forms.read_through(table, forms.packed_form(tree, paths))
    ours = zip(batch.target[batch.mask], batch.weight[batch.mask], batch.advantage[batch.mask],
               batch.old_logprobs[batch.mask], strict=True)  # fmt: skip
    theirs = zip(*(data[c] for c in ("target", "weight", "advantage", "old")), strict=True)
    assert Counter(map(rounded, ours)) == Counter(map(rounded, theirs))


def rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def test_tree_and_packed_paths_have_the_same_loss_and_gradients() -> None:
    """Of forked rollouts, in float32; tolerances are the benchmark's. A wrong weight shows."""
    episodes = structure.episodes([forked_calls(f"e{i}", i + 1) for i in range(4)])
    paths, tree = paths_and_tree(episodes, KEEP_ALL)
    assert any(len(path.trained) < len(path.calls) for path in paths)
    table = forms.id_table(episodes, SMALL.vocab_size)
    ours = Ours(SMALL)
    one, packed = (forms.read_through(table, f) for f in (tree, forms.packed_form(tree, paths)))
    (loss, gradient), (other, theirs) = ours.gradients(one), ours.gradients(packed)
    assert abs(loss) > 10 * tree_step.LOSS_TOLERANCE
    assert other == pytest.approx(loss, abs=tree_step.LOSS_TOLERANCE)
    assert difference(theirs, gradient) < tree_step.GRADIENT_TOLERANCE
    wrong = packed.replace(weight=np.where(jnp.arange(packed.mask.shape[1]) < 1, 0, packed.weight))
    assert difference(ours.gradients(wrong)[1], gradient) > 100 * tree_step.GRADIENT_TOLERANCE


def test_goals_are_missed_where_they_are_missed() -> None:
    step = {
        "part": "step", "model": "m", "group": "g", "sharing": 4.0, "packed_over_tree": 3.7,
        "torch_over_tree": 7.0, "packed_loss_apart": 1e-4, "packed_gradient_apart": 1e-5,
    }  # fmt: skip
    verdicts = {row["name"]: row["ok"] for row in tree_step.goals([step])}
    assert verdicts == {
        "packed / tree seconds / sharing (m, g)": True,
        "torch / tree seconds / sharing (m, g)": False,
        "packed_loss_apart (m, g)": False,
        "packed_gradient_apart (m, g)": True,
    }
