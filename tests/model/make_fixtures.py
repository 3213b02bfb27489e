"""Writes tests/model/fixtures: tiny Qwen3 weights and what transformers computes for them.

    python tests/model/make_fixtures.py     (needs torch 2.13 and transformers 5; CI does not)

Several cases share one weights file and differ in configuration only, which keeps the folder
near 200 kB.  Weights are large enough that breaking any one feature moves the logits by far
more than the tolerance of the tests (`test_hf_parity` says by how much for each feature).

    configs.json         case: weights file, config.json as transformers saved it
    logits.safetensors   tokens, float32 logits of each case, bfloat16 logits as <case>.bf16
    rope.json            rotary case: the part of config.json that matters, attention factor
    rope.safetensors     positions, and inverse frequencies, cos and sin of each rotary case
"""

import json
import pathlib
import tempfile
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

FOLDER = pathlib.Path(__file__).parent / "fixtures"
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def plain(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def yarn(theta: float, factor: float | None, trained: int | None, **options: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, **options}
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    return {"rope_parameters": rope}


def consistent(changes: dict[str, Any]) -> dict[str, Any]:
    """With the length that the factor says, which transformers 4 believes instead of it."""
    rope = changes["rope_parameters"]
    length = rope["factor"] * rope["original_max_position_embeddings"]
    return changes | {"max_position_embeddings": int(length)}


# name: (weights file, changes to the configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("moe", {}),
    "no_norm_topk": ("moe", {"norm_topk_prob": False}),
    "tied": ("moe", {"tie_word_embeddings": True}),
    "theta_1e4": ("moe", plain(1e4)),
    "top_4": ("moe", {"num_experts_per_tok": 4}),
    "yarn": ("moe", consistent(yarn(50.0, 4.0, 64))),
    "yarn_attention_factor": (
        "moe",
        consistent(yarn(50.0, 4.0, 64, attention_factor=1.5, truncate=False)),
    ),
    "sparse_step_2": ("sparse", {"decoder_sparse_step": 2}),
    "mlp_only": ("mlp_only", {"mlp_only_layers": [1]}),
    "dense": ("dense", {}),
    "yarn_dense": (
        "dense",
        consistent(yarn(50.0, 8.0, 32, beta_fast=4, mscale=2.0, mscale_all_dim=0.5)),
    ),
}
# Seeds whose models round well: float32, torch's and ours, is within 4e-6 of float64.
SEEDS = {"moe": 0, "sparse": 2, "mlp_only": 0, "dense": 2}
FIRST = ("base", "sparse_step_2", "mlp_only", "dense")  # whose weights are kept

ROPE_CASES: dict[str, dict[str, Any]] = {
    "theta_1e6": plain(1e6),
    "theta_1e4": plain(1e4),
    "theta_1e7": plain(1e7),
    "yarn_4": yarn(1e6, 4.0, 32768),
    "yarn_no_length": yarn(1e6, 2.0, None),
    "yarn_no_factor": yarn(1e6, None, 16384),
    "yarn_factor_1": yarn(1e6, 1.0, 32768),
    "yarn_attention_factor": yarn(1e6, 4.0, 32768, attention_factor=0.9),
    "yarn_mscale": yarn(1e4, 40.0, 4096, mscale=0.707, mscale_all_dim=1.2),
    "yarn_mscale_alone": yarn(1e4, 40.0, 4096, mscale=0.707),
    "yarn_betas": yarn(1e6, 4.0, 32768, beta_fast=16.5, beta_slow=2),
    "yarn_untruncated": yarn(1e7, 4.0, 262144, truncate=False),
    "yarn_step": yarn(1e4, 4.0, 6),  # the range between the betas is empty
}
POSITIONS = (0, 1, 7, 511, 4096, 40_959, 131_071)


def config_of(name: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    options = SHAPE | plain(1e6) | changes
    if "dense" in name:
        return transformers.Qwen3Config(**options)
    return transformers.Qwen3MoeConfig(**(MOE | options))


def make(name: str, weights: str, changes: dict[str, Any]) -> torch.nn.Module:
    """A model in float32 with random weights, all of them well away from trivial."""
    torch.manual_seed(SEEDS[weights])
    config = config_of(name, changes)
    kind = transformers.Qwen3ForCausalLM if "dense" in name else transformers.Qwen3MoeForCausalLM
    model = kind(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in path else 0.3 * noise)
    return model.eval()


def write_logits() -> None:
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 12), generator=torch.manual_seed(1))
    results: dict[str, torch.Tensor] = {"tokens": tokens.to(torch.int32)}
    configs: dict[str, Any] = {}
    for name, (weights, changes) in CASES.items():
        model = make(name, weights, changes)
        file = FOLDER / f"{weights}.safetensors"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = safetensors.torch.load_file(f"{folder}/model.safetensors")
            configs[name] = {
                "weights": weights,
                "config": json.loads(pathlib.Path(folder, "config.json").read_text()),
            }
        if name in FIRST:
            safetensors.torch.save_file(saved, file, metadata={"format": "pt"})
        else:  # the same seed gives the same weights
            stored = safetensors.torch.load_file(file)
            assert all(torch.equal(saved[k], stored[k]) for k in saved), name
        with torch.no_grad():
            results[name] = model(tokens).logits.contiguous()
            if name in FIRST:
                results[f"{name}.bf16"] = model.bfloat16()(tokens).logits.contiguous()
    safetensors.torch.save_file(results, FOLDER / "logits.safetensors")
    (FOLDER / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")


def write_rope() -> None:
    positions = torch.tensor([POSITIONS])
    tables: dict[str, torch.Tensor] = {"positions": positions[0].to(torch.int32)}
    kept: dict[str, Any] = {}
    for name, changes in ROPE_CASES.items():
        options = {"head_dim": 128, "max_position_embeddings": 65536} | changes
        stated = json.loads(json.dumps(options))  # before the class fills in what is left out
        rope = modeling_qwen3.Qwen3RotaryEmbedding(transformers.Qwen3Config(**options))
        cos, sin = rope(torch.zeros(1), positions)
        half = rope.inv_freq.shape[0]  # the other half repeats it
        tables[f"{name}.inv_freq"] = rope.inv_freq.contiguous()
        tables[f"{name}.cos"] = cos[0, :, :half].contiguous()
        tables[f"{name}.sin"] = sin[0, :, :half].contiguous()
        kept[name] = {"config": stated, "attention_factor": rope.attention_scaling}
    safetensors.torch.save_file(tables, FOLDER / "rope.safetensors")
    (FOLDER / "rope.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_logits()
    write_rope()
