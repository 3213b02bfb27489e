"""Builds the sandbox images of `recipes.py`, with no image registry unless you name a base.

Debian's root comes from its package mirror (mmdebstrap), busybox from this machine, harnesses
from npm and PyPI, all on the host; the build itself has no network. With `base`
("debian:bookworm-slim", ...) the root is pulled instead and its packages installed in the build.
Not here: what goes into an image (`recipes.py`).
Invariant: an image has its tag only after its smoke command ran in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym_jax.core.errors import SandboxError
from clawgym_jax.sandbox import container, docker, recipes
from clawgym_jax.sandbox.recipes import Recipe

Say = Callable[[str], None]
HEARTBEAT_S = 15.0
BUILDING = "building"  # the tag of an image that has not passed its smoke command
WHEEL_PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux2014")  # Debian's glibc: 2.36
EXCLUDED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/info/*")
ROOMS = (
    "RUN mkdir -p {points} && chmod 755 /root /root/.openclaw && "
    "chown 1000:1000 /home/agent /workspace /root/.openclaw/workspace && "
    "echo 'agent:x:1000:1000::/home/agent:/bin/sh' >> /etc/passwd && "
    "echo 'agent:x:1000:' >> /etc/group"
)


def ensure(names: Sequence[str], base: str = "", say: Say = print) -> list[str]:
    """Builds what is missing, parents first; returns the tags of `names`."""
    client = docker.connect()
    for name in _with_parents(names):
        tag = recipes.tag(name, base)
        if client.images.list(name=tag):
            say(f"{name}: have {tag}")
        else:
            _build(client, recipes.recipe(name), base, say)
    return [recipes.tag(name, base) for name in names]


def _with_parents(names: Sequence[str]) -> list[str]:
    ordered: list[str] = []
    for name in names:
        parent = recipes.recipe(name).parent
        for each in (*(_with_parents([parent]) if parent else ()), name):
            if each not in ordered:
                ordered.append(each)
    return ordered


def _build(client: Any, recipe: Recipe, base: str, say: Say) -> None:
    started_s = time.monotonic()
    tag = recipes.tag(recipe.name, base)
    trial = f"{tag.rpartition(':')[0]}:{BUILDING}"
    with tempfile.TemporaryDirectory(prefix="clawgym-image-") as folder:
        context = Path(folder)
        context.chmod(0o755)
        lines = _prepare(recipe, base, context, say)
        (context / "Dockerfile").write_text("\n".join(lines) + "\n")
        say(f"{recipe.name}: building the image")
        network = "host" if base and recipe.name == "base" else "none"
        _engine_build(client, context, trial, network)
    say(f"{recipe.name}: trying {' '.join(recipe.smoke)}")
    _try(client, trial, recipe.smoke)
    _rename(client, trial, tag)
    say(f"{recipe.name}: built {tag} in {time.monotonic() - started_s:.0f} s")


def _prepare(recipe: Recipe, base: str, context: Path, say: Say) -> list[str]:
    """Fills the build's folder and returns the lines of its Dockerfile."""
    path = f"ENV PATH={recipes.PATH}"
    rooms = ROOMS.format(points=" ".join(recipes.MOUNT_POINTS))
    if recipe.name == "tiny":
        _busybox_root(context / "root.tar")
        return ["FROM scratch", "ADD root.tar /", path, rooms]
    if recipe.name == "base" and base:
        packages = " ".join(recipes.BASE_PACKAGES)
        install = f"apt-get install -y --no-install-recommends {packages}"
        clean = "rm -rf /var/lib/apt/lists/*"
        return [f"FROM {base}", f"RUN apt-get update && {install} && {clean}", path, rooms]
    if recipe.name == "base":
        _debian_root(context / "root.tar", say)
        return ["FROM scratch", "ADD root.tar /", path, rooms]
    lines = [f"FROM {recipes.tag(recipe.parent, base)}"]
    node = f"node/node_modules/{recipes.NODE.rpartition('@')[0]}/bin"
    if recipe.node:
        _npm_install([recipes.NODE], context / "node", recipe.name, say)
        lines.append(f"COPY {node}/node {recipes.NODE_DIR}/node")
    if recipe.npm:
        _npm_install(recipe.npm, context / "harness", recipe.name, say, context / node)
        lines.append(f"COPY harness/node_modules {recipes.HARNESS_DIR}/node_modules")
    if recipe.pypi:
        _pip_install(recipe.pypi, context / "python", recipe.name, say)
        lines.append(f"COPY python {recipes.PYTHON_DIR}")
        lines.append(f"RUN python3 -m compileall -q -x /tests?/ {recipes.PYTHON_DIR} || true")
    return lines


