"""How often each computation of a module runs.

A loop's body runs as often as the compiler noted (`known_trip_count`), else as its condition says:
`i < constant` with `i` from a constant in steps of one. Anything else is unknown, and unknown is an
error that names the loop: a wrong count of operations is worse than none.
Invariant: counts multiply along calls; a computation called twice runs the sum.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping

from clawgym_jax.compiled.hlo import Computation, HloError, Instruction, Module

_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class UnknownTripCount(HloError):
    """A loop whose number of rounds the program does not show."""


def run_counts(module: Module, bounds: Mapping[str, int] | None = None) -> dict[str, int]:
    """Computation -> how often it runs in one run of the program.

    Of a conditional every branch is counted: an upper bound. Scalar functions of reductions, sorts
    and scatters are not counted. bounds: rounds at most of loops whose length depends on data, by
    the end of their op_name.
    """
    counts: dict[str, int] = defaultdict(int)

    def visit(computation: Computation, times: int) -> None:
        counts[computation.name] += times
        for instruction in computation.instructions.values():
            for role, name in instruction.called():
                if role == "to_apply" and instruction.opcode != "call":
                    continue
                rounds = 1
                if instruction.opcode == "while":
                    trips = trip_count(module, computation, instruction, bounds)
                    rounds = trips + (role == "condition")
                visit(module.computations[name], times * rounds)

    visit(module.entry, 1)
    return dict(counts)


def trip_count(
    module: Module,
    where: Computation,
    loop: Instruction,
    bounds: Mapping[str, int] | None = None,
) -> int:
    """Rounds of a `while`; raises UnknownTripCount."""
    noted = _NOTED.search(loop.attributes)
    if noted:
        return int(noted[1])
    called = dict(loop.called())
    condition, body = (module.computations[called[role]] for role in ("condition", "body"))
    found = _bound(module, condition)
    if found is not None:
        index, bound = found
        start, step = _start(where, loop, index), _step(module, body, index)
        if start is not None and step == 1:
            return max(0, bound - start)
    source = source_of(loop)
    for end, most in (bounds or {}).items():
        if source.endswith(end):
            return most
    raise UnknownTripCount(
        f"the loop {loop.name} in {where.name} has no constant number of rounds ({source}); make "
        "its length static, or state how long it is at most"
    )


def _bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """(element of the loop's tuple, constant) of `element < constant`."""
    root, names = condition.root, condition
    arguments: list[Instruction] | None = None
    if root.opcode == "fusion":
        arguments = [condition.instructions[o] for o in root.operands]
        names = module.computations[dict(root.called())["calls"]]
        root = names.root
    if root.opcode != "compare" or root.attribute("direction") not in ("LT", "GT"):
        return None
    sides = [_outer(names.instructions[o], arguments) for o in root.operands]
    if root.attribute("direction") == "GT":
        sides.reverse()
    element, constant = sides
    if element.opcode != "get-tuple-element" or constant.opcode != "constant":
        return None
    return element.ints("index")[0], int(constant.literal)


def _outer(instruction: Instruction, arguments: list[Instruction] | None) -> Instruction:
    """What a fusion's parameter stands for."""
    if arguments is not None and instruction.opcode == "parameter":
        return arguments[int(instruction.literal)]
    return instruction


def _start(where: Computation, loop: Instruction, index: int) -> int | None:
    start = where.instructions[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    value = _source(where, where.instructions[start.operands[index]])
    return int(value.literal) if value.opcode == "constant" else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What a round adds to the tuple's element."""
    root = body.root
    if root.opcode != "tuple":
        return None
    change = _source(body, body.instructions[root.operands[index]])
    names, arguments = body, None
    if change.opcode == "fusion":
        arguments = [_source(body, body.instructions[o]) for o in change.operands]
        names = module.computations[dict(change.called())["calls"]]
        change = names.root
    if change.opcode != "add":
        return None
    sides = [_source(body, _outer(names.instructions[o], arguments)) for o in change.operands]
    constants = [int(side.literal) for side in sides if side.opcode == "constant"]
    own = [s for s in sides if s.opcode == "get-tuple-element" and s.ints("index") == (index,)]
    return constants[0] if len(constants) == len(own) == 1 else None


def _source(where: Computation, instruction: Instruction) -> Instruction:
    """What a copy was made of."""
    while instruction.opcode in ("copy", "bitcast", "convert") and instruction.operands:
        if instruction.operands[0] not in where.instructions:
            break
        instruction = where.instructions[instruction.operands[0]]
    return instruction


def source_of(instruction: Instruction) -> str:
    """The op_name of the program's source that an instruction came from."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return found[1] if found else instruction.name


def backend_config(instruction: Instruction) -> dict[str, object]:
    """The JSON that a backend left at an instruction; empty when there is none."""
    text = instruction.attribute("backend_config")
    if not text:
        return {}
    if text.startswith('"'):
        text = json.loads(text)
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
