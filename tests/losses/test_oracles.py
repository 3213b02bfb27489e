"""Our losses against what rlax and TRL compute (tests/data/oracles), in f64 to 1e-6.

The fixtures name the versions; make_oracles.py writes them. Where the libraries mean something
else than we do, the test says what and converts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.losses.advantage import UNGRADED, GroupConfig, group_advantages
from clawgym_jax.losses.correction import CorrectionConfig, corrections
from clawgym_jax.losses.gae import tree_gae
from clawgym_jax.losses.kl import kl_estimate
from clawgym_jax.losses.policy import clipped_surrogate

FOLDER = Path(__file__).parent.parent / "data" / "oracles"
RLAX = json.loads((FOLDER / "rlax.json").read_text(encoding="utf-8"))
TRL = json.loads((FOLDER / "trl.json").read_text(encoding="utf-8"))
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
GROUPS = ["a"] * 3 + ["b"] * 3
CORRECTION = {"sequence": "sequence", "icepop": "icepop"}  # of the other cases: token


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def test_the_fixtures_say_what_made_them() -> None:
    assert RLAX["versions"]["rlax"] == "0.1.9"
    assert TRL["versions"]["trl"] == "1.16.0"


@pytest.mark.parametrize("chain", RLAX["chains"], ids=lambda c: f"{c['gamma']}-{c['lam']}")
def test_a_chain_has_rlaxs_advantages(chain: dict[str, Any]) -> None:
    values = np.array(chain["values"])
    settings = (chain["reward"], chain["gamma"], chain["lam"])
    whole, returns = tree_gae([values], [()], [1], *settings)
    np.testing.assert_allclose(whole[0], chain["advantage"], **CLOSE)
    np.testing.assert_allclose(returns[0], np.array(chain["advantage"]) + values, **CLOSE)
    # Environment tokens between calls are no time steps: cut into calls it is the same chain.
    calls = np.array_split(values, min(3, len(values)))
    before = [() if not i else (i - 1,) for i in range(len(calls))]
    cut, _ = tree_gae(calls, before, [1] * len(calls), *settings)
    np.testing.assert_allclose(np.concatenate(cut), chain["advantage"], **CLOSE)


@pytest.mark.parametrize("case", RLAX["surrogates"], ids=lambda c: str(c["epsilon"]))
def test_the_surrogate_is_rlaxs(case: dict[str, Any]) -> None:
    def loss(new: jax.Array) -> jax.Array:
        out = clipped_surrogate(
            new, jnp.array(case["old"]), jnp.array(case["advantage"]),
            clip_low=case["epsilon"], clip_high=case["epsilon"],
        )  # fmt: skip
        return -jnp.mean(out.objective)

    value, gradient = jax.value_and_grad(loss)(jnp.array(case["new"]))
    np.testing.assert_allclose(value, case["loss"], **CLOSE)
    np.testing.assert_allclose(gradient, case["gradient"], **CLOSE)


def test_advantages_are_trls_but_for_the_deviation() -> None:
    """TRL divides by the deviation of a sample (n - 1) plus 1e-4, we by that of the population."""
    plain = group_advantages(TRL["rewards"], GROUPS, TRL["lengths"], GroupConfig(False))
    np.testing.assert_allclose(plain.advantage, TRL["cases"]["grpo_no_scale"]["advantage"], **CLOSE)
    assert plain.out[-1] == UNGRADED  # a reward of None leaves TRL's baseline too
    scaled = group_advantages(TRL["rewards"], GROUPS, TRL["lengths"]).advantage
    for members in (slice(0, 3), slice(3, 5)):
        rewards = np.array(TRL["rewards"][members], float)
        ours, theirs = np.std(rewards) + 1e-6, np.std(rewards, ddof=1) + 1e-4
        np.testing.assert_allclose(
            scaled[members] * ours / theirs, TRL["cases"]["grpo"]["advantage"][members], **CLOSE
        )


def correction(name: str) -> np.ndarray:
    shape = np.shape(TRL["logprobs"]["old"])
    mask = np.arange(shape[1]) < np.array(TRL["lengths"])[:, None]
    calls = np.where(mask, np.arange(shape[0])[:, None], -1)
    old, rollout = (np.array(TRL["logprobs"][n]) for n in ("old", "rollout"))
    config = CorrectionConfig(CORRECTION.get(name, "token"), cap=TRL["cap"], low=0.5)
    return np.where(mask, corrections(old, rollout, calls, config)[0], 0.0)


@pytest.mark.parametrize("name", TRL["cases"])
def test_the_correction_is_trls(name: str) -> None:
    mask = correction("token") > 0
    np.testing.assert_allclose(
        correction(name)[mask], np.array(TRL["cases"][name]["correction"])[mask], **CLOSE
    )


@pytest.mark.parametrize("name", TRL["cases"])
def test_the_whole_loss_and_its_gradient_are_trls(name: str) -> None:
    """|B| is 6 here: TRL counts the rollout without a reward, with advantage 0."""
    case, settings = TRL["cases"][name], TRL["cases"][name]["settings"]
    mask = np.arange(max(TRL["lengths"])) < np.array(TRL["lengths"])[:, None]
    per_rollout = 1.0 / (len(mask) * mask.sum(1, keepdims=True))
    token_mean = settings["loss_type"] == "bnpo"
    weight = mask * (1.0 / mask.sum() if token_mean else per_rollout)
    advantage = jnp.asarray(np.where(mask, np.array(case["advantage"])[:, None], 0.0))

    def loss(new: jax.Array) -> jax.Array:
        out = clipped_surrogate(
            new, jnp.array(TRL["logprobs"]["old"]), advantage,
            clip_low=TRL["clip_low"], clip_high=TRL["clip_high"],
            dual_clip=settings.get("delta", 0.0),
        )  # fmt: skip
        kl = kl_estimate(new, jnp.array(TRL["logprobs"]["ref"]), "k3")
        kl = kl * out.ratio if settings.get("use_bias_correction_kl") else kl
        terms = -correction(name) * out.objective + settings.get("beta", 0.0) * kl
        return jnp.sum(weight * terms)

    value, gradient = jax.value_and_grad(loss)(jnp.array(TRL["logprobs"]["new"]))
    np.testing.assert_allclose(value, case["loss"], **CLOSE)
    np.testing.assert_allclose(gradient, case["gradient"], **CLOSE)
    assert np.abs(case["gradient"]).max() > 0.01
