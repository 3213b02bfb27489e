"""The two models that the step is timed with, and what arithmetic says of the published ones.

- `tiny`: the shipped base's sizes: a mixture, narrow, so that attention is most of a step, as it is
  for Qwen3-30B-A3B at 20,000 tokens.
- `wide`: dense with the proportions of Qwen3-32B (query width 1.6, MLP 5 times the hidden size, one
  key-value head in four or eight, a small output head). At a sixteenth of the tokens attention has
  the share of the products that it has in Qwen3-32B at all of them.
Products of a step, forward and backward, per token: 6 for each parameter of its layers, 6 for each
of the output head where a token is trained; 14 x query width per layer for each pair of tokens in
live blocks (2 products forward, 5 backward, 2 operations each).
Not here: running them (`ours`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from clawgym_jax.assemble import model_folder
from clawgym_jax.config import TINY_BASE
from clawgym_jax.model import hf_weights
from clawgym_jax.model.config import Qwen3Config

LONGEST_TOK = 65_536
BLOCK = 64


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
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=320,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        intermediate_size=1600,
        max_position_embeddings=LONGEST_TOK,
    )
    return Sized("wide", config, 16, 2048)


def products(config: Qwen3Config, work: Work) -> tuple[float, float, float]:
    """Operations of (layers without attention, output head, attention)."""
    head = config.vocab_size * config.hidden_size
    tables = head if config.tie_word_embeddings else 2 * head
    layers = config.num_active_parameters - tables
    pair = 14 * config.num_layers * config.num_heads * config.head_dim
    return 6.0 * layers * work.tokens, 6.0 * head * work.trained, float(pair) * work.live * BLOCK**2


def expected(config: Qwen3Config, tree: Work, paths: Work) -> tuple[float, float]:
    """-> (attention's share of the tree's step, (paths / tree) / sharing), by operations alone."""
    of_tree, of_paths = products(config, tree), products(config, paths)
    ratio = sum(of_paths) / sum(of_tree) / (paths.tokens / tree.tokens)
    return of_tree[2] / sum(of_tree), ratio
