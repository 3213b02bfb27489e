"""Which calls of a rollout are trained, and the one reason why each other call is not.

Not here: rewards, groups (`losses.advantage`). Invariant: every call is kept or has one reason.
Source: ClawGym II, its three filters (dead leaves, over-branching, auxiliary calls); "extends",
"continues" and "dead" are meant as the shared definitions have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.types import CallRecord, Role
from clawgym_jax.tree.prefix_tree import PrefixTree, build_tree

DEAD_LEAF = "dead leaf"
OVER_BRANCHING = "over-branching"
EMPTY = "sampled nothing"
_TRAINED_ROLES = (Role.MAIN,)


@dataclass(frozen=True)
class FilterConfig:
    """Each filter can be switched off. The threshold is not public in the paper: ours."""

    dead_leaves: bool = True
    max_leaves: int = 16  # 0 = no limit
    auxiliary_calls: bool = True  # True: sub-agent, compaction, title calls are left out


@dataclass(frozen=True, slots=True)
class Selection:
    """The verdict on one rollout."""

    tree: PrefixTree
    kept: tuple[int, ...]  # call numbers that are trained
    dropped: dict[int, str]  # call number -> reason
    leaves: int  # main leaves that are not continued elsewhere

    def dropped_tok(self) -> Counter[str]:
        """Sampled tokens that are not trained, by reason."""
        out: Counter[str] = Counter()
        for call, reason in self.dropped.items():
            out[reason] += self.tree.calls[call].completion_tok
        return out


def select_calls(calls: Sequence[CallRecord], config: FilterConfig) -> Selection:
    """Builds the tree of a rollout and decides about each of its calls."""
    tree = build_tree(calls)
    dropped: dict[int, str] = {}
    for i, call in enumerate(calls):
        if not call.completion_tok:
            dropped[i] = EMPTY
        elif config.auxiliary_calls and call.role not in _TRAINED_ROLES:
            dropped[i] = f"auxiliary call: {call.role}"
    leaves = [i for i in _open_leaves(tree) if i not in dropped]
    last = _last_of_segment(calls)
    if config.dead_leaves:
        dropped |= {i: DEAD_LEAF for i in leaves if i not in last}
    if config.max_leaves and len(leaves) > config.max_leaves:
        dropped |= {i: OVER_BRANCHING for i in range(len(calls)) if i not in dropped}
    kept = tuple(i for i in range(len(calls)) if i not in dropped)
    return Selection(tree, kept, dropped, len(leaves))


def _open_leaves(tree: PrefixTree) -> list[int]:
    """Calls that no later call extends (tokens) or continues (turns)."""
    taken = {i for through in tree.extends for i in through}
    continued = {call_id for call in tree.calls for call_id in call.continues}
    return [
        i for i, call in enumerate(tree.calls) if i not in taken and call.call_id not in continued
    ]


def _last_of_segment(calls: Sequence[CallRecord]) -> set[int]:
    """The last call of each stretch of a chain between two compactions."""
    last: dict[tuple[str, int], int] = {}
    compactions: Counter[str] = Counter()
    for i, call in enumerate(calls):
        if call.role is Role.COMPACTION:
            compactions[call.chain] += 1
        elif call.role in (Role.MAIN, Role.SUBAGENT) and call.completion_tok:
            last[call.chain, compactions[call.chain]] = i
    return set(last.values())
