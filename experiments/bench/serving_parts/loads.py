"""What the contestants are asked for: rollouts, each a row of turns, one after another.

- cold: a single turn of 128 random tokens that nobody has seen and 96 new ones, all alike. The best
  case for a batch that starts and ends together, and nothing for a prefix cache to find.
- quickstart: a training step of `make quickstart`, two groups of eight rollouts through each of its
  harnesses: 2 to 5 turns, prompts of 114 to 340 tokens, completions of 2 to 30.
- claude_code: four groups of eight rollouts of ten turns through the real Claude Code, every 16th
  token of each part: prompts of 1,240 to 1,640 tokens, completions of 3 to 21; the full ones have
  20,000 and 150.
The last two are tests/data/recorded_trees: lengths and what coincides are recorded, ids are drawn.
A turn is asked for when the rollout's last one is answered; tools take no time. Prompts are the
recorded ones whatever was sampled, so that everybody is asked for the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.bench.tree_parts import structure

GROUP = 8
PROMPT_TOK, NEW_TOK = 128, 96


@dataclass(frozen=True)
class Load:
    """groups: recorded ones, taken in turn, each time as another task; (): the cold load."""

    name: str
    groups: tuple[str, ...]
    thin: int
    window_tok: int
    kv_buckets: tuple[int, ...]
    new_tok: int = NEW_TOK  # of the cold load


LOADS = (
    Load("cold", (), 1, 768, (256, 384, 512)),
    Load("quickstart", ("quickstart_chat", "quickstart_shell"), 1, 768, (256, 384, 512)),
    Load("claude_code", ("claude_code",), 16, 1792, (1408, 1792)),
)
Turn = dict[str, Any]  # "prompt": list of ids, "new_tok": int


def rollouts(load: Load, count: int, seed: int, vocabulary: int) -> list[list[Turn]]:
    """`count` of them, whole groups first; other ids for another seed."""
    rng = np.random.default_rng(np.random.SeedSequence([abs(seed), int(seed < 0), count]))
    if not load.groups:
        prompts = rng.integers(0, vocabulary, (count, PROMPT_TOK)).tolist()
        return [[{"prompt": prompt, "new_tok": load.new_tok}] for prompt in prompts]
    out: list[list[Turn]] = []
    for kind in range(len(load.groups)):  # a kind's copies share its first prompt with each other
        table = rng.integers(0, vocabulary, 1_000_000, dtype=np.int32)
        copies = range(-(-count // (GROUP * len(load.groups))))
        for copy in copies:
            group = structure.stored(load.groups[kind])
            for calls in structure.expand(group, copy, thin=load.thin):
                turns = [(table[c.prompt_ids].tolist(), c.completion_tok) for c in calls]
                out.append([{"prompt": prompt, "new_tok": size} for prompt, size in turns])
    return _alternate(out, len(load.groups))[:count]


def _alternate(rows: Sequence[Any], kinds: int) -> list[Any]:
    """Groups of the kinds in turn, where `rows` has one kind after the other."""
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]
    each = len(groups) // kinds
    return [row for i in range(each) for kind in range(kinds) for row in groups[kind * each + i]]


def nothing_shared(asked: list[list[Turn]], seed: int, vocabulary: int) -> list[list[Turn]]:
    """The same lengths, but every prompt begins with two tokens of its own."""
    rng = random.Random(seed)
    pairs = rng.sample(range(vocabulary**2), sum(map(len, asked)))
    return [
        [
            turn | {"prompt": [*divmod(pairs.pop(), vocabulary), *turn["prompt"][2:]]}
            for turn in turns
        ]
        for turns in asked
    ]


def new_tok(asked: list[list[Turn]]) -> int:
    return sum(turn["new_tok"] for turns in asked for turn in turns)


def prompt_tok(asked: list[list[Turn]]) -> int:
    return sum(len(turn["prompt"]) for turns in asked for turn in turns)
