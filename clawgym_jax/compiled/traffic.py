"""Bytes that a compiled program moves between chips, by kind of collective.

Of one device in one run: what it must receive. With n devices in a group: an all-gather gives
(n-1)/n of its result, a reduce-scatter (n-1) times its result, an all-reduce 2 (n-1)/n of its
operand, an all-to-all (n-1)/n of it, a permute all of it. A ragged all-to-all is counted at its
buffer's size, an upper bound. Asynchronous pairs are counted at their start.
Invariant: nothing is counted twice: a channel that appears in a start and in the computation it
wraps is one transfer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from clawgym_jax.compiled.hlo import Computation, HloError, Instruction, Module
from clawgym_jax.compiled.trips import run_counts, source_of

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective, all its runs."""

    kind: str
    source: str
    group: int  # devices that take part
    times: int
    bytes: int  # received by one device, all runs


def transfers(
    module: Module, devices: int, bounds: Mapping[str, int] | None = None
) -> list[Transfer]:
    """Every collective of the module, largest first. bounds: as of `run_counts`."""
    found, seen = [], set()
    for name, times in run_counts(module, bounds).items():
        for instruction in module.computations[name].instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            channel = instruction.attribute("channel_id")
            if channel is not None and int(channel) > 1:
                if channel in seen:
                    continue
                seen.add(channel)
            group = group_size(instruction, devices)
            size = _received_bytes(kind, instruction, module.computations[name], group)
            found.append(Transfer(kind, source_of(instruction), group, times, times * size))
    return sorted(found, key=lambda t: -t.bytes)


def bytes_by_kind(found: list[Transfer]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for transfer in found:
        sums[transfer.kind] += transfer.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def group_size(instruction: Instruction, devices: int) -> int:
    """From `replica_groups={{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh[...]{...}`; {} is everyone."""
    text = re.search(r"replica_groups=(\{\{[\d,]*\}|\[\d+,\d+\]|\{\})", instruction.attributes)
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", instruction.attributes)
    if axes is not None:
        return _mesh_group(axes[1], axes[2])
    if text is None:
        if instruction.opcode.startswith("collective-permute"):
            return 2
        raise HloError(f"{instruction.name}: cannot read the replica groups of it")
    if text[1].startswith("["):
        return int(text[1].strip("[]").split(",")[1])
    members = re.findall(r"\d+", text[1])
    return len(members) or devices


def _mesh_group(mesh: str, axes: str) -> int:
    """`'a'=2,'b'=4` and `'b'`: 4. A part of an axis is printed as `'b':(2)2`: 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    group = 1
    for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes):
        group *= int(part) if part else sizes[name]
    return group


def _received_bytes(kind: str, instruction: Instruction, where: Computation, group: int) -> int:
    given = sum(s.bytes for o in instruction.operands for s in where.instructions[o].shapes)
    away = (group - 1) / group
    if kind == "all-gather":
        return round(given * (group - 1))
    if kind == "reduce-scatter":
        return round(given * away)
    if kind == "all-reduce":
        return round(2 * given * away)
    if kind == "all-to-all":
        return round(given * away)
    if kind == "ragged-all-to-all":
        return where.instructions[instruction.operands[1]].shapes[0].bytes
    return given
