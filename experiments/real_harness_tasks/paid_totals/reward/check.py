"""Grades paid_totals: the totals of the paid invoices and the largest of them."""

import csv
import json
import os
import sys


def expected(root):
    totals = {}
    with open(os.path.join(root, "input", "invoices.csv"), encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["status"] == "paid":
                totals[row["customer"]] = totals.get(row["customer"], 0) + int(row["amount"])
    return totals


def text_of(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def main():
    root = sys.argv[1]
    totals = expected(root)
    try:
        found = json.loads(text_of(os.path.join(root, "output", "totals.json")))
    except ValueError:
        found = None
    top = text_of(os.path.join(root, "output", "top.txt")).strip()
    checks = {
        "totals": found == totals,
        "top": top == max(totals, key=lambda name: totals[name]),
    }
    print(json.dumps(checks))


main()
