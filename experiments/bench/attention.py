"""Tree attention against what one would do without it, forward and backward.

    python experiments/bench/attention.py [--quick]

A group of K sampled paths shares a trunk. Sharing s = tokens of all paths / tokens of the tree;
with K = 2 s paths the trunk is the share (s - 1) / (K - 1) of the tree's tokens. Side by side:
- tree: the tree once, blocked attention (`model.tree_attention`)
- packed: every path whole, packed one after another in a causal row, the *same* blocked attention
- dense: the tree once, an N x N mask (`model.attention`, the tests' oracle)
- jax: the tree once, jax.nn.dot_product_attention with that mask
Seconds are the best of some turns after the first; memory is what the compiled program needs
beside its arguments and results. `pairs` is the number of (query, key) pairs that see each
other, the least work possible. Only attention is measured: the rest of a model gains the factor s.
"blocks": the tree of sharing 4 with the same work in narrow and in wide heads, each in the blocks
that either is given when none are asked for (`blocks_for`); other sizes for comparison.
The last line is a JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from clawgym_jax.model import live_blocks
from clawgym_jax.model.attention import dense_tree_attention, tree_mask
from clawgym_jax.model.tree_attention import blocks_for, tree_attention

QUICK = flags.DEFINE_bool("quick", False, "shorter rows, fewer repeats: within a minute")
SHARING = (2, 4, 8, 16)
HEADS, KV_HEADS, WIDTH = 4, 2, 64
BLOCK = 64
WIDTHS = (32, 64, 128)
SIZES = ((64, 64), (128, 128), (256, 128), (256, 256))
MIB = 2**20


def jax_attention(q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=tree_mask(end)[:, None])


def blocked(q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    return tree_attention(q, k, v, end, BLOCK, BLOCK)


def shared_tree(tokens: int, sharing: int) -> tuple[np.ndarray, np.ndarray]:
    """`end` of the tree and of its paths packed one after another."""
    paths = 2 * sharing
    branch = tokens * (paths - sharing) // ((paths - 1) * paths)
    trunk = tokens - paths * branch
    branch_ends = trunk + branch * np.arange(1, paths + 1)
    tree = np.concatenate([np.full(trunk, tokens), np.repeat(branch_ends, branch)])
    whole = trunk + branch
    packed = np.repeat(whole * np.arange(1, paths + 1), whole)
    return tree.astype(np.int32), packed.astype(np.int32)


class Program:
    """The output and the three gradients of one attention on one row, compiled."""

    def __init__(
        self, attend: Callable[..., jax.Array], end: np.ndarray, width: int = WIDTH
    ) -> None:
        def results(end: jax.Array, *inputs: jax.Array) -> Any:
            *qkv, upstream = inputs
            out, pull_back = jax.vjp(lambda *x: attend(*x, end), *qkv)
            return out, pull_back(upstream)

        rng = np.random.default_rng(0)
        shapes = [(1, len(end), heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
        self._arguments = jnp.asarray(end[None]), *inputs
        self._compiled = jax.jit(results).lower(*self._arguments).compile()

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self._compiled(*self._arguments))
        return time.perf_counter() - start

    def mib(self) -> float:
        memory = self._compiled.memory_analysis()
        assert memory is not None, "this backend does not say what memory a program needs"
        return float(memory.temp_size_in_bytes) / MIB


def compare(tokens: int, sharing: int, repeats: int) -> dict[str, Any]:
    """One row of the table; the forms take turns, so that a busy machine slows all alike."""
    tree, packed = shared_tree(tokens, sharing)
    programs = {
        "tree": Program(blocked, tree),
        "packed": Program(blocked, packed),
        "dense": Program(dense_tree_attention, tree),
        "jax": Program(jax_attention, tree),
    }
    best = best_seconds(programs, repeats)
    row: dict[str, Any] = {
        "sharing": sharing,
        "tree_tok": len(tree),
        "packed_tok": len(packed),
        "tree_pairs": int(np.sum(tree - np.arange(len(tree)))),
        "packed_pairs": int(np.sum(packed - np.arange(len(packed)))),
        "tree_live": live_share(tree),
        "speedup": round(best["packed"] / best["tree"], 2),
    }
    for name, program in programs.items():
        row[f"{name}_seconds"] = round(best[name], 4)
        row[f"{name}_mib"] = round(program.mib(), 1)
    return row


def best_seconds(programs: dict[str, Program], repeats: int) -> dict[str, float]:
    turns = [{n: p.seconds() for n, p in programs.items()} for _ in range(repeats + 1)]
    return {name: min(turn[name] for turn in turns[1:]) for name in programs}


def blocks_of_sizes(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    tree, _ = shared_tree(tokens, 4)
    for width in WIDTHS:
        programs = {
            f"{bq}x{bk}": Program(
                functools.partial(tree_attention, block_q=bq, block_k=bk), tree, width
            )
            for bq, bk in SIZES
        }
        seconds = {n: round(s, 4) for n, s in best_seconds(programs, repeats).items()}
        chosen = "x".join(map(str, blocks_for(width)))
        yield {"part": "blocks", "width": width, "chosen": chosen, "seconds": seconds}


def live_share(end: np.ndarray) -> float:
    """Seeing pairs / computed pairs: what blocks of this size waste on ragged edges."""
    padding = np.arange(len(end), -(-len(end) // BLOCK) * BLOCK, dtype=np.int32) + 1
    counts = live_blocks.count_pairs(np.concatenate([end, padding]), BLOCK, BLOCK)
    return round(float(counts.token_pairs) / (float(counts.live) * BLOCK**2), 3)


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Half the sharing in speed over packed paths; never slower than a mask, a tenth its memory."""
    out = []
    for row in rows:
        sharing = row["sharing"]
        speed = row["dense_seconds"] / row["tree_seconds"]
        memory = row["dense_mib"] / row["tree_mib"]
        out += [
            goal(f"packed / tree seconds, sharing {sharing}", row["speedup"], sharing / 2),
            goal(f"dense / tree seconds, sharing {sharing}", speed, 1.0),
            goal(f"dense / tree memory, sharing {sharing}", memory, 10.0),
        ]
    return out


def goal(name: str, value: float, at_least: float) -> dict[str, Any]:
    ok = bool(value >= at_least)
    return {"name": name, "value": round(value, 2), "goal": f">= {at_least}", "ok": ok}


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; options are written --name=value")
    tokens, repeats = (1024, 2) if QUICK.value else (4096, 3)
    rows = []
    for sharing in SHARING:
        rows.append(compare(tokens, sharing, repeats))
        print(rows[-1], flush=True)
    blocks = []
    for row in blocks_of_sizes(tokens, repeats):
        blocks.append(row)
        print(row, flush=True)
    machine = {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "backend": jax.default_backend(),
    }
    found = {"rows": rows + blocks, "goals": goals(rows)}
    print(json.dumps({"bench": "attention", "machine": machine, **found}))


if __name__ == "__main__":
    app.run(main)
