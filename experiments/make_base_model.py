"""Makes the tiny base model that ships with the package: tokenizer and weights.

    python experiments/make_base_model.py --out=clawgym_jax/data/tiny_base --minutes=45

Claim: a 577,600-parameter Qwen3 mixture of experts, trained from scratch on synthetic text in
minutes on two CPU cores, copies and looks up names that it has never seen; supervised and
reinforcement learning can start from it.  Numbers: the README beside the weights.

Bounded by time (`--minutes`), or by `--steps` where a run has to be repeatable.  `--workdir`
keeps checkpoints and a log of skills; `--resume` goes on from the last one.
"""

import json
import os
import pathlib
import sys

# One XLA device per core: small products do not fill more than one core each.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_weights
from experiments.base_model import loop, tokenizer

_OUT = flags.DEFINE_string("out", None, "Folder for tokenizer and weights.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "runs/base_model", "Folder for checkpoints and log.")
_MINUTES = flags.DEFINE_float("minutes", 45.0, "Training time; ignored if --steps is given.")
_STEPS = flags.DEFINE_integer("steps", 0, "Number of steps, for a repeatable run.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and text.")
_RESUME = flags.DEFINE_boolean("resume", False, "Go on from the checkpoint in --workdir.")


def main(_: list[str]) -> None:
    workdir, out = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUT.value)
    workdir.mkdir(parents=True, exist_ok=True)
    text = tokenizer.build()
    settings = loop.Settings(workdir, _MINUTES.value, _STEPS.value, _SEED.value, _RESUME.value)
    run = loop.Run(settings, text)
    run.train()
    tokenizer.save(text, out, model_config.TINY.max_position_embeddings)
    hf_weights.write(out, model_config.TINY, run.params)
    print(json.dumps(run.skills(rows=256)))


if __name__ == "__main__":
    app.run(main)
