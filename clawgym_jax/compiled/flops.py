"""Multiply-adds of a compiled program, loops counted as often as they run.

Counted: `dot`, `convolution` (what the TPU makes of matrix products) and custom calls that state
their cost (Pallas kernels: their CostEstimate). Elementwise work is left out: it does not run on
the matrix units. One multiply-add is two FLOPs.
A convolution's taps that fall on padding or between dilated elements are not counted: batched
products come out as such convolutions. Invariant: what cannot be counted is an error or listed in
`uncounted`, never zero in silence. Source: XLA's HloCostAnalysis.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.compiled.hlo import Computation, HloError, Instruction, Module, Shape
from clawgym_jax.compiled.trips import backend_config, run_counts, source_of

KERNEL_TARGETS = ("tpu_custom_call",)


@dataclass(slots=True)
class FlopCount:
    """FLOPs on one device in one run of the program."""

    total: int = 0
    by_source: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # op_name -> FLOPs
    uncounted: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # kernel -> runs

    def add(self, source: str, flops: int) -> None:
        self.total += flops
        self.by_source[source] += flops


def count_flops(
    module: Module,
    shares: Mapping[str, float] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> FlopCount:
    """FLOPs of one run.

    bounds: as of `run_counts`. shares: how much of a kernel's stated cost is really run, by a part
    of its op_name.

    A kernel whose work depends on data states the most it can do: attention over every block pair
    of a causal row, groups that fill their buffer.
    """
    counts, result = run_counts(module, bounds), FlopCount()
    for name, times in counts.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            source = source_of(instruction)
            if instruction.opcode == "dot":
                result.add(source, times * dot_flops(computation, instruction))
            elif instruction.opcode == "convolution":
                result.add(source, times * convolution_flops(computation, instruction))
            elif _is_kernel(instruction):
                flops = _kernel_flops(instruction, source, shares or {})
                if flops is None:
                    result.uncounted[source] += times
                else:
                    result.add(source, times * flops)
    return result


def dot_flops(where: Computation, dot: Instruction) -> int:
    left = where.shape_of(dot.operands[0])
    contracted = math.prod(left.dims[i] for i in dot.ints("lhs_contracting_dims"))
    return 2 * dot.shapes[0].elements * contracted


def convolution_flops(where: Computation, convolution: Instruction) -> int:
    labels = convolution.attribute("dim_labels")
    found = re.fullmatch(r"([0-9bf?]+)_([0-9io?]+)->([0-9bf?]+)", labels or "")
    if found is None:
        raise HloError(f"{convolution.name}: cannot read dim_labels={labels}")
    image, kernel, out = found[1], found[2], found[3]
    left, right = (where.shape_of(operand) for operand in convolution.operands)
    result = convolution.shapes[0]
    window = _Window.parse(convolution.attribute("window") or "{}", _spatial(kernel))
    taps = 1
    for axis in range(_spatial(kernel)):
        sizes = (_axis(shape, labels, str(axis)) for shape, labels in
                 ((left, image), (right, kernel), (result, out)))  # fmt: skip
        taps *= window.valid_taps(axis, *sizes)
    groups = int(convolution.attribute("batch_group_count") or 1)
    outer = _axis(result, out, "b") * _axis(result, out, "f")
    return 2 * outer * _axis(right, kernel, "i") * taps // groups


def _spatial(labels: str) -> int:
    return sum(label.isdigit() for label in labels)


def _axis(shape: Shape, labels: str, label: str) -> int:
    return shape.dims[labels.index(label)]


@dataclass(frozen=True, slots=True)
class _Window:
    """The window of a convolution, one entry for each spatial axis."""

    stride: tuple[int, ...]
    low: tuple[int, ...]  # padding before the first element
    base: tuple[int, ...]  # dilation of the image
    window: tuple[int, ...]  # dilation of the kernel

    @staticmethod
    def parse(text: str, axes: int) -> _Window:
        def of(name: str, default: int) -> tuple[int, ...]:
            found = re.search(rf"\b{name}=([-\dx_]+)", text)
            if found is None:
                return (default,) * axes
            return tuple(int(part.split("_")[0]) for part in found[1].split("x"))

        return _Window(of("stride", 1), of("pad", 0), of("lhs_dilate", 1), of("rhs_dilate", 1))

    def valid_taps(self, axis: int, image: int, kernel: int, out: int) -> int:
        """(output, kernel) positions along the axis that meet an element of the image."""
        places = np.arange(out, dtype=np.int64) * self.stride[axis] - self.low[axis]
        dilated = (image - 1) * self.base[axis] + 1
        valid = 0
        for tap in range(kernel):
            at = places + tap * self.window[axis]
            valid += int(np.sum((at >= 0) & (at < dilated) & (at % self.base[axis] == 0)))
        return valid


def _is_kernel(instruction: Instruction) -> bool:
    target = (instruction.attribute("custom_call_target") or "").strip('"')
    return instruction.opcode == "custom-call" and target in KERNEL_TARGETS


def _kernel_flops(instruction: Instruction, source: str, shares: Mapping[str, float]) -> int | None:
    config = backend_config(instruction).get("custom_call_config", {})
    estimate = config.get("cost_estimate", {}) if isinstance(config, dict) else {}
    if "flops" not in estimate:
        return None
    share = next((share for part, share in shares.items() if part in source), 1.0)
    return round(int(estimate["flops"]) * share)
