"""Imports go down only, and the side that runs on CPU hosts never imports jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "clawgym_jax"
LAYERS = {
    "core": 0,
    "tasks": 1,
    "sandbox": 1,
    "harness": 1,
    "tree": 1,
    "losses": 1,
    "model": 1,
    "proxy": 2,
    "serving": 2,
    "batch": 2,
    "rollout": 3,
    "train": 4,
    "compiled": 4,
    "evaluate": 4,
    "ise": 4,
    "report": 4,
    "config": 5,
    "assemble": 5,
    "dry_run": 6,
}
JAX_FREE = ("core", "tasks", "sandbox", "harness", "proxy", "tree", "rollout")
JAX_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore")


def imported_parts(path: Path) -> set[str]:
    """First-level parts of clawgym_jax that a file imports, anywhere in it."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("clawgym_jax.")}
    return parts


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    # Programs that run inside sandboxes are not part of the import graph.
    return [p for p in sorted(PACKAGE.rglob("*.py")) if "programs" not in p.parts]


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":
        assert not imported_parts(path)
        return
    assert own in LAYERS, f"{own} has no layer: add it to LAYERS"
    for part in imported_parts(path):
        if part in (own, "__version__"):
            continue
        if own == "assemble" and part == "config":
            continue
        assert LAYERS[part] < LAYERS[own], f"{path}: {own} must not import {part}"


@pytest.mark.parametrize("part", JAX_FREE)
def test_cpu_side_never_loads_jax(part: str) -> None:
    modules = [
        "clawgym_jax." + ".".join(p.relative_to(PACKAGE).with_suffix("").parts)
        for p in python_files()
        if part_of(p) == part
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"loaded = [m for m in {JAX_LIBRARIES!r} if m in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def libraries_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_heavy_libraries_are_imported_in_one_file_each() -> None:
    for library in ("docker", "jetstream", "orbax", "gymnasium", "ray", "tensorboardX"):
        users = [str(p.relative_to(PACKAGE)) for p in python_files() if library in libraries_of(p)]
        assert len(users) <= 1, f"{library} is imported in {users}"
