"""The shipped tiny model behind the proxy, with room for a real harness's prompt.

    python launch/serve.py --workdir=runs/serve                   # this file is the default
    python launch/serve.py --workdir=runs/serve --model=PATH      # a Hugging Face folder of Qwen3

Claims nothing about what it says: 0.6 M parameters talk nonsense to Claude Code. It shows that a
program speaks with the proxy, and records what it sends. On a laptop's CPU; 0.5 GB.
"""

from __future__ import annotations

import dataclasses

from clawgym_jax.config import ExperimentConfig
from clawgym_jax.rollout.episode import Limits
from clawgym_jax.serving.engine import EngineConfig
from experiments.base import TINY

WINDOW_TOK = 65536

CONFIG: ExperimentConfig = dataclasses.replace(
    TINY,
    name="serve",
    engine=EngineConfig(
        slots=3,
        window_tok=WINDOW_TOK,
        prefill_batch=1,
        prefill_chunks=(128, 512, 2048),
        decode_rows=(1,),
        kv_buckets=(1024, 4096, 16384),
    ),
    rollout=dataclasses.replace(TINY.rollout, limits=Limits(window_tok=WINDOW_TOK, max_tok=512)),
)
