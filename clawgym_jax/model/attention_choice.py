"""One name in a configuration, one attention function: the three forms of tree attention.

| name | what runs | for |
|---|---|---|
| dense | the N x N oracle | tests, short rows |
| blocked | flash attention in plain XLA | CPUs, GPUs |
| pallas | TPU kernels | TPUs, and compiling for them anywhere |
| pallas_interpret | the same kernels, interpreted | tests of programs that hold them |
| auto | pallas on a TPU, else blocked | the default |

Invariant: all compute the same function of (q, k, v, end), gradients included.
Not here: the attentions themselves.
"""

import functools
from collections.abc import Callable

import jax

from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.tree_attention import tree_attention
from clawgym_jax.model.tree_attention_tpu import Tiling, pallas_tree_attention

TreeAttention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array],  # q f[B,N,H,hd], k, v f[B,N,KV,hd], end i32[B,N]
    jax.Array,  # f[B, N, H, hd]
]
AUTO = "auto"
NAMES = (AUTO, "dense", "blocked", "pallas", "pallas_interpret")


def choose_attention(name: str, tiling: Tiling = Tiling()) -> TreeAttention:  # noqa: B008
    """The attention of that name; `tiling` is the kernels' and means nothing to the others."""
    if name == AUTO:
        name = "pallas" if jax.default_backend() == "tpu" else "blocked"
    if name == "dense":
        return dense_tree_attention
    if name == "blocked":
        return tree_attention
    if name in ("pallas", "pallas_interpret"):
        interpret = name == "pallas_interpret"
        return functools.partial(pallas_tree_attention, tiling=tiling, interpret=interpret)
    raise ValueError(f"attention: expected one of {', '.join(NAMES)}, got {name!r}")
