"""Mix-harness GRPO: one policy, one batch, several harnesses; baselines per (task, harness).

Claim     ClawGym II, mix-harness runs: training through several harnesses at once matches or
          slightly beats training through each alone
Command   python launch/train.py --experiment=experiments/mix_grpo.py --workdir=RUN
          paper's scale: --override=scale=paper --override=model.path=FOLDER
          --override=tasks.root=TRAIN --override=tasks.heldout_root=BENCH
Hardware  2 CPU cores, under 10 minutes; at the paper's scale a TPU v5p-64 slice: 64 chips, mesh
          8 x 8, 524,288 packed tokens in one pass
Expected  as the quickstart; at the paper's scale its figures for mix runs (32 instances x 8
          rollouts, from the base model, 64K context), which we have not run

Public in the paper: 32 x 8, 64K context, 200-400 steps, no cold start. From ClawGym I's released
settings: learning rate, betas, clips, temperature, token mean, one update per batch. Ours: mesh,
packing, the cap of the rollout correction.
"""

from __future__ import annotations

import dataclasses

from experiments.base import PAPER_30B, TINY

CONFIG = dataclasses.replace(TINY, name="mix_grpo")
PAPER = dataclasses.replace(PAPER_30B, name="mix_grpo_paper")
