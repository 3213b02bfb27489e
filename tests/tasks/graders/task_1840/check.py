"""Our test's grader of task_1840 (not ClawGym's): people in the graph, the missing one reported."""

import json
import os
import sys


def lines(path):
    try:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    except OSError:
        return []


def main():
    out = os.path.join(sys.argv[1], "output")
    graph = lines(os.path.join(out, "ontology", "graph.jsonl"))
    report = lines(os.path.join(out, "feedback", "sync-feedback.md"))
    try:
        ops = [json.loads(line)["op"] for line in graph]
    except (ValueError, KeyError, TypeError):
        ops = []
    text = "\n".join(graph)
    checks = {
        "people": all(name in text for name in ("person_alice_johnson", "person_bob")),
        "ops": bool(ops) and set(ops) <= {"upsert", "relate"},
        "report": any(line.startswith("- [ ]") for line in report),
    }
    print(json.dumps(checks))


main()
