"""Mix-harness GRPO from a shipped tiny base model, on a laptop.

Claim     an agent of 0.6 M parameters learns through two opaque harness programs at once
Command   make quickstart  (python launch/train.py --experiment=experiments/quickstart.py ...)
Hardware  2 CPU cores, no accelerator, no Docker; under 10 minutes
Expected  held-out pass@1 at temperature 1 at least 0.30 above the cold start and at least 0.85,
          for each harness; our numbers: RESULTS.md
"""

from __future__ import annotations

import dataclasses

from experiments.base import TINY

CONFIG = dataclasses.replace(TINY, name="quickstart")
