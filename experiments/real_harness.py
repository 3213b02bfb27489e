"""The unmodified pi and Claude Code train a model on ClawGym-form tasks, end to end.

    python experiments/real_harness.py --harness=both --workdir=runs/real [--prompt=reduced]
        [--tasks=DIR,...] [--drive_tasks=DIR,...] [--clawgym_root=DIR --clawgym_tasks=3]

Claim: what training needs holds with the real programs, not only with ours. Each works in a
container without a network against our proxy, on tasks with graders of their own. Scripted
policies, some that solve the task and some that fail, act through the program's own tools and are
scored by the engine; the tiny model itself plays, too. Then a GRPO update (three clipped steps on
the batch), a weight swap, and episodes on the new version.

--prompt=full (default) leaves Claude Code's prompt as it is: 87 kB, which the tiny model's 1,024
words cut into about 47,000 tokens (Qwen3's 151,669: 20,000). --prompt=reduced uses its documented
flags --tools and --system-prompt, about 10,000 tokens, for training, and still drives the full
prompt once, with a sub-agent.

Hardware: two CPU cores. Measured while four other jobs ran there: pi 47 s; Claude Code reduced
(rows of 12,288 tokens) 3 minutes, the full prompt's first answer within 80 s of them. Expected:
solving rollouts are graded 1 and failing ones 0, the engine-trainer gap is below 1e-4 (3e-5),
log-prob per token of successful turns rises (+0.25 pi, +0.48 Claude Code) and that of failed
turns falls (-0.57, -0.28). With --prompt=full (rows of 57,344, 50,379 tokens of them used) old
log-probs took 147 s, the three steps 1,183 s and new log-probs 45 s under that load; successful
turns rose by 0.95, but failed ones did not fall in three steps (+0.08): so far beyond the 1,024
tokens that the tiny model knows, all tool calls first become likelier together.
Images: python launch/images.py --images=base,pi,claude-code
The last line printed is a JSON object: {"harness": {name: {...}}}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from absl import app, flags, logging

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.core.errors import ClawgymError, ConfigError
from clawgym_jax.core.interfaces import Harness, Task
from clawgym_jax.harness.claude_code import ClaudeCode
from clawgym_jax.harness.pi import Pi
from clawgym_jax.tasks.clawgym import load_tasks
from clawgym_jax.train.progress import Display
from clawgym_jax.tree.filters import FilterConfig, select_calls
from experiments.real_harness_parts import policies
from experiments.real_harness_parts.hands import ClaudeHands, Hands, PiHands
from experiments.real_harness_parts.lesson import Lesson, Teacher
from experiments.real_harness_parts.stage import WINDOW_TOK, Play, Played, Stage
from experiments.real_harness_parts.tables import mean_logprob, say_lesson, show, wide_display

PI, CLAUDE = "pi", "claude_code"
FULL, REDUCED = "full", "reduced"
OWN_TASKS = Path(__file__).resolve().parent / "real_harness_tasks"
MODEL_PLAY = "model"
SUBAGENT_PLAY = "solve_by_subagent"
PLAYED_AGAIN = ("solve_by_files", "spoil", "write_stubs", "stop_early", MODEL_PLAY)
REDUCED_TOOLS = ("Bash", "Read", "Write")
REDUCED_PROMPT = "You are an agent that works on the files of its working directory."


def make_harness(name: str, prompt: str) -> Harness:
    """The program as it is, or Claude Code with fewer tools and a short system prompt."""
    if name == PI:
        return Pi()
    if prompt == FULL:
        return ClaudeCode(parallel_agents=False)
    return ClaudeCode(parallel_agents=False, tools=REDUCED_TOOLS, system_prompt=REDUCED_PROMPT)


def plays_for(task: Task, harness: Harness, with_model: bool = True) -> list[Play]:
    """A group of rollouts: our own tasks are solved and spoilt, others get stubs or nothing."""
    return [*scripted_plays(task, harness), *([Play(MODEL_PLAY)] if with_model else [])]


def scripted_plays(task: Task, harness: Harness) -> list[Play]:
    """Policies that act through the harness's own tools, a good one first."""
    hands: Hands = PiHands(task.mount) if harness.name == PI else ClaudeHands(task.mount)
    solution = policies.SOLUTIONS.get(task.task_id)
    if solution is None:
        return [
            Play("write_stubs", policies.write_stubs(hands)),
            Play("stop_early", policies.stop_early(hands)),
        ]
    plays = [
        Play("solve_by_files", policies.solve_by_files(solution, hands)),
        Play("spoil", policies.spoil(solution, hands)),
        Play("solve_by_shell", policies.solve_by_shell(solution, hands)),
        Play("stop_early", policies.stop_early(hands)),
    ]
    if isinstance(hands, ClaudeHands) and isinstance(harness, ClaudeCode) and not harness.tools:
        plays.append(Play(SUBAGENT_PLAY, policies.solve_by_subagent(solution, hands)))
    return plays


