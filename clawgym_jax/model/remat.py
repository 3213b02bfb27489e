"""What the backward pass computes again, and what the forward pass keeps for it, by name.

| remat | kept of a layer | computed again |
|---|---|---|
| none | everything | nothing |
| products | results of matrix products, attention, sorts | norms, gathers, exchanges |
| attention | attention's output and log-sum-exp | all but attention |
| layers | its input | all |

Per layer and token of Qwen3-30B-A3B in bfloat16 that is, beside the input, 70 KiB (products; two
thirds of it experts' buffers of twice the even size) or 8 KiB (attention).
Invariant: names mean nothing to a program without rematerialisation.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from clawgym_jax.model.attention import LSE, OUT

Remat = Literal["none", "products", "attention", "layers"]
_WORTH = "worth_keeping"
_KEPT = {"products": (OUT, LSE, _WORTH), "attention": (OUT, LSE), "layers": ()}


def worth_keeping(x: jax.Array) -> jax.Array:
    """`x`, marked as dearer to compute again than to keep."""
    marked: jax.Array = checkpoint_name(x, _WORTH)
    return marked


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, to be scanned over, keeping what `remat` says."""
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)  # scan needs no CSE barrier
