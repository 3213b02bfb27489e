"""Muon for matrices, Adam for embeddings, norms and router; constant, then a linear decay.

The learning rate of a step is an argument of `transform`'s scale rather than a schedule of
steps, because training is bounded by time: `decay(progress)` maps the share of the time spent
to a factor.
"""

from typing import Any

import jax
import optax
from optax import contrib

MUON_LR = 0.02
EMBED_LR = 0.002
SMALL_LR = 0.005  # norms and router
DECAY_FROM = 0.6
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def transform(params: Any) -> optax.GradientTransformation:
    """Updates at full learning rate; multiply them by `decay(progress)`."""
    labels = jax.tree_util.tree_map_with_path(lambda path, _: _label(path), params)

    def axes(tree: Any) -> Any:  # leading axes (layer, expert) are a batch of matrices
        return jax.tree.map(lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), tree)

    muon = contrib.scale_by_muon(beta=0.95, weight_dimension_numbers=axes)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "matrix": optax.chain(muon, optax.scale(-MUON_LR)),
                "embed": optax.adam(EMBED_LR, b1=0.9, b2=0.99),
                "small": optax.adam(SMALL_LR, b1=0.9, b2=0.99),
            },
            labels,
        ),
    )


def decay(progress: float) -> float:
    """1 until `DECAY_FROM` of the run, then linearly to 0."""
    return min(1.0, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def _label(path: tuple[Any, ...]) -> str:
    names = {str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path}
    if "embed" in names:
        return "embed"
    return "matrix" if names & set(MATRICES) else "small"
