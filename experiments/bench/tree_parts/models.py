"""The two models that the step is timed with, and what arithmetic says of the published ones.

- `tiny`: the shipped base's sizes: a mixture, narrow, so that attention is most of a step, as it is
  for Qwen3-30B-A3B at 20,000 tokens.
- `wide`: dense with the proportions of Qwen3-32B (query width 1.6, MLP 5 times the hidden size, one
  key-value head in four or eight, a small output head). At a sixteenth of the tokens attention has
  the share of the products that it has in Qwen3-32B at all of them.
Operations are `compiled.ideal`'s; of live blocks all token pairs, since blocks are computed whole.
Not here: running them (`ours`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from clawgym_jax.assemble import model_folder
from clawgym_jax.compiled import ideal
from clawgym_jax.config import TINY_BASE
from clawgym_jax.model import hf_weights
from clawgym_jax.model.config import QWEN3_32B, Qwen3Config
from experiments.bench.tree_parts.forms import BLOCK

LONGEST_TOK = 65_536


@dataclass(frozen=True)
class Sized:
    """A model of the table. thin: of a recorded group it gets every thin-th token."""

    name: str
    config: Qwen3Config
    thin: int
    forks_tok: int


@dataclass(frozen=True)
class Work:
    """What one form of a group asks of a model."""

    tokens: int
    trained: int
    live: int  # pairs of blocks


def tiny() -> Sized:
    """The weights of the shipped base know 1,024 positions; they are rotary, so any number does."""
    small = hf_weights.read_config(model_folder(TINY_BASE))
    return Sized("tiny", dataclasses.replace(small, max_position_embeddings=LONGEST_TOK), 8, 4096)


def wide() -> Sized:
    config = QWEN3_32B.replace(
        vocab_size=256,
        hidden_size=320,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        intermediate_size=1600,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        max_position_embeddings=LONGEST_TOK,
    )
    return Sized("wide", config, 16, 2048)


def expected(config: Qwen3Config, tree: Work, paths: Work) -> tuple[float, float]:
    """-> (attention's share of the tree's step, (paths / tree) / sharing), by operations alone."""
    of_tree, of_paths = (
        ideal.forward_flops(config, work.tokens, work.trained, work.live * BLOCK**2)
        for work in (tree, paths)
    )
    ratio = of_paths.total / of_tree.total / (paths.tokens / tree.tokens)
    return of_tree.attention / of_tree.total, ratio
