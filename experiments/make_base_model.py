"""Makes the tiny base model that ships with the package: tokenizer and weights.

    python experiments/make_base_model.py --out=clawgym_jax/data/tiny_base --minutes=24

Claim: a 577,600-parameter Qwen3 mixture of experts, trained from scratch on synthetic text in
minutes on two CPU cores, copies and looks up names that it has never seen; supervised and
reinforcement learning can start from it.  Numbers: the README beside the weights.

Bounded by time (`--minutes`), or by `--steps` where a run has to be repeatable.  `--workdir`
keeps checkpoints; `--resume` goes on from the last one.
"""

import json
import os
import pathlib
import sys
import time

# One XLA device per core: small products do not fill more than one core each.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax  # noqa: E402
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from clawgym_jax.model import config as model_config  # noqa: E402
from experiments.base_model import (  # noqa: E402
    documents,
    initialise,
    optimizer,
    skills,
    stream,
    tokenizer,
    training,
)

_OUT = flags.DEFINE_string("out", None, "Folder for tokenizer and weights.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "/tmp/base_model", "Folder for checkpoints and log.")
_MINUTES = flags.DEFINE_float("minutes", 24.0, "Training time; ignored if --steps is given.")
_STEPS = flags.DEFINE_integer("steps", 0, "Number of steps, for a repeatable run.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and text.")
_RESUME = flags.DEFINE_boolean("resume", False, "Go on from the checkpoint in --workdir.")
_CHECK_EVERY = flags.DEFINE_integer("check_every", 20, "Steps between repeat checks.")
_SAVE_EVERY_S = flags.DEFINE_float("save_every_s", 150.0, "Seconds between checkpoints.")


def main(_: list[str]) -> None:
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    text = tokenizer.build()
    graphdef, params = initialise.initialise(model_config.TINY, _SEED.value)
    tx = optimizer.transform(params)
    state = (params, tx.init(params))
    progress = {"step": 0.0, "elapsed_s": 0.0, "tokens": 0.0, "stage": 0.0}
    checkpoint = workdir / "state.npz"
    if _RESUME.value and checkpoint.exists():
        state, progress = training.load(checkpoint, state)
    params, opt_state = state
    step_fn, predict = training.make_step(graphdef, tx), training.make_predict(graphdef)

    saved = last = time.monotonic()
    feed, feed_stage = None, -1
    while (share := _share(progress)) < 1.0:
        stage = int(progress["stage"])
        length, rows, repeats, enough = training.STAGES[stage]
        if stage != feed_stage:
            feed = stream.batches(
                text, _SEED.value, rows, length, repeats, start=int(progress["step"])
            )
            feed_stage = stage
        assert feed is not None
        tokens, weights = next(feed)
        factor = jnp.float32(optimizer.decay(share))
        params, opt_state, metrics = step_fn(params, opt_state, tokens, weights, factor)
        progress["step"] += 1
        progress["tokens"] += rows * length
        if progress["step"] % _CHECK_EVERY.value == 0:
            repeat = skills.measure(
                lambda t: predict(params, t),
                text,
                rows=skills.BATCH,
                skills=(skills.Skill("copy_repeat", documents.repeat, length, length),),
            )["copy_repeat"]
            values = {k: round(float(v), 4) for k, v in metrics.items()}
            now = time.monotonic()
            progress["elapsed_s"] += now - last
            last = now
            rounded = {k: round(v, 1) for k, v in progress.items()}
            print(json.dumps(rounded | {"length": length, "repeat": round(repeat, 3)} | values),
                  flush=True)  # fmt: skip
            late = share >= 0.5 and stage < len(training.STAGES) - 1
            if repeat >= enough or late:
                progress["stage"] = len(training.STAGES) - 1 if late else stage + 1
        if time.monotonic() - saved > _SAVE_EVERY_S.value:
            saved = time.monotonic()
            _report(workdir, params, predict, text, progress)
            training.save(checkpoint, (params, opt_state), progress)
            last += time.monotonic() - saved  # measuring is not training time
    _report(workdir, params, predict, text, progress)
    training.save(checkpoint, (params, opt_state), progress)
    tokenizer.save(text, pathlib.Path(_OUT.value), model_config.TINY.max_position_embeddings)


def _share(progress: dict[str, float]) -> float:
    if _STEPS.value:
        return progress["step"] / _STEPS.value
    return progress["elapsed_s"] / (60.0 * _MINUTES.value)


def _report(
    workdir: pathlib.Path, params: object, predict, text, progress: dict[str, float]
) -> None:
    found = skills.measure(lambda t: predict(params, t), text, rows=skills.BATCH)
    line = json.dumps(progress | {k: round(v, 3) for k, v in found.items()})
    print(line, flush=True)
    with (workdir / "skills.jsonl").open("a") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    app.run(main)
