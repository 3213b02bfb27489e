"""What the experiments start from: the paper's public settings, and ours where it gives none.

An experiment file is a small difference to one of these: `CONFIG` to `TINY`, which runs here, and
`PAPER` (--override=scale=paper) to `PAPER_30B`. ours = not public in the paper.
"""

from __future__ import annotations

from clawgym_jax.batch.config import TOKEN_MEAN, BatchConfig
from clawgym_jax.config import ExperimentConfig, ModelSource, TaskSource
from clawgym_jax.model.parallel import MeshConfig
from clawgym_jax.model.parallel_serving import ServingMeshConfig
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.rollout.episode import Limits
from clawgym_jax.rollout.scheduler import RolloutConfig
from clawgym_jax.serving.engine import EngineConfig
from clawgym_jax.train.learner import ReinforceConfig
from clawgym_jax.train.loop import LoopConfig
from clawgym_jax.train.policy import LossConfig
from clawgym_jax.train.sft import ColdStartConfig
from clawgym_jax.train.state import OptimConfig
from clawgym_jax.tree.pack import PackConfig

TINY = ExperimentConfig(
    name="tiny",
    sandbox="auto",
    harnesses=("tiny_chat", "tiny_shell"),
    model=ModelSource(micro_rows=1),
    tasks=TaskSource(kind="toy", train=4096, heldout=128),
    engine=EngineConfig(
        slots=32,
        window_tok=768,
        prefill_batch=1,  # a CPU computes all rows of a batch, also those where nobody waits
        prefill_chunks=(32, 64, 128, 384),
        kv_buckets=(256, 384, 512),
    ),
    rollout=RolloutConfig(
        concurrency=32,
        limits=Limits(episode_s=60.0, window_tok=768, max_tok=96),
        proxy=ProxyConfig(settle_interval_s=0.001),
    ),
    batch=BatchConfig(pack=PackConfig(row_tok=2048, train_tok=1024), weighting=TOKEN_MEAN),
    loss=LossConfig(clip_low=0.2, clip_high=0.28),
    optim=OptimConfig(
        learning_rate=2e-4, decay_steps=112, b1=0.9, b2=0.99, weight_decay=0.0, grad_clip=0.2
    ),
    cold_start=ColdStartConfig(
        demonstrations=192,
        updates=100,
        rollouts_per_update=32,
        min_reward=0.0,  # all of it, mistakes too: the demonstrator is imperfect
        optim=OptimConfig(
            learning_rate=5e-4, warmup_steps=10, decay_steps=100, b2=0.99, weight_decay=0.0
        ),
    ),
    loop=LoopConfig(
        steps=28,
        instances=16,
        group_size=8,
        temperature=1.0,
        reinforce=ReinforceConfig(minibatches=4),
    ),
)

# Qwen3-30B-A3B on 64 chips of a TPU v5p. One pass is 8 rows of 64K tokens, one for each fsdp group:
# 8 chips share a row's tokens, heads, experts and vocabulary (model.sharding).
PAPER_30B = ExperimentConfig(
    name="paper_30b",
    sandbox="docker",
    harnesses=("openclaw", "claude_code"),
    model=ModelSource(
        path="Qwen3-30B-A3B",  # a local folder of the released weights
        dtype="bfloat16",
        remat="products",
        micro_rows=8,
    ),
    driver="jetstream",
    serving_mesh=ServingMeshConfig(expert=1, tensor=4),  # ours: the four chips of a host
    mesh=MeshConfig(fsdp=8, x=8, experts="ragged", expert_buffer=2.0),  # ours
    tasks=TaskSource(kind="clawgym", train=2000, heldout=200),
    engine=EngineConfig(
        slots=20,  # a host's share of the 256 rollouts of a step, on 16 hosts, is 16
        window_tok=65_536,
        prefill_batch=1,
        prefill_chunks=(256, 2048),
        room_slots=(12, 6, 2),  # ours: most contexts are short; half of what 64K each would take
        room_tok=(16_384, 32_768, 65_536),
        cache_tok=262_144,  # ours: prefixes of episodes that wait for their tools
        page_tok=256,
        prefill_budget_tok=8192,  # ours: between two decode steps
    ),
    rollout=RolloutConfig(
        concurrency=256,  # ours
        limits=Limits(episode_s=900.0, window_tok=65_536, max_tok=8192),
    ),
    batch=BatchConfig(
        pack=PackConfig(row_tok=65_536, train_tok=32_768),  # ours: slots for half of a row
        weighting=TOKEN_MEAN,
    ),
    loss=LossConfig(
        clip_low=0.2,
        clip_high=0.28,
        attention="pallas",
        logit_chunk=2048,
    ),
    optim=OptimConfig(learning_rate=1e-6, b1=0.9, b2=0.98, weight_decay=0.1, grad_clip=1.0),
    loop=LoopConfig(
        steps=200,
        instances=32,
        group_size=8,
        temperature=0.7,
        checkpoint_every=10,
        reinforce=ReinforceConfig(
            minibatches=1,
            max_logprob_gap=0.0,  # bfloat16 engines differ: reported, not refused
        ),
    ),
)
