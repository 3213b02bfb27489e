"""What one chip's program does together with the others: the model's seams on a training mesh.

With a `Parallel` in it the model is the program of one chip, to be run under `shard_map`:
parameters are this chip's shards, activations its tokens of a row, and every collective is written
out here or in `expert_parallel` and `logprobs`. Without one (None, the default) it is the program
of one device, and nothing here is called.

Gradients are taken inside the program, of the sum over chips of what each chip returns. So a value
that all chips of `x` hold alike must enter the loss with a factor 1/x (`train.mesh` does that), and
each collective's transpose is the textbook one: gather and scatter-add, all-to-all and its inverse,
psum and psum.

Invariant: static and hashable; two equal objects make one compilation.
Not here: which array lies where (`sharding`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.model import collectives, expert_parallel, grouped, moe, sharding
from clawgym_jax.model.sharding import FSDP, KEPT, PARAMETERS, TRAINING, X

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q, k, v -> out


@dataclass(frozen=True)
class MeshConfig:
    """The training mesh. The default, no mesh, is one device."""

    fsdp: int = 0  # 0 = no mesh; else chips over which rows lie
    x: int = 1  # chips of one row: its tokens, heads, experts and vocabulary
    experts: expert_parallel.Form = "all_gather"  # "ragged" moves less; on v4, v5p, v6e
    expert_buffer: float = 2.0  # rows an expert chip has room for; 1 = an even spread

    def __post_init__(self) -> None:
        if self.fsdp < 0 or self.x < 1 or self.expert_buffer < 1:
            raise ConfigError(
                "mesh: expected fsdp >= 0, x >= 1 and expert_buffer >= 1, got "
                f"{self.fsdp}, {self.x} and {self.expert_buffer}"
            )


@dataclass(frozen=True)
class Parallel:
    """The mesh and how its chips share the work."""

    mesh: Mesh
    experts_by: expert_parallel.Form = "all_gather"
    expert_buffer: float = 2.0
    gmm: grouped.Kind = "blocked"
    native: bool = False  # the platform has a ragged all-to-all

    @classmethod
    def make(cls, config: MeshConfig, devices: Sequence[Any] | None = None) -> "Parallel | None":
        """For `devices` (default all there are); None where the configuration has no mesh."""
        if not config.fsdp:
            return None
        mesh = sharding.make_mesh(config.fsdp, config.x, devices)
        platform = mesh.devices.flat[0].platform
        return cls(
            mesh,
            config.experts,
            config.expert_buffer,
            grouped.kind_for(platform),
            native=platform == "tpu",
        )

    def whole(self, name: str, weight: jax.Array) -> jax.Array:
        """A layer's weight (or a top one) as a chip computes with it, from this chip's shard."""
        axes = PARAMETERS[name]
        for number, axis in enumerate(axes[len(axes) - weight.ndim :]):
            for over in TRAINING.get(axis, ()) if axis not in KEPT else ():
                weight = jax.lax.all_gather(weight, over, axis=number, tiled=True)
        return weight

    def mine(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """This chip's tokens of an array over whole rows."""
        count = self.mesh.shape[X]
        if x.shape[axis] % count:
            raise ConfigError(
                f"mesh: rows of {x.shape[axis]} tokens do not divide by x={count}; "
                "choose batch.pack.row_tok as a multiple"
            )
        size = x.shape[axis] // count
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(X) * size, size, axis)

    def joined(self, x: jax.Array) -> jax.Array:
        """The result of a product: complete, since a chip's weights were gathered."""
        return x

    def look_up(self, table: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """dtype[B, N / X, D] for whole rows i32[B, N]; table f[V / X, D / FSDP], a shard.

        Every chip looks up what its part of the vocabulary has; one of them does for each token.
        """
        table = self.whole("embed", table.astype(dtype))
        table = table.astype(jnp.promote_types(dtype, jnp.float32))  # its gradient is a long sum
        index = tokens - jax.lax.axis_index(X) * table.shape[0]
        found = table[jnp.clip(index, 0, table.shape[0] - 1)].astype(dtype)
        known = (index >= 0) & (index < table.shape[0])
        found = jnp.where(known[..., None], found, 0)
        return collectives.scatter_sum(found, X, axis=1)

    def over_heads(self, attention: Attention) -> Attention:
        """`attention` on whole rows, each chip with its own heads, for chips with own tokens."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out = attention(self._heads(q), self._heads(k), self._heads(v))
            return _switch(out, split=1, join=2)

        return attend

    def _heads(self, x: jax.Array) -> jax.Array:
        """f[B, N, H / X, hd] from f[B, N / X, H, hd]; fewer heads than chips are repeated."""
        repeats = -(-self.mesh.shape[X] // x.shape[2])
        if repeats > 1:
            x = jnp.repeat(x, repeats, axis=2)
        return _switch(x, split=2, join=1)

    def experts(
        self, x: jax.Array, params: moe.Experts, weights: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`expert_parallel.experts` with this mesh's choices."""
        return expert_parallel.experts(
            x, params, weights, chosen,
            X, self.experts_by, self.expert_buffer, self.gmm, self.native,
        )  # fmt: skip

    @property
    def size(self) -> dict[str, int]:
        return {FSDP: self.mesh.shape[FSDP], X: self.mesh.shape[X]}


def _switch(x: jax.Array, split: int, join: int) -> jax.Array:
    """Cuts axis `split` over the chips of a row and puts axis `join` together."""
    out: jax.Array = jax.lax.all_to_all(x, X, split_axis=split, concat_axis=join, tiled=True)
    return out
