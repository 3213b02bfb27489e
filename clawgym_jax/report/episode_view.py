"""An episode as a person reads it: what each call added to the tree, and its verdict.

Not here: drawing. Invariant: the segments that calls added are all segments of the tree, each once;
so every token is shown once, at the call that brought it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from clawgym_jax.tree.prefix_tree import CONTEXT, PrefixTree


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """added[i]: segments that call i brought, by depth; its own sampled segment comes last."""

    selection: Selection
    added: tuple[tuple[int, ...], ...]

    @property
    def tree(self) -> PrefixTree:
        return self.selection.tree

    def verdict(self, call: int) -> str:
        reason = self.selection.dropped.get(call)
        return f"dropped: {reason}" if reason else "kept"

    def environment_ids(self, call: int) -> np.ndarray:
        """i32[N]: the text before the call's answer that no earlier call had brought."""
        segments = [self.tree.segments[s] for s in self.added[call]]
        parts = [s.tokens for s in segments if s.call == CONTEXT]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def view(calls: Sequence[CallRecord], filters: Mapping[str, Any]) -> EpisodeView:
    """filters: the run's `batch.filters`; names that this version does not know are passed over."""
    known = {f.name for f in dataclasses.fields(FilterConfig)}
    config = FilterConfig(**{k: v for k, v in filters.items() if k in known})
    selection = select_calls(calls, config)
    return EpisodeView(selection, _added(selection.tree))


def describe(call: CallRecord) -> str:
    """Role, and the chain where it is another one."""
    return str(call.role) if call.chain == "main" else f"{call.role} (chain {call.chain})"


def _added(tree: PrefixTree) -> tuple[tuple[int, ...], ...]:
    seen: set[int] = set()
    out = []
    for call in range(len(tree.calls)):
        path = tree.path(tree.prompt_end[call])
        if tree.sampled[call] >= 0:
            path = [*path, tree.sampled[call]]
        out.append(tuple(s for s in path if s not in seen))
        seen.update(path)
    return tuple(out)
