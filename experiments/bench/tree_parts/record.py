"""Writes how the prompts of a recorded group coincide: lengths and copies, no text, no token ids.

    python experiments/bench/tree_parts/record.py NAME PROGRAM HOW OTHER_CALLS_LOG CALLS_LOG ...

NAME: of the file in tests/data/recorded_trees; PROGRAM: the harness program with its version; HOW:
when and how it was recorded; OTHER_CALLS_LOG: an episode of another task; CALLS_LOG: the logs of
the group's rollouts, whose episodes are taken in order (`play` makes such logs). FILE@PREFIX stands
for the episodes of a log whose id starts so: "RUN/calls.log@train-s0003-g000" is a group of a run.
Invariant: the trees of what was written are those of what was recorded, or nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord
from clawgym_jax.proxy.call_log import read_episodes
from clawgym_jax.tree.filters import FilterConfig, select_calls
from clawgym_jax.tree.pack import PackConfig, pack
from experiments.bench.tree_parts.structure import FOLDER, CallForm, Group, expand, write

Calls = Sequence[CallRecord]


def form_of(rollouts: Sequence[Calls], r: int, c: int) -> CallForm:
    """rollouts: recorded calls; only those before call c of rollout r are looked at."""
    call, calls = rollouts[r][c], rollouts[r]
    place = {earlier.call_id: i for i, earlier in enumerate(calls[:c])}
    assert not any(span.offset for span in call.spans), "expected turns put in from their start"
    likes: list[tuple[int, int, int]] = []  # (tokens in common, rollout, call)
    behind_own = False
    for number, earlier in enumerate(rollouts[: r + 1]):
        for i, other in enumerate(earlier[:c] if number == r else earlier):
            same = int(common_prefix(whole(other), call.prompt_ids))
            likes += [(same, number, i)] if same else []
            behind_own |= number == r and same == len(whole(other))
    if behind_own:  # what other rollouts sampled is not its own, even where it reads the same
        likes = [like for like in likes if like[1] == r]
    same, *place_of = max(likes, default=(0, 0, 0))  # the latest of equals: its own
    return CallForm(
        role=str(call.role),
        prompt=call.prompt_tok,
        completion=call.completion_tok,
        like=(*place_of, same) if same else None,
        spans=tuple((s.start, s.length, place[s.call_id]) for s in call.spans),
        continues=tuple(place[name] for name in call.continues),
    )


def whole(call: CallRecord) -> np.ndarray:
    """i32[P + C]"""
    return np.concatenate([call.prompt_ids, call.completion.ids])


def check(group: Group, rollouts: Sequence[Calls]) -> None:
    """Same verdicts, same edges, as many tokens alone and packed together."""
    again = expand(group)
    keep = FilterConfig(dead_leaves=False, max_leaves=0, auxiliary_calls=False)
    chosen = [[select_calls(calls, keep) for calls in side] for side in (rollouts, again)]
    for was, is_now in zip(*chosen, strict=True):
        assert was.tree.extends == is_now.tree.extends, (was.tree.extends, is_now.tree.extends)
        assert was.tree.total_tok == is_now.tree.total_tok, (was.tree.total_tok, is_now)
        assert (was.kept, was.leaves) == (is_now.kept, is_now.leaves)
    size = sum(selection.tree.total_tok for selection in chosen[0])
    together = [pack(selections, PackConfig(size, size))[0] for selections in chosen]
    unique = [rows.unique_tok for rows in together]
    assert unique[0] == unique[1], f"expected {unique[0]} tokens in the group's tree: {unique[1]}"
    assert (together[0].end == together[1].end).all() and (
        together[0].pred == together[1].pred
    ).all()


def episodes_of(log: str) -> list[Calls]:
    file, _, prefix = log.partition("@")
    return [calls for name, calls in read_episodes(Path(file)) if name.startswith(prefix)]


def main(name: str, program: str, how: str, other: str, *logs: str) -> None:
    rollouts = [calls for log in logs for calls in episodes_of(log)]
    others, *_ = episodes_of(other)
    group = Group(
        program=program,
        protocol=rollouts[0][0].protocol,
        recorded=how,
        other_task_tok=int(common_prefix(rollouts[0][0].prompt_ids, others[0].prompt_ids)),
        rollouts=tuple(
            tuple(form_of(rollouts, r, c) for c in range(len(calls)))
            for r, calls in enumerate(rollouts)
        ),
    )
    check(group, rollouts)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write(FOLDER / f"{name}.json", group)


if __name__ == "__main__":
    main(*sys.argv[1:])
