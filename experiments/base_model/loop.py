"""The training loop of the tiny base model: curriculum, checks, checkpoints, a log of skills.

Invariant: `elapsed_s` counts training only (neither measuring skills nor saving), so a run that
is bounded by time and resumed has the learning-rate schedule of one that was not interrupted.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from clawgym_jax.model import config as model_config
from experiments.base_model import documents, initialise, optimizer, skills, stream, training


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long and from where; the recipe itself is in `training`, `stream`, `optimizer`."""

    workdir: pathlib.Path
    minutes: float
    steps: int  # 0: bounded by minutes
    seed: int
    resume: bool
    check_every: int = 20  # steps between checks of repetition
    save_every_s: float = 120.0


@dataclasses.dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    stage: int = 0
    elapsed_s: float = 0.0

    def share(self, settings: Settings) -> float:
        """Part of the run that is done."""
        if settings.steps:
            return self.step / settings.steps
        return self.elapsed_s / (60.0 * settings.minutes)


class Run:
    """State of one run: parameters, optimiser, progress and the stream of rows."""

    def __init__(self, settings: Settings, tokenizer: tokenizers.Tokenizer) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.graphdef, params = initialise.initialise(model_config.TINY, settings.seed)
        transform = optimizer.transform(params)
        self.state = (params, transform.init(params))
        self.progress = Progress()
        self.checkpoint = settings.workdir / "state.npz"
        if settings.resume and self.checkpoint.exists():
            self.state, stored = training.load(self.checkpoint, self.state)
            self.progress = Progress(
                step=int(stored["step"]),
                tokens=int(stored["tokens"]),
                stage=int(stored["stage"]),
                elapsed_s=stored["elapsed_s"],
            )
        self._step = training.make_step(self.graphdef, transform)
        self._predict = training.make_predict(self.graphdef)

    @property
    def params(self) -> nnx.State:
        return self.state[0]

    def train(self) -> None:
        """Runs until the time or the steps are used up."""
        rows: Iterator[tuple[np.ndarray, np.ndarray]] | None = None
        saved = time.monotonic()
        while self.progress.share(self.settings) < 1.0:
            rows = rows or self._rows()
            started = time.monotonic()
            metrics = self._one(*next(rows))
            if self.progress.step % self.settings.check_every == 0:
                metrics = {k: float(v) for k, v in metrics.items()}  # waits for the device
            self.progress.elapsed_s += time.monotonic() - started
            if self.progress.step % self.settings.check_every == 0 and self._advance(metrics):
                rows = None
            if time.monotonic() - saved > self.settings.save_every_s:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Writes the checkpoint and one line of measured skills."""
        counters = dataclasses.asdict(self.progress)
        training.save(self.checkpoint, self.state, counters)
        line = json.dumps(counters | self.skills(skills.BATCH))
        print(line, flush=True)
        with (self.settings.workdir / "skills.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def skills(
        self, rows: int, which: tuple[skills.Skill, ...] = skills.SKILLS
    ) -> dict[str, float]:
        """Exact-match rates over held-out names."""
        found = skills.measure(
            lambda tokens: self._predict(self.params, tokens), self.tokenizer, rows, which
        )
        return {name: round(rate, 3) for name, rate in found.items()}

    def _rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        length, count, repeats, _ = training.STAGES[self.progress.stage]
        seed, start = self.settings.seed, self.progress.step
        return stream.batches(self.tokenizer, seed, count, length, repeats, start)

    def _one(self, tokens: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
        factor = jnp.float32(optimizer.decay(self.progress.share(self.settings)))
        params, opt_state, metrics = self._step(*self.state, tokens, weights, factor)
        self.state = (params, opt_state)
        self.progress.step += 1
        self.progress.tokens += tokens.shape[0] * (tokens.shape[1] - 1)
        return metrics

    def _advance(self, metrics: dict[str, Any]) -> bool:
        """Logs, and moves to longer rows once repetition works at this length."""
        last = len(training.STAGES) - 1
        length, _, _, enough = training.STAGES[self.progress.stage]
        check = skills.Skill("copy_repeat", documents.repeat, length, length)
        repeat = self.skills(skills.BATCH, (check,))["copy_repeat"]
        counters = dataclasses.asdict(self.progress)
        print(json.dumps(counters | {"length": length, "repeat": repeat} | metrics), flush=True)
        if self.progress.stage == last:
            return False
        if self.progress.share(self.settings) >= 0.5:
            self.progress.stage = last
        elif repeat >= enough:
            self.progress.stage += 1
        else:
            return False
        return True
