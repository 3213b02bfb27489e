"""Leads the process in which torch runs (`padded_torch`): one for each group of rollouts.

Invariant: of the variants of a step the fastest is the one that is compared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.serving_parts.lines import Worker

SCRIPT = Path(__file__).parent / "padded_torch.py"
EXPERTS, THREADS = ("grouped_mm", "eager"), (1, 2)
Row = dict[str, Any]


class Torch:
    """The worker of one group. Use as a context manager."""

    def __init__(
        self, python: Path, model: str, data: dict[str, np.ndarray], row_tok: int, mixture: bool
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = str(Path(self._folder.name) / "paths.npz")
        np.savez(file, **data)
        self._worker = Worker([str(python), str(SCRIPT), model])
        self.versions = self._worker.ready()
        self.padded_tok = self._worker.ask(do="read", file=file, batch_tok=row_tok)["padded_tok"]
        variants = [(e, t) for e in (EXPERTS if mixture else ("",)) for t in THREADS]
        tried = [self._step(*variant) for variant in variants]
        self.mib = tried[0]["mib"]
        self.variant = min(zip((step["seconds"] for step in tried), variants, strict=True))[1]

    def _step(self, experts: str, threads: int, masked: bool = False) -> Row:
        return self._worker.ask(do="step", experts=experts, threads=threads, masked=masked)

    def step(self, masked: bool = False) -> Row:
        return self._step(*self.variant, masked)

    def embedding(self) -> np.ndarray:
        """f32[V, D], the gradient of the last step."""
        file = str(Path(self._folder.name) / "gradient.npy")
        self._worker.ask(do="save", file=file)
        return np.asarray(np.load(file))

    def facts(self, loss: float, gradient: np.ndarray) -> Row:
        """What it is, and how far its loss and the embedding's gradient are from ours."""
        answer = self.step()
        apart = np.linalg.norm(self.embedding() - gradient) / np.linalg.norm(gradient)
        return {
            "torch_padded_tok": self.padded_tok,
            "torch_variant": self.variant,
            "torch_mib": self.mib,
            "torch_loss_apart": abs(answer["loss"] - loss),
            "torch_embedding_gradient_apart": float(apart),
            "torch_versions": self.versions,
        }

    def __enter__(self) -> Torch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._worker.close()
        self._folder.cleanup()
