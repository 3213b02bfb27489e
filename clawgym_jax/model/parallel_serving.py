"""What one chip's program does together with the others when a host serves: the same seams.

A host's chips are a mesh (expert, tensor): heads lie over `tensor`, experts and vocabulary
over both. Every chip sees every token; each adds its share, and one sum a sublayer joins them. No
chip needs room for more rows than there are, so nothing can overflow here.

Invariant: static and hashable; hidden states are the same on all chips.
Not here: which array lies where (`sharding.SERVING`), the programs (`serving.engine`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model import expert_parallel, grouped, moe
from clawgym_jax.model.sharding import EXPERT, TENSOR, make_serving_mesh

_BOTH = (EXPERT, TENSOR)
FEW_TOKENS = 64  # up to so many, all experts on all tokens: bound by reading weights, read once


@dataclass(frozen=True)
class ServingMeshConfig:
    """The chips of a host that serve. The default, no mesh, is one device."""

    expert: int = 0  # 0 = no mesh; else chips over which only experts and vocabulary lie
    tensor: int = 1  # at most the number of key-value heads

    def __post_init__(self) -> None:
        if self.expert < 0 or self.tensor < 1:
            raise ConfigError(
                "serving_mesh: expected expert >= 0 and tensor >= 1, got "
                f"{self.expert} and {self.tensor}"
            )


@dataclass(frozen=True)
class ServingParallel:
    """A host's chips, and how they multiply groups of rows."""

    mesh: Mesh
    gmm: grouped.Kind = "blocked"

    @classmethod
    def make(
        cls, config: ServingMeshConfig, devices: Sequence[Any] | None = None
    ) -> "ServingParallel | None":
        """For `devices` (default this process's); None where the configuration has no mesh."""
        if not config.expert:
            return None
        mesh = make_serving_mesh(config.expert, config.tensor, devices)
        return cls(mesh, grouped.kind_for(mesh.devices.flat[0].platform))

    def whole(self, name: str, weight: jax.Array) -> jax.Array:
        """A weight as a chip computes with it: its shard."""
        return weight

    def mine(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """This chip's tokens: all of them."""
        return x

    def joined(self, x: jax.Array) -> jax.Array:
        """The result of a product whose inner axis lies over `tensor`."""
        total: jax.Array = jax.lax.psum(x, TENSOR)
        return total

    def look_up(self, table: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """dtype[B, N, D] for i32[B, N]; table f[V / chips, D]."""
        index = tokens - jax.lax.axis_index(_BOTH) * table.shape[0]
        found = table[jnp.clip(index, 0, table.shape[0] - 1)].astype(dtype)
        known = (index >= 0) & (index < table.shape[0])
        total: jax.Array = jax.lax.psum(jnp.where(known[..., None], found, 0), _BOTH)
        return total

    def experts(
        self, x: jax.Array, params: moe.Experts, weights: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """f[T, D] for x f[T, D], and 0: every row has room."""
        own = params.gate.shape[0]
        first = jax.lax.axis_index(_BOTH) * own
        if x.shape[0] <= FEW_TOKENS:
            part = moe.all_of_them(x, params, weights.astype(x.dtype), chosen - first)
            return jax.lax.psum(part, _BOTH), jnp.zeros((), jnp.int32)
        part, overflow = expert_parallel.own_part(
            x, params, weights.astype(x.dtype), chosen, first, chosen.size, self.gmm
        )
        return jax.lax.psum(part, _BOTH), overflow

    def all_logits(self, logits: jax.Array) -> jax.Array:
        """f32[..., V] from this chip's f32[..., V / chips]."""
        whole: jax.Array = jax.lax.all_gather(logits, _BOTH, axis=logits.ndim - 1, tiled=True)
        return whole
