"""What a person sees while a run works: a bar per stage with its ETA, and a line per step.

On a terminal the bars move; elsewhere (a file, CI) the lines alone tell the story.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SILENCE_S = 20.0


class Display:
    """One per run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
        """Yields a function that moves the bar by one."""
        if not self.console.is_terminal:
            yield self._lines(title, total, done)
            return
        progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        with progress:
            task = progress.add_task(title, total=total, completed=done)
            yield lambda: progress.advance(task)

    def _lines(self, title: str, total: int, done: int) -> Callable[[], None]:
        """The same for a log file: a line where a stage goes on without a word for long."""
        count, said_s = done, time.monotonic()

        def advance() -> None:
            nonlocal count, said_s
            count += 1
            if time.monotonic() - said_s > SILENCE_S:
                said_s = time.monotonic()
                self.say(f"{title}: {count} of {total}")

        return advance


def scores_line(scores: dict[str, dict[str, Any]]) -> str:
    return "  ".join(f"{name} {score['mean']:.3f}" for name, score in scores.items())


def step_line(step: int, steps: int, m: dict[str, Any]) -> str:
    rewards = "  ".join(
        f"{name.removeprefix('reward/')} {value:.2f}"
        for name, value in m.items()
        if name.startswith("reward/")
    )
    critic = f"explained {m['explained_variance']:.2f}  " if "explained_variance" in m else ""
    policy = "no policy update  "
    if "entropy" in m:
        policy = f"entropy {m['entropy']:.3f}  clip {m['clip_share']:.3f}  "
    return (
        f"step {step:3d}/{steps}  reward {m['reward_mean']:.3f} ({rewards})  "
        f"{policy}{critic}{m['step_s']:.1f} s"
    )
