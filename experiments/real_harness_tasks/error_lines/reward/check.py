"""Grades error_lines: the lines whose level is ERROR, and their number."""

import json
import os
import sys


def lines_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return []


def main():
    root = sys.argv[1]
    log = lines_of(os.path.join(root, "input", "service.log"))
    errors = [line for line in log if line.split(" ")[1] == "ERROR"]
    count = [line.strip() for line in lines_of(os.path.join(root, "output", "count.txt"))]
    checks = {
        "lines": lines_of(os.path.join(root, "output", "errors.log")) == errors,
        "count": count == [str(len(errors))],
    }
    print(json.dumps(checks))


main()
