"""What a real-harness run prints: one table per group of episodes, and the lesson in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clawgym_jax.core.types import CallRecord, Role
from clawgym_jax.train.progress import Display
from clawgym_jax.tree.prefix_tree import build_tree
from experiments.real_harness_parts.lesson import Lesson
from experiments.real_harness_parts.stage import Played

WIDTH = 150  # columns of a printed table


def wide_display() -> Display:
    """Tables need room, also where there is no terminal to ask for its width."""
    console = Console(highlight=False, soft_wrap=True)
    return Display(console if console.width >= WIDTH else Console(highlight=False, width=WIDTH))


def show(display: Display, title: str, played: Sequence[Played]) -> None:
    table = Table(title=title)
    columns = ("task", "policy", "outcome", "reward", "calls", "prompt tok", "sampled tok")
    for column in (*columns, "leaves", "log-prob/tok", "seconds"):
        table.add_column(column)
    for p in played:
        calls = p.episode.calls
        record = p.episode.record
        table.add_row(
            p.task_id,
            p.name,
            f"{record.outcome} {record.detail}".strip(),
            "none" if p.episode.reward is None else f"{p.episode.reward:.2f}",
            roles_of(calls),
            f"{calls[0].prompt_tok}-{calls[-1].prompt_tok}" if calls else "",
            str(sum(c.completion_tok for c in calls)),
            str(leaves_of(calls)),
            f"{mean_logprob(calls):.3f}",
            f"{record.timings_s['total']:.1f}",
        )
    display.console.print(table)


def roles_of(calls: Sequence[CallRecord]) -> str:
    return ", ".join(f"{n} {role}" for role, n in Counter(str(c.role) for c in calls).items())


def leaves_of(calls: Sequence[CallRecord]) -> int:
    """Calls that no later call extends."""
    tree = build_tree(calls)
    return len(calls) - len({i for through in tree.extends for i in through})


def mean_logprob(calls: Sequence[CallRecord]) -> float:
    """Of the main agent's sampled tokens, as the engine scored them."""
    own = [c for c in calls if c.role is Role.MAIN]
    count = sum(c.completion_tok for c in own)
    return sum(float(c.completion.logprobs.sum()) for c in own) / count if count else 0.0


def say_lesson(display: Display, lesson: Lesson) -> None:
    seconds = ", ".join(f"{name} {s:.1f} s" for name, s in lesson.seconds.items())
    display.say(
        f"{lesson.updates} GRPO updates on {lesson.trained_tok} sampled tokens in "
        f"{lesson.rows} row(s) of {lesson.row_tok} ({lesson.tree_tok} tokens after "
        f"sharing, {lesson.linear_tok} call by call)\n"
        f"gradient norm {lesson.grad_norm:.3g}, engine-trainer gap {lesson.logprob_gap_max:.1e}\n"
        f"log-prob per token: successful turns {lesson.good_logprob_change:+.4f}, failed turns "
        f"{lesson.bad_logprob_change:+.4f}\n"
        f"tokens not trained: {lesson.dropped_tok or 'none'}\n{seconds}"
    )
