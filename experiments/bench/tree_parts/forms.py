"""One group of rollouts in the three forms that are compared, with the same loss.

- tree: calls packed by `build_batch`, as training has it; one row.
- packed: every path from the root to a leaf whole, several packed into a row, each with a causal
  mask and positions from 0: the same machinery with nothing shared. Rows are at most as long as the
  tree's; of the lengths up to that, the one that leaves the least padding.
- paths: the same paths one by one, for a model that knows no rows.
Each sampled token is trained in the first path that holds it and is context in the others; its
weight, advantage and log-prob are those of the tree's batch, so all three do the same learning.
Ids are anonymous numbers until here; models read them through one random table.
Not here: seconds (`ours`, `padded_torch`). Invariant: all forms train the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.batch.config import BatchConfig
from clawgym_jax.batch.fill import at_calls, fill
from clawgym_jax.batch.from_episodes import build_batch
from clawgym_jax.batch.tree_batch import TreeBatch
from clawgym_jax.core.types import CallRecord, Episode
from clawgym_jax.model.live_blocks import count_pairs, most_pairs
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from clawgym_jax.tree.pack import PackConfig, PackedRows, pack
from clawgym_jax.tree.prefix_tree import build_tree

TRAINED = FilterConfig()  # training's own
BLOCK = 64  # of attention on CPUs; rows are whole blocks


@dataclass(frozen=True)
class Form:
    """Rows for our step."""

    rows: PackedRows
    batch: TreeBatch

    @property
    def live(self) -> int:
        """Pairs of blocks that attention computes."""
        return int(count_pairs(self.rows.end, BLOCK, BLOCK).live.sum())


@dataclass(frozen=True)
class Path:
    """The calls from a root to a leaf, and which of them are trained here."""

    calls: tuple[CallRecord, ...]
    trained: tuple[int, ...]  # indices in `calls`

    @property
    def tokens(self) -> np.ndarray:
        """i32[n]"""
        return np.concatenate([self.calls[-1].prompt_ids, self.calls[-1].completion.ids])


def selections_of(episodes: Sequence[Episode], filters: FilterConfig = TRAINED) -> list[Selection]:
    return [select_calls(episode.calls, filters) for episode in episodes]


def paths_of(selections: Sequence[Selection]) -> list[Path]:
    """Every path to a kept call that no kept call extends, rollout by rollout."""
    out = []
    for selection in selections:
        tree, kept, done = selection.tree, set(selection.kept), set[int]()
        inner = {above for call in kept for above in tree.extends[call]}
        for leaf in selection.kept:
            if leaf in inner:
                continue
            chain = [*(call for call in tree.extends[leaf] if call in kept), leaf]
            trained = tuple(i for i, call in enumerate(chain) if call not in done)
            done.update(chain)
            out.append(Path(tuple(tree.calls[call] for call in chain), trained))
    return out


def tree_form(episodes: Sequence[Episode], filters: FilterConfig = TRAINED) -> Form:
    """All of a group in one row that just holds it."""
    whole = pack(selections_of(episodes, filters), _ample(episodes))
    unique, trained = whole[0].unique_tok, int(whole[0].mask.sum())
    config = BatchConfig(pack=PackConfig(blocks(unique), trained), filters=filters)
    ((part,),), report = build_batch(episodes, config)
    assert report.repeated_tok == 0 and part.rows.tokens.shape[0] == 1, "expected one whole tree"
    return Form(part.rows, part.arrays)


def packed_form(tree: Form, paths: Sequence[Path]) -> Form:
    """Paths packed whole, with as many trainable slots in a row as the fullest row needs."""
    longest, most = max(len(path.tokens) for path in paths), tree.rows.tokens.shape[1]
    alone = [_alone(path) for path in paths]
    step = max(BLOCK, blocks((most - longest) // 32))
    lengths = [*range(blocks(longest), most, step), most]
    _, row_tok = min((_in_rows(alone, n, n).tokens.size, n) for n in lengths)
    fullest = int(_in_rows(alone, row_tok, row_tok).mask.sum(1).max())
    rows = _in_rows(alone, row_tok, fullest)
    values = per_call(tree)
    weight, advantage = (
        at_calls(rows, np.array([values[call.call_id][i] for call in rows.calls])) for i in (0, 1)
    )
    return Form(rows, fill(rows, weight, advantage))


def _in_rows(alone: Sequence[Selection], row_tok: int, train_tok: int) -> PackedRows:
    (rows,) = pack(alone, PackConfig(row_tok, train_tok, share_context=False))
    return rows


def _alone(path: Path) -> Selection:
    others = {i: "trained in another path" for i in range(len(path.calls)) if i not in path.trained}
    return Selection(build_tree(path.calls), path.trained, others, leaves=1)


def per_call(tree: Form) -> dict[str, tuple[float, float]]:
    """(weight, advantage) of each trained call's tokens."""
    rows, batch = tree.rows, tree.batch
    first = rows.mask & (rows.offset == 0)
    return {
        rows.calls[call].call_id: (float(weight), float(advantage))
        for call, weight, advantage in zip(
            rows.call[first], batch.weight[first], batch.advantage[first], strict=True
        )
    }


def flat_paths(tree: Form, paths: Sequence[Path], table: np.ndarray) -> dict[str, np.ndarray]:
    """The paths for another program: tokens one after another, and a line per trained token.

    table: i32[ids], what the model reads for each id.
    """
    values, lines = per_call(tree), []
    for number, path in enumerate(paths):
        for i in path.trained:
            call, size = path.calls[i], path.calls[i].completion_tok
            weight, advantage = values[call.call_id]
            at = call.prompt_tok + np.arange(size)
            done = call.completion
            columns = [number, at - 1, table[done.ids], weight, advantage, done.logprobs]
            lines.append(np.stack([np.broadcast_to(c, size) for c in columns], axis=1))
    path_of, pred, target, weight, advantage, old = np.concatenate(lines).astype(np.float64).T
    return {
        "tokens": table[np.concatenate([path.tokens for path in paths])].astype(np.int64),
        "lengths": np.array([len(path.tokens) for path in paths]),
        "path": path_of.astype(np.int64),
        "pred": pred.astype(np.int64),
        "target": target.astype(np.int64),
        "weight": weight.astype(np.float32),
        "advantage": advantage.astype(np.float32),
        "old": old.astype(np.float32),
    }


def read_through(table: np.ndarray, form: Form) -> TreeBatch:
    """The batch with ids that a model has."""
    batch = form.batch
    return batch.replace(
        tokens=table[batch.tokens].astype(np.int32), target=table[batch.target].astype(np.int32)
    )


def id_table(episodes: Sequence[Episode], vocabulary: int) -> np.ndarray:
    """i32[ids]: a random token for each anonymous id."""
    most = max(
        int(max(call.prompt_ids.max(), call.completion.ids.max()))
        for episode in episodes
        for call in episode.calls
    )
    drawn = np.random.default_rng(0).integers(0, vocabulary, most + 1)
    return np.asarray(drawn, np.int32)


def causal_live(lengths: Sequence[int], block: int) -> int:
    """Pairs of blocks that attention computes for sequences one by one."""
    return sum(most_pairs(-(-n // block) * block, block, block) for n in lengths)


def blocks(tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


def _ample(episodes: Sequence[Episode]) -> PackConfig:
    most = sum(c.prompt_tok + c.completion_tok for e in episodes for c in e.calls)
    return PackConfig(most, most)
