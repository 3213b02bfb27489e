"""Mix-harness PPO: as mix_grpo, with a value model in place of groups.

Claim     ClawGym II, figures of PPO against GRPO: both are stable and end alike
Command   python launch/train.py --experiment=experiments/mix_ppo.py --workdir=RUN
          paper's scale: --override=scale=paper --override=model.path=FOLDER
          --override=tasks.root=TRAIN --override=tasks.heldout_root=BENCH
Hardware  2 CPU cores, about 15 minutes; at the paper's scale a TPU v5p-64 slice
Expected  held-out pass@1 rises in both harnesses; our numbers: RESULTS.md. The paper's scale (256
          instances x 1 rollout) we have not run

Public in the paper: 256 x 1, gamma = lambda = 1, (V - R)^2, a value model that is pretrained. Ours:
how long it is pretrained (by steps that leave the policy alone), its learning rate, its epochs.
"""

from __future__ import annotations

import dataclasses

from clawgym_jax.batch.config import PPO
from clawgym_jax.train.critic import CriticConfig
from clawgym_jax.train.state import OptimConfig
from experiments.base import PAPER_30B, TINY

CONFIG = dataclasses.replace(
    TINY,
    name="mix_ppo",
    batch=dataclasses.replace(TINY.batch, algorithm=PPO, whiten_advantages=True),
    critic=CriticConfig(
        pretrain_steps=2,
        epochs=2,
        optim=OptimConfig(learning_rate=5e-4, b2=0.99, weight_decay=0.0, grad_clip=1.0),
    ),
    loop=dataclasses.replace(TINY.loop, instances=128, group_size=1),
)
PAPER = dataclasses.replace(
    PAPER_30B,
    name="mix_ppo_paper",
    batch=dataclasses.replace(PAPER_30B.batch, algorithm=PPO),
    critic=CriticConfig(
        pretrain_steps=10,
        attention="pallas",
        optim=OptimConfig(learning_rate=1e-5, b2=0.98, weight_decay=0.1, grad_clip=1.0),
    ),
    loop=dataclasses.replace(PAPER_30B.loop, instances=256, group_size=1),
)
