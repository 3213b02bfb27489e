"""Compiles a lowered program, and reads what the compiler wrote about it.

The text of the program and the assignment of its buffers are taken from a folder that the compiler
dumps to: asking the executable for its text fails for programs with Pallas kernels.
Invariant: the module that is returned is the one that was compiled here, not an older dump.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from clawgym_jax.compiled.hlo import HloError, Module, parse
from clawgym_jax.core.errors import ClawgymError


class CompileError(ClawgymError):
    """The compiler refused a program: most often it does not fit."""


def compile_and_read(name: str, lowered: Any, dump: Path) -> tuple[Any, Module]:
    """(compiled, module) of a `jax.stages.Lowered`; `dump` is a new or empty folder."""
    dump.mkdir(parents=True, exist_ok=True)
    if any(dump.iterdir()):
        raise HloError(f"expected an empty folder to dump to, got {dump}: name a new one")
    try:
        compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump)})
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(
            f"{name} does not compile: {_first_sentence(str(error))}. Where memory is short: a "
            "mesh of more chips, model.remat=attention or layers, fewer slots, a smaller window"
        ) from error
    return compiled, parse(program_text(dump))


def _first_sentence(text: str) -> str:
    return text.partition("HLO module:")[0].partition("\n")[0].strip().rstrip(".")


def program_text(dump: Path) -> str:
    """The optimised program in a dump: the largest, helpers of the compiler are small."""
    files = sorted(dump.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    files = [path for path in files if "buffer-assignment" not in path.name]
    if not files:
        written = ", ".join(path.name for path in sorted(dump.iterdir())[:5])
        raise HloError(f"the compiler wrote no *after_optimizations.txt to {dump}; got: {written}")
    return files[-1].read_text(encoding="utf-8")
