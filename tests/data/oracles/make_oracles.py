"""Writes what two other libraries compute for our losses: rlax.json and trl.json in this folder.

    python tests/data/oracles/make_oracles.py rlax     (needs rlax 0.1.9; CI does not)
    python tests/data/oracles/make_oracles.py trl      (needs trl 1.16, torch; CI does not)

Each runs the library's own code, in float64, on random numbers that are stored beside the answers;
`tests/losses/test_oracles.py` compares ours. TRL's trainer is driven as it is, from sampled ids to
the gradient: only its generation and its forward pass are replaced by given log-probs.

    rlax.json   chains: truncated GAE of one trajectory; surrogates: clipped policy loss, gradient
    trl.json    one batch of 2 groups x 3; cases: settings, advantages, weights, loss, gradient
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parent


def main() -> None:
    which = sys.argv[1]
    made = {"rlax": rlax_cases, "trl": trl_cases}[which]()
    libraries = {"rlax": ("rlax", "jax"), "trl": ("trl", "torch", "transformers")}[which]
    made["versions"] = {name: importlib.metadata.version(name) for name in libraries}
    text = json.dumps(made, indent=1, sort_keys=True)
    (FOLDER / f"{which}.json").write_text(text + "\n", encoding="utf-8")


def rlax_cases() -> dict[str, Any]:
    import jax
    import rlax

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    chains = []
    for length, gamma, lam in ((1, 1.0, 1.0), (7, 1.0, 1.0), (7, 0.99, 0.95), (12, 0.9, 0.0)):
        values = np.append(rng.normal(size=length), 0.0)  # nothing is worth anything after the end
        rewards = np.zeros(length)
        rewards[-1] = rng.uniform()
        advantage = rlax.truncated_generalized_advantage_estimation(
            rewards, np.full(length, gamma), lam, values
        )
        chains.append(
            {
                "values": values[:-1].tolist(),
                "reward": float(rewards[-1]),
                "gamma": gamma,
                "lam": lam,
                "advantage": np.asarray(advantage).tolist(),
            }
        )
    surrogates = []
    for epsilon in (0.1, 0.2):
        new, old = rng.normal(-1.0, 0.3, size=(2, 16))
        advantage = rng.normal(size=16)

        def loss(new: Any, old: Any = old, advantage: Any = advantage, e: float = epsilon) -> Any:
            return rlax.clipped_surrogate_pg_loss(jax.numpy.exp(new - old), advantage, e)

        value, gradient = jax.value_and_grad(loss)(jax.numpy.asarray(new))
        surrogates.append(
            {
                "new": new.tolist(),
                "old": old.tolist(),
                "advantage": advantage.tolist(),
                "epsilon": epsilon,
                "loss": float(value),
                "gradient": np.asarray(gradient).tolist(),
            }
        )
    return {"chains": chains, "surrogates": surrogates}


# TRL: two prompts with three completions each, of these lengths.
LENGTHS = (5, 3, 4, 2, 5, 1)
REWARDS = (1.0, 0.25, 0.0, 1.0, 0.5, None)
TRL_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_no_scale": {"loss_type": "grpo", "scale_rewards": "none"},
    "kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    "kl_times_ratio": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "token_mean": {"loss_type": "bnpo"},
    "dual_clip": {"loss_type": "grpo", "delta": 1.5},
    "sequence": {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_truncate"},
    "icepop": {
        "loss_type": "grpo",
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.5,
    },
}


def trl_cases() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shape = (len(LENGTHS), max(LENGTHS))
    new = rng.normal(-1.5, 0.4, size=shape)
    data = {
        "new": new,
        "old": new + rng.normal(0.0, 0.3, size=shape),
        "ref": new + rng.normal(0.0, 0.3, size=shape),
    }
    data["rollout"] = data["old"] + rng.normal(0.0, 0.7, size=shape)
    cases = {name: {"settings": s, **_trl_case(s, data)} for name, s in TRL_CASES.items()}
    return {
        "lengths": LENGTHS,
        "rewards": REWARDS,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "cap": 1.5,
        "logprobs": {name: column.tolist() for name, column in data.items()},
        "cases": cases,
    }


def _trl_case(settings: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, Any]:
    """The trainer's own way from completions to loss, with `data` for the forward passes."""
    import torch
    from trl import GRPOTrainer

    given = {name: torch.tensor(column, dtype=torch.float64) for name, column in data.items()}
    given["new"].requires_grad_()

    class Given(GRPOTrainer):  # type: ignore[misc]
        scored = "old"

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            ids = [[5] * (n - 1) + [self.eos_token_ids[0]] for n in LENGTHS]
            logprobs = [row[:n] for row, n in zip(data["rollout"].tolist(), LENGTHS, strict=True)]
            return [[4]] * len(ids), ids, None, ["x"] * len(ids), logprobs, {}, None, None

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kw: Any) -> Any:
            name = "ref" if model is self.ref_model else self.scored
            return given[name], torch.zeros_like(given[name]), None

    trainer = _trainer(Given, settings)
    trainer.use_vllm = True  # its correction, without an engine: `_generate` is ours
    trainer.model.train()
    inputs = [{"prompt": "a"}] * 3 + [{"prompt": "b"}] * 3
    inputs = trainer._generate_and_score_completions(inputs)
    trainer.scored, trainer.current_gradient_accumulation_steps = "new", 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    ratio = inputs["importance_sampling_ratio"].expand(len(LENGTHS), max(LENGTHS))
    return {
        "advantage": inputs["advantages"].tolist(),
        "correction": ratio.tolist(),
        "loss": loss.item(),
        "gradient": given["new"].grad.tolist(),
    }


def _trainer(kind: type, settings: dict[str, Any]) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig

    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "x": 5}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    shape = {"vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    folder = tempfile.mkdtemp()
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder)

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return list(REWARDS)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=max(LENGTHS),
        epsilon=0.2,
        epsilon_high=0.28,
        **{
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.5,
            **settings,
        },
    )
    rows = Dataset.from_list([{"prompt": p} for p in "ab"])
    return kind(
        model=folder, reward_funcs=reward, args=config, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip


if __name__ == "__main__":
    main()