def train_through(
    stage: Stage, harness: Harness, tasks: Sequence[Task], display: Display
) -> dict[str, Any]:
    """Groups of rollouts, the update, the swap, and some of the plays again on the new version."""
    version = stage.driver.version
    teacher = Teacher(stage.training_graph, stage.params)
    started_s = time.perf_counter()
    played: list[Played] = []
    for task in tasks:
        with_model = task is tasks[0] or task.task_id in policies.SOLUTIONS
        plays = plays_for(task, harness, with_model)
        played += stage.perform(task, harness, plays, step=version)
    rollout_s = time.perf_counter() - started_s
    show(display, f"{harness.name}, weights {version}", played)
    lesson = teacher.teach([p.episode for p in played])
    say_lesson(display, lesson)
    stage.driver.publish(teacher.state.params, version + 1)
    again = [p for p in plays_for(tasks[0], harness) if p.name in PLAYED_AGAIN]
    following = stage.perform(tasks[0], harness, again, step=version + 1)
    show(display, f"{harness.name}, weights {version + 1}", following)
    return summary(played, lesson, following, rollout_s)


def drive(
    stage: Stage, harness: Harness, tasks: Sequence[Task], display: Display
) -> list[dict[str, Any]]:
    """One scripted episode a task, served and graded, not trained on."""
    played: list[Played] = []
    for task in tasks:
        plays = scripted_plays(task, harness)[:1]
        played += stage.perform(task, harness, plays, step=stage.driver.version)
    if played:
        show(display, f"{harness.name}, driven only", played)
    return [
        {
            "task": p.task_id,
            "reward": p.episode.reward,
            "outcome": str(p.episode.record.outcome),
            "calls": len(p.episode.calls),
        }
        for p in played
    ]


