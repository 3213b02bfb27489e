"""Small file tasks with exact answers, made up from a seed: what the tiny model learns on.

    value   "Write the value of banor in in/ketu to the note liso."    in/ketu.csv: banor=disa ...
    copy    "Copy the file in/ketu to the note liso."
    first   "Write the first line of in/ketu to the note liso."
    last    "Write the last line of in/ketu to the note liso."
    count   "Write how many lines in/ketu has to the note liso."

The extension of in/ketu is not told, so an agent has to look; the other files of in/ distract. The
note liso is the file out/liso.md: a rule of this house that no request tells and that is not in the
tiny base model's text, so it can be learned from demonstrations and rewards only.
All names belong to the split's own share (`core.names`). Not here: instructions in other words.
Invariant: the same (split, count, seed) gives the same tasks, and a longer list starts with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from clawgym_jax.core.names import Split, draw_name
from clawgym_jax.tasks.grading import Scoring
from clawgym_jax.tasks.task import FolderTask

MOUNT = "/workspace"
EXTENSIONS = ("txt", "csv", "log")
FAMILIES = ("value", "copy", "first", "last", "count")
INSTRUCTIONS = {
    "value": "Write the value of {key} in {source} to the note {note}.",
    "copy": "Copy the file {source} to the note {note}.",
    "first": "Write the first line of {source} to the note {note}.",
    "last": "Write the last line of {source} to the note {note}.",
    "count": "Write how many lines {source} has to the note {note}.",
}
LINES = {"value": (1, 2), "copy": (1, 2), "first": (2, 6), "last": (2, 6), "count": (2, 6)}

CHECK = '''"""Prints whether the output is as expected, up to trailing white space."""
import sys

EXPECTED = {expected!r}
try:
    with open(sys.argv[1] + "/" + {output!r}, encoding="utf-8", errors="replace") as file:
        match = file.read(1 << 20).rstrip() == EXPECTED.rstrip()
except OSError:
    match = False
print('{{"match": %.1f}}' % match)
'''
MEAN = '''"""Prints the mean of the values of the JSON object on standard input."""
import json
import sys

values = [float(value) for value in json.load(sys.stdin).values()]
print(sum(values) / len(values))
'''
REWARD_SH = """#!/usr/bin/env bash
# Scores the workspace that this folder lies in; the last line printed is the score.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python3 -I -S "$here/check.py" "$here/.." | python3 -I -S "$here/mean.py"
"""


@dataclass(frozen=True)
class ToyTask(FolderTask):
    """A made-up task that knows its own answer (for demonstrations and tests)."""

    family: str = ""
    source: str = ""  # in/ketu.csv, with the extension
    output: str = ""  # out/liso.md
    expected: str = ""  # content of the output, up to trailing white space


def note_path(name: str) -> str:
    """Where the note called `name` lies."""
    return f"out/{name}.md"


def toy_tasks(split: Split, count: int, seed: int) -> list[ToyTask]:
    """`count` tasks; families in turn, so that any five in a row hold one of each."""
    return [toy_task(split, seed, index) for index in range(count)]


def toy_task(split: Split, seed: int, index: int) -> ToyTask:
    """The task with this index, whatever the others are."""
    rng = random.Random(f"toy/{split}/{seed}/{index}")
    names = _Names(rng, split)
    family = FAMILIES[index % len(FAMILIES)]
    lines = _lines(rng, names, LINES[family], keyed=family == "value" or rng.random() < 0.3)
    stem, note = names.new(), names.new()
    source, output = f"in/{stem}.{rng.choice(EXTENSIONS)}", note_path(note)
    contents = {source: lines}
    for _ in range(rng.randint(1, 2)):
        other = f"in/{names.new()}.{rng.choice(EXTENSIONS)}"
        contents[other] = _lines(rng, names, (2, 6), keyed=rng.random() < 0.5)
    key, _, value = rng.choice(lines).partition("=")
    expected = {
        "value": value,
        "copy": "\n".join(lines),
        "first": lines[0],
        "last": lines[-1],
        "count": str(len(lines)),
    }[family]
    return ToyTask(
        task_id=f"toy_{split}_{seed}_{index:05d}",
        instruction=INSTRUCTIONS[family].format(key=key, source=f"in/{stem}", note=note),
        mount=MOUNT,
        inputs={name: "".join(f"{x}\n" for x in text).encode() for name, text in contents.items()},
        reward={
            "check.py": CHECK.format(expected=expected, output=output).encode(),
            "mean.py": MEAN.encode(),
            "reward.sh": REWARD_SH.encode(),
        },
        folders=("out",),
        metadata={"category": family, "grading_type": "automated"},
        score=Scoring(isolated=True),
        family=family,
        source=source,
        output=output,
        expected=expected,
    )


class _Names:
    """Names of one split, none twice in a task."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._draw: Callable[[], str] = lambda: draw_name(rng, split)
        self._used: set[str] = set()

    def new(self) -> str:
        while (name := self._draw()) in self._used:
            pass
        self._used.add(name)
        return name


def _lines(rng: random.Random, names: _Names, between: tuple[int, int], keyed: bool) -> list[str]:
    """Lines of one file: names, or key=value."""
    count = rng.randint(*between)
    return [f"{names.new()}={names.new()}" if keyed else names.new() for _ in range(count)]
