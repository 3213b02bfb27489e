"""Hugging Face `generate` on the CPU: a turn of all rollouts as one batch, greedy.

    PYTHON_WITH_TORCH huggingface.py MODEL_FOLDER EXPERTS

EXPERTS is one of transformers' implementations of expert layers, "" for its own choice. The first
turns of all rollouts are one batch, then the second ones, and so on: `generate` starts and ends a
batch together, so it goes on until the longest completion of the batch is done, and computes every
prompt anew. Prompts are padded on the left where their lengths differ, and only there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import transformers

from experiments.bench.serving_parts import lines


def main(folder: str, experts: str) -> None:
    send = lines.answers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if experts:
        model.set_experts_implementation(experts)
    send(
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "experts": model.config._experts_implementation,
            "attention": model.config._attn_implementation,
        }
    )
    for line in sys.stdin:
        command = json.loads(line)
        send(sample(model, command["rollouts"]))


def sample(model: Any, rollouts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """`ids`: of each rollout's turns; a completion is cut to what was asked for."""
    ids: list[list[list[int]]] = [[] for _ in rollouts]
    start = time.perf_counter()
    for t in range(max(map(len, rollouts))):
        wave = [r for r, turns in enumerate(rollouts) if t < len(turns)]
        asked = [rollouts[r][t] for r in wave]
        out = batch(model, [a["prompt"] for a in asked], max(a["new_tok"] for a in asked))
        for r, turn, completion in zip(wave, asked, out, strict=True):
            ids[r].append(completion[: turn["new_tok"]])
    return {"seconds": time.perf_counter() - start, "ids": ids}


def batch(model: Any, prompts: list[list[int]], new_tok: int) -> list[list[int]]:
    config = transformers.GenerationConfig(
        max_new_tokens=new_tok,
        min_new_tokens=new_tok,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=seen, generation_config=config)
    return [row.tolist() for row in out[:, longest:]]


if __name__ == "__main__":
    main(*sys.argv[1:])
