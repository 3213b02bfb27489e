"""The kept calls of a rollout as a tree: which call extends which, how many leaves are below.

Calls that the filters dropped are no nodes: a call hangs on its nearest kept ancestor. Only
*extends* (tokens) makes an edge; a call whose turn re-appears behind changed context *continues*
it, and is a root or a branch of its own here.
Not here: the token tree (`tree.prefix_tree`), the filters (`tree.filters`).
Invariant: parents come before their children; the leaves of the roots add up to all leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.tree.filters import Selection

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """One rollout in the loss."""

    reward: float
    call_ids: tuple[str, ...]  # kept calls, in sampling order
    parents: tuple[int, ...]  # index of each call's parent here, NO_PARENT at roots
    leaves: tuple[int, ...]  # leaf calls at or below each call


def tree_of_calls(selection: Selection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> (parents, leaves) of the kept calls, both indexed like `selection.kept`."""
    place = {call: i for i, call in enumerate(selection.kept)}
    parents = []
    for call in selection.kept:
        kept_above = [place[a] for a in selection.tree.extends[call] if a in place]
        parents.append(kept_above[-1] if kept_above else NO_PARENT)
    inner = set(parents)
    leaves = [int(i not in inner) for i in range(len(parents))]
    for i in range(len(parents) - 1, -1, -1):
        if parents[i] != NO_PARENT:
            leaves[parents[i]] += leaves[i]
    return tuple(parents), tuple(leaves)


def rollout_calls(selection: Selection, reward: float) -> RolloutCalls:
    parents, leaves = tree_of_calls(selection)
    names = tuple(selection.tree.calls[i].call_id for i in selection.kept)
    return RolloutCalls(reward, names, parents, leaves)
