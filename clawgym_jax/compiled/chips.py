"""What a TPU chip can do, as its maker states it, and an estimate of a step from it.

Estimates, not measurements: nothing ran. The lower end of the time lets communication hide behind
computation wholly, the upper end not at all; real steps lie above the lower end.
Source: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of v5e, v5p, v6e.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of chip."""

    name: str
    hbm_bytes: int
    bf16_flops: float  # per second
    hbm_bytes_per_s: float
    ici_bytes_per_s: float  # all links of a chip together, one direction
    host: str  # the topology of one host of a larger slice


CHIPS = {
    "v5e": Chip("v5e", 16 * GIB, 197e12, 819e9, 200e9, "v5e:2x2"),
    "v5p": Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, "v5p:2x2x1"),
    "v6e": Chip("v6e", 32 * GIB, 918e12, 1640e9, 448e9, "v6e:2x2"),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """How long a step may take on one chip. An estimate."""

    compute_s: float
    communication_s: float
    ideal_s: float

    @property
    def step_s(self) -> tuple[float, float]:
        """Everything hidden behind the longer part; nothing hidden."""
        parts = self.compute_s, self.communication_s
        return max(parts), sum(parts)

    @property
    def mfu(self) -> tuple[float, float]:
        """Share of the chip's peak that ideal work would take, lower and upper end."""
        low, high = self.step_s
        return self.ideal_s / high, self.ideal_s / low


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as v5p:4x4x4."""
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(
            f"--topology={topology}: expected CHIP:SHAPE with one of {', '.join(CHIPS)}, "
            "for example v5p:4x4x4"
        )
    return CHIPS[name]


def roofline(chip: Chip, flops: float, ideal_flops: float, received_bytes: float) -> Roofline:
    """All numbers of one chip in one run of the program."""
    return Roofline(
        compute_s=flops / chip.bf16_flops,
        communication_s=received_bytes / chip.ici_bytes_per_s,
        ideal_s=ideal_flops / chip.bf16_flops,
    )