def drive_full(stage: Stage, display: Display) -> dict[str, Any]:
    """Claude Code with its whole prompt and a sub-agent: one scripted episode, graded."""
    task = load_tasks(OWN_TASKS, ids=["paid_totals"])[0]
    harness = make_harness(CLAUDE, FULL)
    started_s = time.perf_counter()
    play = scripted_plays(task, harness)[-1]
    played = stage.perform(task, harness, [play], step=stage.driver.version)
    show(display, "claude_code, full prompt", played)
    episode = played[0].episode
    return {
        "first_prompt_tok": episode.calls[0].prompt_tok if episode.calls else 0,
        "reward": episode.reward,
        "outcome": str(episode.record.outcome),
        "calls_by_role": dict(Counter(str(call.role) for call in episode.calls)),
        "dropped_tok": dict(select_calls(episode.calls, FilterConfig()).dropped_tok()),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def summary(
    played: Sequence[Played], lesson: Lesson, following: Sequence[Played], rollout_s: float
) -> dict[str, Any]:
    """One harness's part of the last line."""
    calls = [call for p in played for call in p.episode.calls]
    return {
        "episodes": len(played),
        "rewards": [p.episode.reward for p in played],
        "policies": [p.name for p in played],
        "tasks": [p.task_id for p in played],
        "outcomes": [str(p.episode.record.outcome) for p in played],
        "calls_by_role": dict(Counter(str(call.role) for call in calls)),
        "first_prompt_tok": calls[0].prompt_tok if calls else 0,
        "versions": versions_of(played),
        "next_versions": versions_of(following),
        "next_rewards": [p.episode.reward for p in following],
        "replayed_logprob_change": replayed_change(played, following),
        "rollout_s": round(rollout_s, 1),
        **dataclasses.asdict(lesson),
    }


def replayed_change(played: Sequence[Played], following: Sequence[Played]) -> dict[str, float]:
    """By policy, how much likelier per token the engine finds the very same turns now."""
    earlier = {(p.task_id, p.name): p.episode.calls for p in reversed(played)}
    out: dict[str, float] = {}
    for p in following:
        old, new = earlier[p.task_id, p.name], p.episode.calls
        same = [c.completion.ids.tolist() for c in old] == [c.completion.ids.tolist() for c in new]
        if same:
            out[p.name] = mean_logprob(new) - mean_logprob(old)
    return out


def versions_of(played: Sequence[Played]) -> list[int]:
    """The weight versions that sampled or scored any of these tokens."""
    found = {int(v) for p in played for c in p.episode.calls for v in c.completion.versions}
    return sorted(found)


def find_tasks(roots: Sequence[Path], clawgym_root: Path | None, count: int) -> list[Task]:
    """Our own tasks first (they have solutions), then the given folders', then ClawGym's."""
    tasks: list[Task] = []
    for root in roots:
        one = (root / "data_entry.json").is_file()
        tasks += load_tasks(root.parent, ids=[root.name]) if one else load_tasks(root)
    if clawgym_root is not None:
        tasks += load_tasks(clawgym_root / "RL" / "data" / "clawgym_eval", limit=count)
    return tasks


def run(
    names: Sequence[str],
    workdir: Path,
    tasks: Sequence[Task],
    driven: Sequence[Task],
    prompt: str,
    display: Display,
) -> dict[str, Any]:
    """Everything, one harness after the other, each from the same weights."""
    if not tasks:
        raise ConfigError("no tasks: name folders with --tasks or a checkout with --clawgym_root")
    out: dict[str, Any] = {}
    for name in names:
        folder = workdir / name
        folder.mkdir(parents=True, exist_ok=False)
        with Stage(model_folder(TINY_BASE), folder) as stage:
            sizes = {"tokenizer_size": stage.tokenizer_size, "context_tok": WINDOW_TOK}
            display.say(f"{name}: tokenizer of {sizes['tokenizer_size']}, context {WINDOW_TOK}")
            stage.driver.publish(stage.params, 1)
            harness = make_harness(name, prompt)
            found = train_through(stage, harness, tasks, display)
            found["driven"] = drive(stage, harness, driven, display)
            if name == CLAUDE and prompt == REDUCED:
                found["full_prompt"] = drive_full(stage, display)
            out[name] = {**sizes, **found}
    return {"harness": out}


HARNESS = flags.DEFINE_enum("harness", "both", [PI, CLAUDE, "both"], "which program")
WORKDIR = flags.DEFINE_string("workdir", None, "a new folder for calls and episodes")
PROMPT = flags.DEFINE_enum("prompt", FULL, [FULL, REDUCED], "Claude Code's prompt in training")
TASKS = flags.DEFINE_list("tasks", [str(OWN_TASKS)], "task folders, or folders of them")
DRIVE_TASKS = flags.DEFINE_list("drive_tasks", [], "more of them: driven, not trained on")
CLAWGYM_ROOT = flags.DEFINE_string("clawgym_root", None, "checkout of ClawGym/ClawGym-Agents")
CLAWGYM_TASKS = flags.DEFINE_integer("clawgym_tasks", 3, "how many of its evaluation tasks")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    logging.set_verbosity(logging.WARNING)
    names = [PI, CLAUDE] if HARNESS.value == "both" else [HARNESS.value]
    root = Path(CLAWGYM_ROOT.value) if CLAWGYM_ROOT.value else None
    try:
        tasks = find_tasks([Path(path) for path in TASKS.value], root, CLAWGYM_TASKS.value)
        driven = find_tasks([Path(path) for path in DRIVE_TASKS.value], None, 0)
        result = run(names, Path(WORKDIR.value), tasks, driven, PROMPT.value, wide_display())
    except ClawgymError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    flags.mark_flag_as_required("workdir")
    app.run(main)
