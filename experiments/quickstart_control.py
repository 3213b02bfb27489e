"""The quickstart with its rewards dealt out at random: what is learned when there is nothing to.

Claim     the quickstart's gain comes from its rewards: with the same rewards permuted among the
          rollouts of a step, held-out pass@1 rises by less than 0.05
Command   python launch/train.py --experiment=experiments/quickstart_control.py --workdir=RUN
Hardware  2 CPU cores, under 10 minutes
Expected  gain < 0.05 for the mean over harnesses; our numbers: RESULTS.md
"""

from __future__ import annotations

from clawgym_jax.config import override
from experiments.quickstart import CONFIG as QUICKSTART

CONFIG = override(QUICKSTART, ["name=quickstart_control", "loop.reinforce.rewards=permuted"])
