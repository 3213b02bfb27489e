"""Which calls of a rollout are trained, and the one reason why each other call is not.

A *leaf* is a call that no later call extends (its prompt starts with the call's prompt and
completion); it is *open* if no later call continues it either (presents its turn again, behind
whatever context). Only open leaves can be dead, and only they count towards over-branching.

A *segment* is a stretch of one agent's calls between two compactions; a sub-agent has segments of
its own. A request of another kind (a compaction, a title, a probe) is a segment of its own,
together with repeats of the same prompt. The last call of a segment is where it led to.

Not here: rewards, groups (`losses.advantage`). Invariant: every call is kept or has one reason.
Source: ClawGym II, its three filters (dead leaves, over-branching, auxiliary calls); "extends",
"continues" and "dead" are meant as the shared definitions have them. Undelivered leaves are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import CallRecord, Delivery, Role
from clawgym_jax.tree.prefix_tree import PrefixTree, build_tree

DEAD_LEAF = "dead leaf"
UNDELIVERED_LEAF = "undelivered leaf"
OVER_BRANCHING = "over-branching"
EMPTY = "sampled nothing"
_TRAINED_ROLES = (Role.MAIN,)
_AGENTS = (Role.MAIN, Role.SUBAGENT)
_ABANDONED = (Delivery.DISCONNECTED, Delivery.SUPERSEDED)


@dataclass(frozen=True)
class FilterConfig:
    """Each filter can be switched off. The threshold is not public in the paper: ours."""

    dead_leaves: bool = True  # undelivered ones as well
    max_leaves: int = 16  # 0 = no limit
    auxiliary_calls: bool = True  # True: sub-agent, compaction, title calls are left out

    def __post_init__(self) -> None:
        if self.max_leaves < 0:
            raise ConfigError(
                f"filters.max_leaves: expected at least 0 (no limit), got {self.max_leaves}"
            )


@dataclass(frozen=True, slots=True)
class Selection:
    """The verdict on one rollout."""

    tree: PrefixTree
    kept: tuple[int, ...]  # call numbers that are trained
    dropped: dict[int, str]  # call number -> reason
    leaves: int  # leaves of trained kinds that are not continued elsewhere

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
    leaves = {i for i in _open_leaves(tree) if i not in dropped}
    if config.dead_leaves:
        dropped |= _dead(tree, leaves)
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


def _dead(tree: PrefixTree, leaves: Collection[int]) -> dict[int, str]:
    """Open leaves that led to nothing, with their reasons.

    A leaf that is not the last of its segment was thrown away: the agent went on from elsewhere.
    The last of a segment may be undelivered: the client left before it had the answer, and never
    came back for it. What the agent did then rests on the calls before, so the reward says nothing
    about this one: it is dropped if an earlier call of its segment was delivered, and that segment
    ends before it. Where none was (the first answer took longer than the episode), it stays: it is
    all that the rollout has done.
    """
    dead: dict[int, str] = {}
    for segment in _segments(tree):
        while len(segment) > 1 and _undelivered(tree, segment, leaves):
            dead[segment.pop()] = UNDELIVERED_LEAF
        dead |= {i: DEAD_LEAF for i in segment[:-1] if i in leaves}
    return dead


def _undelivered(tree: PrefixTree, segment: Sequence[int], leaves: Collection[int]) -> bool:
    """The last call of the segment is a leaf that its client abandoned, after one that it took."""
    *before, last = segment
    return (
        last in leaves
        and tree.calls[last].delivery in _ABANDONED
        and any(tree.calls[i].delivery is Delivery.DELIVERED for i in before)
    )


def _segments(tree: PrefixTree) -> list[list[int]]:
    """The calls that sampled something, segment by segment, in the order of sampling."""
    segments: dict[tuple[str, Role, int], list[int]] = {}
    compactions: Counter[str] = Counter()
    for i, call in enumerate(tree.calls):
        if call.role in _AGENTS:
            key = call.chain, call.role, compactions[call.chain]
        else:
            key = call.chain, call.role, tree.prompt_end[i]
        if call.completion_tok:
            segments.setdefault(key, []).append(i)
        compactions[call.chain] += call.role is Role.COMPACTION
    return list(segments.values())
