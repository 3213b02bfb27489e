"""The kept calls of a rollout in two orders: by tokens, for weights; by turns, for time.

By tokens: a call lies below the calls that it *extends* (its prompt runs through their tokens). It
is what is computed once, so the paths of path-sum weights are those of this tree.
By turns: a call comes after all calls that it extends or *continues* (whose turns its history
re-presents, even where tokens around them changed), and after what those came after. Of two calls
of which a third comes after both, the one that comes after the other is nearer; a call goes on from
its nearest ones. That is one call, but where the harness merged turns of which neither answers the
other. Calls that the filters dropped are no nodes, but time goes on through them, as through
the summary of a compaction. A history without any sampled turn begins anew.
Not here: the token tree itself (`tree.prefix_tree`), the filters (`tree.filters`).
Invariant: in both orders a call comes after earlier calls only; what extends also comes after.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.tree.filters import Selection


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """One rollout in the loss."""

    reward: float
    call_ids: tuple[str, ...]  # kept calls, in sampling order
    paths: tuple[int, ...]  # by tokens: leaf calls at or below each call
    before: tuple[tuple[int, ...], ...]  # by turns: the calls that each goes on from; () at starts
    ends: tuple[int, ...]  # by turns: calls without one after them, at or after each call


def rollout_calls(selection: Selection, reward: float) -> RolloutCalls:
    names = tuple(selection.tree.calls[i].call_id for i in selection.kept)
    before, ends = turn_order(selection)
    return RolloutCalls(reward, names, token_paths(selection), before, ends)


def token_paths(selection: Selection) -> tuple[int, ...]:
    """Calls at or below each kept call that no kept call extends, indexed like `selection.kept`."""
    place = {call: i for i, call in enumerate(selection.kept)}
    above = [[place[a] for a in selection.tree.extends[c] if a in place] for c in selection.kept]
    inner = {a for calls in above for a in calls}
    paths = [0] * len(above)
    for i, calls in enumerate(above):
        if i not in inner:
            for a in (*calls, i):
                paths[a] += 1
    return tuple(paths)


def turn_order(selection: Selection) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """-> (before, ends) of the kept calls, both indexed like `selection.kept`."""
    history, kept = _histories(selection), selection.kept
    before: list[tuple[int, ...]] = []
    for i, call in enumerate(kept):
        rest, own = history[call], []
        for j in range(i - 1, -1, -1):
            if rest >> kept[j] & 1:
                own.append(j)
                rest &= ~history[kept[j]]  # what it goes on from is not among the nearest
        before.append(tuple(own))
    reached = [0] * len(kept)  # bit sets of ends
    for i in range(len(kept) - 1, -1, -1):
        reached[i] = reached[i] or 1 << i
        for j in before[i]:
            reached[j] |= reached[i]
    return tuple(before), tuple(ends.bit_count() for ends in reached)


def _histories(selection: Selection) -> list[int]:
    """For each call, dropped or not, the bit set of all calls that it comes after."""
    tree, out = selection.tree, list[int]()
    number = {call.call_id: i for i, call in enumerate(tree.calls)}
    for i, call in enumerate(tree.calls):
        told = {number[name] for name in call.continues if name in number} | {*tree.extends[i]}
        seen = 0
        for j in told:
            if j < i:
                seen |= out[j] | 1 << j
        out.append(seen)
    return out
