"""Scripted policies that act through a real harness's own tools, some well and some badly.

Each reads the conversation as a model would: how far it has come, and what a tool returned. For
our own tasks: solving by file tools, by a shell command, or by a sub-agent; failing by a wrong
result, or by stopping early. For any other task: writing a stub to every output that the
instruction names, or stopping after a look.
Not here: sampling (`rollout.scripted`), tools (`hands`).
Invariant: what a policy writes depends on the conversation alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clawgym_jax.core.errors import TaskError
from clawgym_jax.rollout.scripted import Conversation, Policy
from experiments.real_harness_parts.hands import ClaudeHands, Hands

DONE = "Done."
ORDER_TO_SUBAGENT = "Do the following and answer with one word when it is done: "
_RESULT = re.compile(r"<tool_response>\n(.*?)\n?</tool_response>", re.DOTALL)
_OUTPUT = re.compile(r"\boutputs?/[\w./-]*\w\.\w+")
_MOST_OUTPUTS = 8


@dataclass(frozen=True)
class Solution:
    """How one of our own tasks is solved, and how it is spoilt."""

    source: str  # the file to read
    work: Callable[[str], Mapping[str, str]]  # what was read -> output path -> content
    spoilt: Mapping[str, str]  # output path -> wrong content
    command: str  # the same work by shell


def _paid_totals(text: str) -> dict[str, str]:
    rows = re.findall(r"([a-z]+),(\d+),(paid|open|void)", text)
    if not rows:
        raise TaskError(f"expected rows of invoices.csv, the tool returned {text[:200]!r}")
    totals: dict[str, int] = {}
    for customer, amount, status in rows:
        if status == "paid":
            totals[customer] = totals.get(customer, 0) + int(amount)
    top = max(totals, key=lambda name: totals[name])
    return {"output/totals.json": json.dumps(totals), "output/top.txt": top}


def _error_lines(text: str) -> dict[str, str]:
    lines = re.findall(r"\d\d:\d\d:\d\d ERROR .*", text)
    if not lines:
        raise TaskError(f"expected lines of service.log, the tool returned {text[:200]!r}")
    return {"output/errors.log": "\n".join(lines) + "\n", "output/count.txt": str(len(lines))}


SOLUTIONS = {
    "paid_totals": Solution(
        source="input/invoices.csv",
        work=_paid_totals,
        spoilt={"output/totals.json": '{"karno": 650, "dubas": 225}', "output/top.txt": "karno"},
        command=(
            'mkdir -p output && awk -F, \'$3 == "paid" {t[$1] += $2} END {s = "{"; '
            'for (c in t) {printf "%s\\"%s\\": %d", s, c, t[c]; s = ", "; '
            'if (t[c] > m) {m = t[c]; n = c}} print "}"; print n > "output/top.txt"}\''
            " input/invoices.csv > output/totals.json"
        ),
    ),
    "error_lines": Solution(
        source="input/service.log",
        work=_error_lines,
        spoilt={"output/errors.log": "10:00:01 INFO start\n", "output/count.txt": "7"},
        command=(
            "mkdir -p output && grep '^[0-9:]* ERROR ' input/service.log > output/errors.log"
            " && wc -l < output/errors.log > output/count.txt"
        ),
    ),
}


def solve_by_files(solution: Solution, hands: Hands) -> Policy:
    """Reads the source, works on what came back, writes each output."""

    def policy(conversation: Conversation, rng: random.Random) -> str:
        results = results_of(conversation)
        if not results:
            return hands.read(solution.source)
        return _next_write(solution.work(results[0]), len(results) - 1, hands)

    return policy


def solve_by_shell(solution: Solution, hands: Hands) -> Policy:
    """One command does it all."""

    def policy(conversation: Conversation, rng: random.Random) -> str:
        return DONE if results_of(conversation) else hands.shell(solution.command)

    return policy


def solve_by_subagent(solution: Solution, hands: ClaudeHands) -> Policy:
    """Hands the work to a sub-agent, which does it by shell; speaks for both."""
    below = solve_by_shell(solution, hands)

    def policy(conversation: Conversation, rng: random.Random) -> str:
        results = results_of(conversation)
        if any(ORDER_TO_SUBAGENT in m.text for m in conversation if m.role == "user"):
            return below(conversation, rng)
        return DONE if results else hands.delegate(ORDER_TO_SUBAGENT + solution.command)

    return policy


def spoil(solution: Solution, hands: Hands) -> Policy:
    """Writes wrong results without having read anything."""

    def policy(conversation: Conversation, rng: random.Random) -> str:
        return _next_write(solution.spoilt, len(results_of(conversation)), hands)

    return policy


def stop_early(hands: Hands) -> Policy:
    """Looks and says that it is finished."""

    def policy(conversation: Conversation, rng: random.Random) -> str:
        return DONE if results_of(conversation) else hands.shell("ls -R input")

    return policy


def write_stubs(hands: Hands) -> Policy:
    """Puts something plausible at every output path that the instruction names."""

    def policy(conversation: Conversation, rng: random.Random) -> str:
        asked = "\n".join(m.text for m in conversation if m.role == "user")
        paths = list(dict.fromkeys(_OUTPUT.findall(asked)))[:_MOST_OUTPUTS]
        if results_of(conversation) or not paths:
            return DONE
        return hands.shell(" && ".join(_stub_command(path) for path in paths))

    return policy


def results_of(conversation: Conversation) -> list[str]:
    """What tools returned, in order."""
    return [
        found
        for m in conversation
        if m.role in ("user", "tool")
        for found in _RESULT.findall(m.text)
    ]


def _next_write(outputs: Mapping[str, str], done: int, hands: Hands) -> str:
    paths = list(outputs)
    return hands.write(paths[done], outputs[paths[done]]) if done < len(paths) else DONE


def _stub_command(path: str) -> str:
    text = "[]" if path.endswith(".json") else "none"
    return f"mkdir -p {path.rpartition('/')[0]} && echo '{text}' > {path}"
