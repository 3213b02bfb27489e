"""Bytes that a compiled program moves to and from a chip's large memory, loops counted as they run.

Every instruction outside fusions reads its operands and writes its results, as far as they lie in
the large memory (the compiler says so in their layouts). A slice or gather reads what it gives, not
its operand; an update in place moves the update, not the array; the same inside a fusion for a
parameter that is only sliced, and for a fusion that ends in an update. An asynchronous pair is
counted at its start; of a conditional every branch. Not here: what must be moved
(`dry_run.decode_bytes`), time.
Invariant: an upper estimate: data that stays on chip between two instructions without the
compiler's layouts saying so is counted. Source: XLA's HloCostAnalysis, "bytes accessed".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clawgym_jax.compiled.hlo import Computation, Instruction, Module, Shape
from clawgym_jax.compiled.trips import run_counts

_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call",
    "conditional", "partition-id", "replica-id", "opt-barrier", "domain",
})  # fmt: skip
_DONE = ("-done", "-update")
_SLICES = ("dynamic-slice", "gather", "slice")
_PASSED_ON = ("bitcast", "reshape", "copy", "transpose", "convert")


def moved_bytes(module: Module, bounds: Mapping[str, int] | None = None) -> int:
    """Of one run on one chip. bounds: as of `run_counts`."""
    counts = run_counts(module, bounds)
    inside = _inside_of_fusions(module)
    total = 0
    for name, times in counts.items():
        if name in inside:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            total += times * _moved(module, computation, instruction)
    return total


def _inside_of_fusions(module: Module) -> set[str]:
    """Computations that run as a part of one instruction."""
    inside = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "call", "conditional"):
                continue
            inside |= {name for _, name in instruction.called()}
    return inside


def _moved(module: Module, where: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(_DONE):
        return 0
    if opcode == "fusion":
        return _of_fusion(module, where, instruction)
    if opcode.endswith("-start"):
        return _of_start(where, instruction)
    if opcode in _SLICES:
        return _size(instruction.shapes) + _size(_plain(instruction.shapes))
    if opcode == "dynamic-update-slice":
        return 2 * _size(where.instructions[instruction.operands[1]].shapes)
    if opcode == "scatter":
        return 3 * _size(where.instructions[instruction.operands[-1]].shapes)
    operands = [_size(where.instructions[o].shapes) for o in instruction.operands]
    return sum(operands) + _size(instruction.shapes)


def _of_start(where: Computation, instruction: Instruction) -> int:
    """Of an asynchronous pair. Its shapes are operands, results and room for the device's notes."""
    opcode, shapes = instruction.opcode.removesuffix("-start"), instruction.shapes
    if opcode in _SLICES:
        given = shapes[len(instruction.operands) :][:1]
        return _size(given) + _size(_plain(given))
    read = sum(_size(where.instructions[o].shapes) for o in instruction.operands)
    if opcode == "copy":  # its result stands before its operand
        return read + _size(shapes[:1])
    return read + max((_size([shape]) for shape in shapes), default=0)


def _of_fusion(module: Module, where: Computation, fusion: Instruction) -> int:
    body = module.computations[dict(fusion.called())["calls"]]
    updated = _updated_in_place(module, body)
    total = 0
    for number, operand in enumerate(fusion.operands):
        shapes = where.instructions[operand].shapes
        parameter = _parameter(body, number)
        if not _size(shapes) or parameter.name in updated:
            continue
        sliced = _only_sliced(module, body, parameter)
        total += _size(shapes) if sliced is None else min(sliced, _size(shapes))
    written = updated[""] if updated else _size(fusion.shapes)
    return total + written


def _updated_in_place(module: Module, body: Computation) -> dict[str, int]:
    """Parameters that the fusion's root updates, and under "" the bytes of all updates (twice)."""
    root = body.root
    roots = [body.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    found: dict[str, int] = {}
    for each in roots:
        update = _behind(module, body, each)
        if update.opcode != "dynamic-update-slice":
            return {}
        target = _behind(module, body, body.instructions[update.operands[0]])
        if target.opcode != "parameter":  # made here: all of it is written
            return {}
        size = 2 * _size(_plain(body.instructions[update.operands[1]].shapes))
        found[target.name] = found.get(target.name, 0) + size
    return {**found, "": sum(found.values())}


def _only_sliced(module: Module, body: Computation, parameter: Instruction) -> int | None:
    """Bytes of the slices taken of it, or None where something reads all of it."""
    total, passed_on = _uses(module, body, parameter)
    return None if passed_on else total


def _uses(module: Module, body: Computation, parameter: Instruction) -> tuple[int | None, bool]:
    """(bytes of the slices taken of it, or None; whether the result is the parameter itself).

    Where it is, whoever uses the result uses the parameter.
    """
    total, names = 0, {parameter.name}
    for instruction in body.instructions.values():  # in order: uses come after definitions
        used = names.intersection(instruction.operands)
        if not used:
            continue
        if instruction.opcode in _SLICES and instruction.operands[0] in names:
            total += _size(_plain(instruction.shapes))
        elif instruction.opcode in _PASSED_ON:
            names.add(instruction.name)
        elif instruction.opcode == "fusion":  # fusions lie within fusions
            inner = module.computations[dict(instruction.called())["calls"]]
            for place in (i for i, name in enumerate(instruction.operands) if name in names):
                part, passed_on = _uses(module, inner, _parameter(inner, place))
                if part is None:
                    return None, False
                total += part
                if passed_on:
                    names.add(instruction.name)
        else:
            return None, False
    return total, body.root.name in names


def _parameter(body: Computation, number: int) -> Instruction:
    return next(
        i
        for i in body.instructions.values()
        if i.opcode == "parameter" and int(i.literal) == number
    )


def _behind(module: Module, body: Computation, instruction: Instruction) -> Instruction:
    """What an instruction passes on; a fusion may do no more either (a view with other tiles)."""
    while True:
        place = 0
        if instruction.opcode == "fusion":
            inner = module.computations[dict(instruction.called())["calls"]]
            source = _behind(module, inner, inner.root)
            if source.opcode != "parameter":
                return instruction
            place = int(source.literal)
        elif instruction.opcode not in _PASSED_ON:
            return instruction
        instruction = body.instructions[instruction.operands[place]]


def _size(shapes: Iterable[Shape]) -> int:
    """Bytes of those arrays that lie in the large memory."""
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _plain(shapes: Iterable[Shape]) -> list[Shape]:
    """As if all of them lay in the large memory: inside a fusion layouts say nothing."""
    return [Shape(shape.dtype, shape.dims) for shape in shapes]
