"""A recorded group at its full length, counted: nothing is run.

Invariant: tokens, calls and live blocks are those of the trees that training would build.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawgym_jax.model.config import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B
from experiments.bench.tree_parts import forms, models, structure

PUBLISHED = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "Qwen3-8B": QWEN3_8B, "Qwen3-32B": QWEN3_32B}
Row = dict[str, Any]


def counts(name: str) -> Row:
    recorded = structure.stored(name)
    episodes = structure.episodes(structure.expand(recorded))
    tree = forms.tree_form(episodes)
    lengths = _path_lengths(episodes)
    calls = [call.prompt_tok + call.completion_tok for call in tree.rows.calls]
    return {
        "part": "counts",
        "group": name,
        "program": recorded.program,
        "rollouts": len(episodes),
        "calls": len(calls),
        "paths": len(lengths),
        "unique_tok": tree.rows.unique_tok,
        "path_tok": sum(lengths),
        "call_tok": sum(calls),
        "trained_tok": int(tree.rows.mask.sum()),
        "sharing": round(sum(lengths) / tree.rows.unique_tok, 2),
        "calls_over_unique": round(sum(calls) / tree.rows.unique_tok, 2),
        "tree_live": tree.live,
        "path_live": forms.causal_live(lengths, forms.BLOCK),
        "call_live": forms.causal_live(calls, forms.BLOCK),
    }


def expected(row: Row) -> Iterator[Row]:
    """What operations alone give for the published models, from a row of `counts`."""
    of_tree = models.Work(row["unique_tok"], row["trained_tok"], row["tree_live"])
    of_paths = models.Work(row["path_tok"], row["trained_tok"], row["path_live"])
    for model, config in PUBLISHED.items():
        share, ratio = models.expected(config, of_tree, of_paths)
        yield {
            "part": "expected",
            "group": row["group"],
            "model": model,
            "attention_share": round(share, 2),
            "packed_over_tree_over_sharing": round(ratio, 3),
        }


def _path_lengths(episodes: Any) -> list[int]:
    return [len(path.tokens) for path in forms.paths_of(forms.selections_of(episodes))]
