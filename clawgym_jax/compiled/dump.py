"""Compiles a jitted function for shapes, and reads what the compiler wrote about it.

The text of the program and the assignment of its buffers are taken from a folder that the compiler
dumps to: asking the executable for its text fails for programs with Pallas kernels.
Invariant: the module that is returned is the one that was compiled here, not an older dump.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clawgym_jax.compiled.hlo import HloError, Module, parse


def compile_and_read(function: Any, shapes: Sequence[Any], dump: Path) -> tuple[Any, Module]:
    """(compiled, module) of `jax.jit(...)` lowered for `shapes`; `dump` must be an empty folder."""
    dump.mkdir(parents=True, exist_ok=True)
    if any(dump.iterdir()):
        raise HloError(f"expected an empty folder to dump to, got {dump}: name a new one")
    lowered = function.lower(*shapes)
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)})
    return compiled, parse(program_text(dump))


def program_text(dump: Path) -> str:
    """The optimised program in a dump: the largest, helpers of the compiler are small."""
    files = sorted(dump.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    files = [path for path in files if "buffer-assignment" not in path.name]
    if not files:
        written = ", ".join(path.name for path in sorted(dump.iterdir())[:5])
        raise HloError(f"the compiler wrote no *after_optimizations.txt to {dump}; got: {written}")
    return files[-1].read_text(encoding="utf-8")
