"""Our test's grader of task_0185 (not ClawGym's); prints a weighted "reward" beside the checks."""

import json
import os
import sys


def expected_commands(steps):
    words = [s if isinstance(s, str) else f"template {s['template']['target']}" for s in steps]
    return [f"bash-themes {word}" for word in words]


def main():
    root = sys.argv[1]
    with open(os.path.join(root, "input", "project.json"), encoding="utf-8") as file:
        project = json.load(file)
    try:
        with open(os.path.join(root, "output", "plan.json"), encoding="utf-8") as file:
            plan = json.load(file)
    except (OSError, ValueError):
        plan = {}
    try:
        with open(os.path.join(root, "output", "USAGE.md"), encoding="utf-8") as file:
            usage = file.read()
    except OSError:
        usage = ""
    commands = expected_commands(project["steps"])
    checks = {
        "keys": set(plan) == {"project_name", "bash_themes_dir", "commands"},
        "commands": plan.get("commands") == commands,
        "usage": all(command in usage for command in commands),
    }
    weights = {"keys": 0.2, "commands": 0.6, "usage": 0.2}
    reward = sum(weights[name] * passed for name, passed in checks.items())
    print(json.dumps({**checks, "reward": round(reward, 6)}))


main()
