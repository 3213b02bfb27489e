"""Writes tests/model/fixtures: tiny Qwen3 weights and the logits transformers gives for them.

    python tests/model/make_fixtures.py     (needs torch 2.13 and transformers 5; CI does not)

Several cases share one weights file and differ in configuration only, which keeps the folder
near 150 kB.  Weights are large enough that breaking any one feature moves the logits by far
more than the tolerance of the test (it says by how much for each feature).
"""

import json
import pathlib
import tempfile
from typing import Any

import safetensors.torch
import torch
import transformers

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
    "rope_theta": 1e6,
}
# name: (weights file, changes to the configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("moe", {}),
    "no_norm_topk": ("moe", {"norm_topk_prob": False}),
    "tied": ("moe", {"tie_word_embeddings": True}),
    "theta_1e4": ("moe", {"rope_theta": 1e4}),
    "top_4": ("moe", {"num_experts_per_tok": 4}),
    "sparse_step_2": ("sparse", {"decoder_sparse_step": 2}),
    "mlp_only": ("mlp_only", {"mlp_only_layers": [1]}),
    "dense": ("dense", {}),
}


def make(name: str, changes: dict[str, Any]) -> torch.nn.Module:
    """A model in float32 with random weights, all of them well away from trivial."""
    torch.manual_seed(0)
    options = SHAPE | MOE | changes
    theta = options.pop("rope_theta")
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if name == "dense":
        shape = {k: v for k, v in options.items() if k in SHAPE or k == "rope_parameters"}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    else:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**options))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in path else 0.3 * noise)
    return model.eval()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 12), generator=torch.manual_seed(1))
    results: dict[str, torch.Tensor] = {"tokens": tokens.to(torch.int32)}
    configs: dict[str, Any] = {}
    for name, (weights, changes) in CASES.items():
        model = make(name, changes)
        file = FOLDER / f"{weights}.safetensors"
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = safetensors.torch.load_file(f"{folder}/model.safetensors")
            configs[name] = {
                "weights": weights,
                "config": json.loads(pathlib.Path(folder, "config.json").read_text()),
            }
        if name in ("base", "sparse_step_2", "mlp_only", "dense"):
            safetensors.torch.save_file(saved, file, metadata={"format": "pt"})
        else:  # the same seed gives the same weights
            stored = safetensors.torch.load_file(file)
            assert all(torch.equal(saved[k], stored[k]) for k in saved), name
        with torch.no_grad():
            results[name] = model(tokens).logits.contiguous()
    safetensors.torch.save_file(results, FOLDER / "logits.safetensors")
    (FOLDER / "configs.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    main()
