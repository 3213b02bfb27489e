"""One program, compiled and counted: what `launch/compile_check.py` prints.

Numbers are of one chip in one run. Invariant: a program with a kernel whose work is unknown has no
number of FLOPs (HloError), never too small a one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym_jax.compiled.dump import compile_and_read
from clawgym_jax.compiled.flops import count_flops
from clawgym_jax.compiled.hbm import moved_bytes
from clawgym_jax.compiled.hlo import HloError
from clawgym_jax.compiled.memory import Buffer, Peak, largest_buffers, peak_of
from clawgym_jax.compiled.traffic import Transfer, bytes_by_kind, transfers


@dataclass(frozen=True, slots=True)
class Findings:
    """What the compiler made of one program."""

    name: str
    compile_s: float
    peak: Peak
    buffers: list[Buffer]
    flops: int
    by_source: dict[str, int]  # op_name -> FLOPs, largest first
    moves: list[Transfer]
    hbm_bytes: int  # to and from the chip's large memory, an upper estimate

    @property
    def received(self) -> dict[str, int]:
        """Bytes by kind of collective."""
        return bytes_by_kind(self.moves)

    def flops_of(self, part: str) -> int:
        """FLOPs of the sources whose name holds `part`."""
        return sum(flops for source, flops in self.by_source.items() if part in source)


def examine(
    name: str,
    lowered: Any,
    devices: int,
    dump: Path,
    shares: Mapping[str, float],
    bounds: Mapping[str, int] | None = None,
) -> Findings:
    """Compiles a `jax.stages.Lowered` with its dump in the new or empty folder `dump`.

    compile_s in the result includes reading what was dumped.
    """
    start_s = time.perf_counter()
    compiled, module = compile_and_read(name, lowered, dump)
    compile_s = time.perf_counter() - start_s
    counted = count_flops(module, shares, bounds)
    if counted.uncounted:
        raise HloError(
            f"{name}: kernels that do not state their cost: {', '.join(counted.uncounted)}; give "
            "their pallas_call a CostEstimate"
        )
    return Findings(
        name=name,
        compile_s=compile_s,
        peak=peak_of(compiled),
        buffers=largest_buffers(dump),
        flops=counted.total,
        by_source=dict(sorted(counted.by_source.items(), key=lambda item: -item[1])),
        moves=transfers(module, devices, bounds),
        hbm_bytes=moved_bytes(module, bounds),
    )
