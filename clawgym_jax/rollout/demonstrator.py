"""An imperfect player of the toy tasks: what a cold start learns from.

It reads only the conversation, as a model would, and plays with file tools or with a shell,
whichever the system prompt offers. Its mistakes are the ones that reinforcement learning is to
remove: it guesses an extension instead of looking, takes a wrong file, target or content, or ends
its turn too early.
Not here: tasks (tasks/toy.py states the instructions), log-probs (scripted.py).
Invariant: all chance comes from the `rng` of the call.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from clawgym_jax.core.errors import TaskError
from clawgym_jax.rollout.scripted import Conversation
from clawgym_jax.tasks.toy import note_path

EXTENSIONS = ("txt", "csv", "log")
DONE = "done"
_ASKED = {
    "value": r"Write the value of (?P<key>\S+) in in/(?P<stem>\S+)",
    "copy": r"Copy the file in/(?P<stem>\S+)",
    "first": r"Write the first line of in/(?P<stem>\S+)",
    "last": r"Write the last line of in/(?P<stem>\S+)",
    "count": r"Write how many lines in/(?P<stem>\S+) has",
}
_PATTERNS = {
    family: re.compile(asked + r" to the note (?P<note>\S+)\.") for family, asked in _ASKED.items()
}
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*)\n</tool_response>", re.DOTALL)
_COMMANDS = {
    "copy": "cp {source} {out}",
    "first": "head -n 1 {source} > {out}",
    "last": "tail -n 1 {source} > {out}",
    "count": "wc -l < {source} > {out}",
}
_WRONG_COMMANDS = {
    "copy": "head -n 1 {source} > {out}",
    "first": "tail -n 1 {source} > {out}",
    "last": "head -n 1 {source} > {out}",
    "count": "wc -c < {source} > {out}",
}


@dataclass(frozen=True, slots=True)
class Mistakes:
    """How often each thing goes wrong, where it can."""

    stop_early: float = 0.10  # at each step before the output is written
    guess: float = 0.5  # starts with a guessed extension
    give_up: float = 0.6  # after an error, instead of looking
    wrong_file: float = 0.18
    wrong_target: float = 0.25
    wrong_content: float = 0.06


@dataclass(frozen=True, slots=True)
class _Goal:
    family: str
    stem: str
    note: str
    key: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A call that was made, and what came back."""

    name: str
    arguments: dict[str, str]
    result: str

    @property
    def failed(self) -> bool:
        return self.result.startswith("error") or "\nexit status" in self.result


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """A policy for `ScriptedSampler`."""

    mistakes: Mistakes = Mistakes()

    def __call__(self, conversation: Conversation, rng: random.Random) -> str:
        goal = _goal_of(conversation)
        steps = _steps_of(conversation)
        offered = next((m.text for m in conversation if m.role == "system"), "")
        if '"bash"' in offered:
            return self._shell_turn(goal, steps, rng)
        return self._chat_turn(goal, steps, rng)

    # ---- file tools ---------------------------------------------------------------------------

    def _chat_turn(self, goal: _Goal, steps: Sequence[_Step], rng: random.Random) -> str:
        last = steps[-1] if steps else None
        if self._ends(last, rng):
            return DONE
        if last is None and self._hits(rng, self.mistakes.guess):
            return _call("read_file", path=_guess(goal, rng))
        if last is None or last.failed:
            return _call("list_files", path="in")
        if last.name == "list_files":
            return _call("read_file", path=self._pick(goal, last.result, rng))
        content = self._content(goal, last.result, rng)
        return _call("write_file", path=self._target(goal, rng), content=content)

    # ---- shell --------------------------------------------------------------------------------

    def _shell_turn(self, goal: _Goal, steps: Sequence[_Step], rng: random.Random) -> str:
        last = steps[-1] if steps else None
        if self._ends(last, rng):
            return DONE
        if last is None and self._hits(rng, self.mistakes.guess):
            return self._shell_use(goal, _guess(goal, rng), rng)
        if last is None or last.failed:
            return _call("bash", command="ls in")
        command = last.arguments["command"]
        if command == "ls in":
            return self._shell_use(goal, self._pick(goal, last.result, rng), rng)
        content = self._content(goal, last.result, rng)
        return _call("bash", command=f"echo {content} > {self._target(goal, rng)}")

    def _shell_use(self, goal: _Goal, source: str, rng: random.Random) -> str:
        """One command that does it all, or a look at the file."""
        if goal.family == "value" or (goal.family != "copy" and rng.random() < 0.3):
            return _call("bash", command=f"cat {source}")
        wrong = self._hits(rng, self.mistakes.wrong_content)
        form = (_WRONG_COMMANDS if wrong else _COMMANDS)[goal.family]
        command = form.format(source=source, out=self._target(goal, rng))
        return _call("bash", command=command)

    # ---- choices ------------------------------------------------------------------------------

    def _hits(self, rng: random.Random, probability: float) -> bool:
        return rng.random() < probability

    def _ends(self, last: _Step | None, rng: random.Random) -> bool:
        if last is not None and _writes(last):
            return not last.failed or self._hits(rng, self.mistakes.give_up)
        if last is not None and last.failed and self._hits(rng, self.mistakes.give_up):
            return True
        return self._hits(rng, self.mistakes.stop_early)

    def _pick(self, goal: _Goal, listing: str, rng: random.Random) -> str:
        names = listing.split()
        right = [name for name in names if name.rpartition(".")[0] == goal.stem]
        others = [name for name in names if name not in right]
        wrong = not right or (others and self._hits(rng, self.mistakes.wrong_file))
        return f"in/{rng.choice(others if wrong and others else right or [goal.stem])}"

    def _target(self, goal: _Goal, rng: random.Random) -> str:
        """Where the note lies, or not quite."""
        if not self._hits(rng, self.mistakes.wrong_target):
            return note_path(goal.note)
        return rng.choice([goal.note, f"{goal.note}.md", f"out/{goal.note}", f"out/{goal.stem}.md"])

    def _content(self, goal: _Goal, text: str, rng: random.Random) -> str:
        wrong = self._hits(rng, self.mistakes.wrong_content)
        lines = text.split("\n")
        if goal.family == "copy":
            return "\n".join(lines[:-1]) if wrong else text
        if goal.family == "count":
            return str(len(lines) + (rng.choice((-1, 1)) if wrong else 0))
        if goal.family in ("first", "last"):
            return lines[0 if (goal.family == "first") != wrong else -1]
        values = dict(line.partition("=")[::2] for line in lines)
        others = [value for key, value in values.items() if key != goal.key]
        if wrong or goal.key not in values:
            return rng.choice(others) if others else goal.key
        return values[goal.key]


def _writes(step: _Step) -> bool:
    command = step.arguments.get("command", "")
    return step.name == "write_file" or ">" in command or command.startswith("cp ")


def _guess(goal: _Goal, rng: random.Random) -> str:
    return f"in/{goal.stem}.{rng.choice(EXTENSIONS)}"


def _call(name: str, **arguments: str) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _goal_of(conversation: Conversation) -> _Goal:
    instruction = next((m.text for m in conversation if m.role == "user"), "")
    for family, pattern in _PATTERNS.items():
        found = pattern.search(instruction)
        if found:
            parts = found.groupdict()
            return _Goal(family, parts["stem"], parts["note"], parts.get("key", ""))
    raise TaskError(f"expected a toy task's instruction, got {instruction[:120]!r}")


def _steps_of(conversation: Conversation) -> list[_Step]:
    """Calls with their results, in order; a call without a result has an empty one."""
    steps = []
    for message, following in zip(conversation, [*conversation[1:], None], strict=True):
        call = _CALL.search(message.text) if message.role == "assistant" else None
        if call is None:
            continue
        result = _RESULT.search(following.text) if following else None
        body = json.loads(call[1])
        steps.append(_Step(body["name"], body["arguments"], result[1] if result else ""))
    return steps
