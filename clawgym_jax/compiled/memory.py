"""Peak memory of a compiled program on one device, and its largest buffers.

The peak is the compiler's (`memory_analysis`); where it does not say one, arguments + outputs +
temporaries less what outputs share with donated arguments. The buffers come from the compiler's
buffer assignment, which is written when a program is compiled with `xla_dump_to`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VALUE = re.compile(r"^\s*value: <\d+ ([\w.\-]+)[^>]*> \(size=(\d+),offset=(\d+)\): (\S+)")
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*?):?$")


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on one device."""

    arguments: int
    outputs: int
    temporaries: int
    shared: int  # outputs in the place of donated arguments
    peak: int

    @property
    def sum(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.shared


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array of the program."""

    name: str
    bytes: int
    shape: str
    where: str  # what the compiler calls the allocation: parameter, temporary, ...


def peak_of(compiled: Any) -> Peak:
    """From `jax.stages.Compiled`."""
    found = compiled.memory_analysis()
    arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
    temporaries, shared = found.temp_size_in_bytes, found.alias_size_in_bytes
    whole = arguments + outputs + temporaries - shared
    said = int(getattr(found, "peak_memory_in_bytes", 0))
    return Peak(arguments, outputs, temporaries, shared, max(said, whole))


def largest_buffers(dump: Path, count: int = 10) -> list[Buffer]:
    """From a folder written by `xla_dump_to`; empty where the compiler wrote no assignment."""
    files = sorted(dump.glob("*buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not files:
        return []
    buffers: dict[tuple[str, int, int], Buffer] = {}  # one a place: updates in place are not two
    where = number = ""
    for line in files[-1].read_text(encoding="utf-8").splitlines():
        allocation = _ALLOCATION.match(line)
        value = _VALUE.match(line)
        if allocation:
            number, where = allocation[1], allocation[3]
        elif value:
            size, offset = int(value[2]), int(value[3])
            found = Buffer(value[1], size, value[4], where)
            buffers.setdefault((number, offset, size), found)
    return sorted(buffers.values(), key=lambda buffer: -buffer.bytes)[:count]
