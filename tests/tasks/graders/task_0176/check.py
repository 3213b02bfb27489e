"""Our test's grader of task_0176 (not ClawGym's): the chords' names and one file for each."""

import json
import os
import sys

CHORDS = ["G", "D", "Em", "C"]


def loaded(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def main():
    out = os.path.join(sys.argv[1], "output")
    diagrams = [os.path.join(out, "diagrams", f"{chord}.txt") for chord in CHORDS]
    checks = {
        "names": loaded(os.path.join(out, "normalized_chords.json")) == CHORDS,
        "unsupported": loaded(os.path.join(out, "unsupported.json")) == [],
        "progression": os.path.isfile(os.path.join(out, "progression.txt")),
        "diagrams": sum(map(os.path.isfile, diagrams)) / len(diagrams),
    }
    print(json.dumps(checks))


main()
