"""Plays the same requests on one device and on meshes; one JSON line a mesh.

python -m tests.serving.mesh_worker "moe 2x2" "dense 1x2 int8" ...      (with 8 CPU devices)
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np

from clawgym_jax.core.types import Completion, SamplingParams, Stop
from clawgym_jax.model import parallel_serving
from clawgym_jax.model.config import TINY
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.model.qwen3 import abstract, init
from clawgym_jax.model.sharding import SERVING, check, make_serving_mesh
from clawgym_jax.serving.engine import Engine, EngineConfig
from clawgym_jax.serving.native_driver import NativeDriver

MOE = TINY.replace(vocab_size=64, hidden_size=32, num_layers=2, tie_word_embeddings=False)
DENSE = MOE.replace(num_experts=0, num_experts_per_tok=0)
CONFIG = EngineConfig(slots=4, window_tok=64, prefill_batch=2, prefill_chunks=(4, 16))
PROMPT = np.random.default_rng(0).integers(0, 64, 20).astype(np.int32)


parallel_serving.FEW_TOKENS = CONFIG.slots  # a step has so many, a prefill more: both forms run


def play(driver: NativeDriver) -> tuple[list[Completion], Completion, int]:
    """Six requests at once, a score, and how much a second turn prefills."""

    async def everything() -> tuple[list[Completion], Completion, int]:
        jobs = [
            driver.sample(f"r{i}", PROMPT[: 5 + 3 * i], SamplingParams(seed=i, max_tok=9), Stop())
            for i in range(6)
        ]
        done = await asyncio.gather(*jobs)
        scored = await driver.score(PROMPT, PROMPT[:7])
        before = driver.stats.prefilled_tok
        again = np.concatenate([PROMPT, done[5].ids, PROMPT[:3]])
        await driver.sample("again", again, SamplingParams(max_tok=2), Stop())
        return done, scored, driver.stats.prefilled_tok - before

    return asyncio.run(everything())


def main() -> None:
    for case in sys.argv[1:]:
        kind, shape, *kept = case.split()
        config = dataclasses.replace(CONFIG, kv_dtype=kept[0]) if kept else CONFIG
        model = MOE if kind == "moe" else DENSE
        expert, tensor = (int(part) for part in shape.split("x"))
        alone_graph, params = init(model, jax.random.key(3))
        params = jax.tree.map(lambda x: 3.0 * x if x.ndim > 2 else x, params)
        mesh = make_serving_mesh(expert, tensor, jax.devices()[: expert * tensor])
        parallel = ServingParallel(mesh)
        graph, shapes = abstract(model, parallel=parallel)
        check(model, shapes, mesh, SERVING)
        one, many = Engine(alone_graph, model, config), Engine(graph, model, config, parallel)
        with NativeDriver(one) as a, NativeDriver(many) as b:
            a.publish(params, 1)
            b.publish(params, 1)
            alone, alone_scored, alone_again = play(a)
            together, scored, again = play(b)
        pairs = list(zip(alone, together, strict=True))
        result = {
            "case": case,
            "same_tokens": all(x.ids.tolist() == y.ids.tolist() for x, y in pairs),
            "logprobs": max(float(np.abs(x.logprobs - y.logprobs).max()) for x, y in pairs),
            "scored": float(np.abs(alone_scored.logprobs - scored.logprobs).max()),
            "prefilled_again": again,
            "prefilled_again_alone": alone_again,
            "prompt_tok": len(PROMPT),
            **shares(many, many.load_params(params)),
        }
        print(json.dumps(result), flush=True)


def shares(engine: Engine, params: Any) -> dict[str, int]:
    """Sizes of one chip's shards."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if "gate" in _names(path):
            found["experts"] = leaf.addressable_shards[0].data.shape[1]
        if "embed" in _names(path):
            found["vocabulary"] = leaf.addressable_shards[0].data.shape[0]
    keys = jax.tree.leaves(engine.init_decode_state().k)  # and their scales, if they have any
    heads = {leaf.addressable_shards[0].data.shape[2] for leaf in keys}
    return found | {"kv_heads": heads.pop(), "kinds": len({leaf.dtype for leaf in keys})}


def _names(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]


if __name__ == "__main__":
    main()
