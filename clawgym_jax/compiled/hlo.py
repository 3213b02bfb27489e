"""Reads the text of an optimised HLO module: computations, instructions, shapes.

    %region (arg: (s32[], f32[4,16])) -> f32[4,16] {
      %x = f32[4,16]{1,0:T(8,128)} parameter(0)
      ROOT %y = f32[4,16]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={...}
    }

Only what the counting needs; a line that looks like an instruction and cannot be read is an error,
never skipped. Not here: meaning (`flops`, `trips`, `traffic`).
Invariant: every operand of an instruction is an instruction of the same computation.
Source: https://openxla.org/xla/operation_semantics and the printer in xla/hlo/ir.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8, "token": 0, "opaque": 0,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_ASSIGN = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")


class HloError(ValueError):
    """The text is not what this reader knows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = field(default=0, compare=False)  # of memory: 0 the chip's large one, 1 on chip

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without padding of tiles."""
        return -(-self.elements * BITS[self.dtype] // 8)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result; several for a tuple, nested ones flattened
    operands: tuple[str, ...]
    attributes: str  # everything behind the operands
    literal: str  # between the brackets: a constant's value, a parameter's number
    root: bool

    def attribute(self, name: str) -> str | None:
        """The value of `name=...`: up to the end of its braces, or the next comma."""
        found = re.search(rf"(?:^|[ ,{{]){re.escape(name)}=", self.attributes)
        if found is None:
            return None
        rest = self.attributes[found.end() :]
        return rest[: _closing(rest, "{", "}")] if rest.startswith("{") else _word(rest)

    def ints(self, name: str) -> tuple[int, ...]:
        """The value of `name={1,2}`; empty when it is not there."""
        text = self.attribute(name) or ""
        return tuple(int(x) for x in re.findall(r"-?\d+", text))

    def called(self) -> list[tuple[str, str]]:
        """(role, computation) of every computation that this instruction runs."""
        pairs = [(m[1], m[2]) for m in _CALLED.finditer(self.attributes)]
        for match in _CALLED_LIST.finditer(self.attributes):
            pairs += [(match[1], part.strip().lstrip("%")) for part in match[2].split(",")]
        return pairs


@dataclass(slots=True)
class Computation:
    """A function of the module."""

    name: str
    entry: bool
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    def shape_of(self, operand: str) -> Shape:
        """The one array that an operand is."""
        shapes = self.instructions[operand].shapes
        if len(shapes) != 1:
            raise HloError(f"{self.name}: expected {operand} to be one array, got {len(shapes)}")
        return shapes[0]


@dataclass(slots=True)
class Module:
    computations: dict[str, Computation]

    @property
    def entry(self) -> Computation:
        return next(c for c in self.computations.values() if c.entry)


def parse(text: str) -> Module:
    """Reads a module; raises HloError with the line that it cannot read."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = Computation(head[2], bool(head[1]))
            computations[current.name] = current
        elif current is not None and line.startswith("}"):
            current = None
        elif current is not None and _ASSIGN.match(line):
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
    module = Module(computations)
    if not any(c.entry for c in computations.values()):
        raise HloError(f"expected an HLO module with an ENTRY computation, got {text[:80]!r}")
    _check_operands(module)
    return module


def array_shapes(text: str) -> tuple[Shape, ...]:
    """Every array in a printed shape; bounded dynamic sizes (<=8) count as their bound."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in BITS:
            raise HloError(f"unknown element type {dtype!r} in {text[:80]!r}; add it to BITS")
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        space = _SPACE.search(layout)
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def _instruction(line: str) -> Instruction:
    match = _ASSIGN.match(line)
    assert match is not None, "checked by the caller"
    rest = line[match.end() :]
    size = _closing(rest, "(", ")") if rest.startswith("(") else _shape_end(rest)
    shape, rest = rest[:size], rest[size:].lstrip()
    opcode, bracket, _ = rest.partition("(")
    if not bracket or not re.fullmatch(r"[\w\-]+", opcode):
        raise HloError(f"expected 'name = shape opcode(operands)', got {line.strip()[:160]!r}")
    rest = rest[len(opcode) :]
    end = _closing(rest, "(", ")")
    inside, attributes = rest[1 : end - 1], rest[end:].lstrip(", ")
    plain = opcode in ("constant", "parameter", "iota")
    operands = () if plain else tuple(_operand_names(_COMMENT.sub("", inside)))
    shapes = array_shapes(_COMMENT.sub("", shape))
    return Instruction(match[2], opcode, shapes, operands, attributes, inside, bool(match[1]))


def _shape_end(text: str) -> int:
    """Where a printed array shape ends: at the first space outside its layout's braces."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == " " and depth == 0:
            return at
    raise HloError(f"expected a shape and an opcode, got {text[:80]!r}")


def _closing(text: str, opening: str, closing: str) -> int:
    """The length of the bracketed text at the start of `text`; quoted text is passed over."""
    depth, quoted, at = 0, False, 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        else:
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return at + 1
        at += 1
    raise HloError(f"expected {closing!r} to close {text[:80]!r}")


def _operand_names(text: str) -> Iterator[str]:
    """Operands are printed as `%name` or as `shape %name`."""
    depth, start = 0, 0
    for at, char in enumerate(text + ","):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            part = text[start:at].strip()
            start = at + 1
            if part:
                yield part.split()[-1].lstrip("%")


def _word(text: str) -> str:
    found = re.match(r'"(?:[^"\\]|\\.)*"|[^,\s}]+', text)
    return found[0] if found else ""


def _check_operands(module: Module) -> None:
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            for operand in instruction.operands:
                if operand not in computation.instructions:
                    raise HloError(
                        f"{computation.name}: {instruction.name} takes {operand!r}, which is not "
                        "an instruction of it"
                    )
