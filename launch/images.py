"""Builds the images that Docker sandboxes run: python launch/images.py --images=base,pi,claude-code

Needs a Docker engine (--start_engine runs our own, as root, where none answers), and for images
without a registry: mmdebstrap for the base, npm for harnesses, busybox-static for `tiny`. With
access to a registry: --base=debian:bookworm-slim. What is built already is kept.
"""

from __future__ import annotations

from absl import app, flags

from clawgym_jax.core.errors import ClawgymError
from clawgym_jax.sandbox import engine, images, recipes

IMAGES = flags.DEFINE_list("images", ["base"], f"which of {', '.join(recipes.RECIPES)}")
BASE = flags.DEFINE_string("base", "", "image to start from instead of a Debian root made here")
START_ENGINE = flags.DEFINE_bool("start_engine", False, "start our own engine if none answers")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}: name images with --images=")
    try:
        if START_ENGINE.value and engine.find() is None:
            print(f"started {engine.start()}", flush=True)
        tags = images.ensure(IMAGES.value, BASE.value, lambda text: print(text, flush=True))
    except ClawgymError as error:
        raise SystemExit(f"error: {error}") from error
    print("\n".join(tags))


if __name__ == "__main__":
    app.run(main)
