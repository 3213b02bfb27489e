"""Which rollouts a step does: instances of (task, harness), each with its group of siblings.

Mix-harness: every harness gets the same share of a step's instances; groups (and so baselines) are
per (task, harness). Not here: running them.
Invariant: the plan of a step is a function of (seed, step) alone, so a resumed run plans the same.
Source: ClawGym II, mix-harness training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from clawgym_jax.core.interfaces import Harness, Task
from clawgym_jax.rollout.episode import Instance


def plan_step(
    tasks: Sequence[Task],
    harnesses: Sequence[Harness],
    *,
    split: str,
    step: int,
    seed: int,
    instances: int,
    group_size: int,
) -> list[Instance]:
    """`instances` (task, harness) pairs with `group_size` rollouts each, siblings adjacent."""
    rng = random.Random(f"{seed}/{split}/{step}")
    chosen = _draw(tasks, instances, rng)
    turn = rng.randrange(len(harnesses))
    return [
        _instance(task, harnesses[(turn + i) % len(harnesses)], split, step, seed, i, sibling)
        for i, task in enumerate(chosen)
        for sibling in range(group_size)
    ]


def plan_each(
    tasks: Sequence[Task],
    harnesses: Sequence[Harness],
    *,
    split: str,
    step: int,
    seed: int,
    group_size: int = 1,
) -> list[Instance]:
    """Every task through every harness: for evaluation and demonstrations."""
    pairs = [(task, harness) for task in tasks for harness in harnesses]
    return [
        _instance(task, harness, split, step, seed, i, sibling)
        for i, (task, harness) in enumerate(pairs)
        for sibling in range(group_size)
    ]


def _draw(tasks: Sequence[Task], count: int, rng: random.Random) -> list[Task]:
    """`count` tasks, none twice before all were drawn."""
    chosen: list[Task] = []
    while len(chosen) < count:
        chosen += rng.sample(list(tasks), min(len(tasks), count - len(chosen)))
    return chosen


def _instance(
    task: Task, harness: Harness, split: str, step: int, seed: int, number: int, sibling: int
) -> Instance:
    group = f"{split}-s{step:04d}-g{number:03d}"
    episode = f"{group}-r{sibling:02d}"
    return Instance(
        episode_id=episode,
        group_id=f"{group}/{harness.name}/{task.task_id}",
        task=task,
        harness=harness,
        split=split,
        step=step,
        seed=zlib.crc32(f"{seed}/{episode}".encode()),
    )