def _debian_root(target: Path, say: Say) -> None:
    if shutil.which("mmdebstrap") is None:
        raise SandboxError(
            "mmdebstrap is not installed; install it (Debian, Ubuntu), or name an image to start "
            "from: --base=debian:bookworm-slim"
        )
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED]
    include = f"--include={','.join(recipes.BASE_PACKAGES)}"
    command = ["mmdebstrap", "--variant=minbase", include, *excluded, recipes.DEBIAN, str(target)]
    _run(command, "base: making Debian's root (1 to 2 minutes)", say)


def _busybox_root(target: Path) -> None:
    """A root with nothing but a static busybox under all its names."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SandboxError("busybox is not installed; install the package busybox-static")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    with tarfile.open(target, "w") as tar:
        for name in ("bin", "usr", "usr/bin", "etc", "root", "tmp", "proc", "dev", "sys"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        tar.add(busybox, "bin/busybox")
        for applet in applets.stdout.split():
            for place in ("bin", "usr/bin"):
                link = tarfile.TarInfo(f"{place}/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "/bin/busybox"
                if applet != "busybox":
                    tar.addfile(link)


def _npm_install(
    packages: Sequence[str], prefix: Path, name: str, say: Say, node: Path | None = None
) -> None:
    """`node`: a folder with the node to install with; npm takes what fits the node it runs on."""
    if shutil.which("npm") is None:
        raise SandboxError(f"image {name} needs npm to fetch {', '.join(packages)}: install npm")
    prefix.mkdir()
    quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    command = ["npm", "install", "--prefix", str(prefix), "--omit=dev", *quiet, *packages]
    path = os.environ.get("PATH", os.defpath)
    env = {**os.environ, "PATH": f"{node}{os.pathsep}{path}"} if node and node.exists() else None
    _run(command, f"{name}: installing {', '.join(packages)}", say, env)


def _pip_install(packages: Sequence[str], target: Path, name: str, say: Say) -> None:
    """Wheels for the image's Python, whatever Python runs here; nothing is built or started."""
    pip = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    fitting = ["--only-binary=:all:", "--implementation=cp", f"--python-version={recipes.PYTHON}"]
    fitting += [f"--platform={platform}_x86_64" for platform in WHEEL_PLATFORMS]
    command = [*pip, "--no-compile", *fitting, f"--target={target}", *packages]
    _run(command, f"{name}: installing {', '.join(packages)}", say)
    shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name this machine's Python


def _run(command: Sequence[str], what: str, say: Say, env: Mapping[str, str] | None = None) -> None:
    """Runs a long command with a sign of life every HEARTBEAT_S; its output shows on failure."""
    say(what)
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
        )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{what}: {time.monotonic() - started_s:.0f} s")
        except BaseException:
            process.kill()
            process.wait()
            raise
        if code != 0:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise SandboxError(f"{' '.join(command)} failed with exit code {code}; see above")


def _engine_build(client: Any, context: Path, tag: str, network: str) -> None:
    """Builds the folder `context` with its Dockerfile; the log's end shows on failure."""
    log: list[str] = []
    steps = client.api.build(
        path=str(context), tag=tag, rm=True, forcerm=True, decode=True, network_mode=network
    )
    for step in steps:
        log.append(str(step.get("stream") or step.get("error") or ""))
        if "error" in step:
            raise SandboxError(f"building {tag} failed:\n{''.join(log[-20:])}")


def _try(client: Any, tag: str, command: Sequence[str]) -> None:
    """Runs `command` in a container as sandboxes run: no network, nobody's user, read-only."""
    try:
        client.containers.run(
            tag,
            list(command),
            remove=True,
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": "", container.HOME: "uid=1000"},
            user="1000:1000",
            environment={"HOME": container.HOME},
            labels=container.owner_labels(),
        )
    except docker.ENGINE_ERRORS as error:
        raise SandboxError(f"{tag}: {' '.join(command)} failed: {error}") from error


def _rename(client: Any, tag: str, new_tag: str) -> None:
    """Gives an image another tag and takes the old one away."""
    repository, _, version = new_tag.rpartition(":")
    client.images.get(tag).tag(repository, version)
    client.images.remove(tag, noprune=True)
