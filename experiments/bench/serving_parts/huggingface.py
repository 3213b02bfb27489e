"""Hugging Face `generate` on the CPU: all prompts as one batch, greedy, nothing ends early.

    PYTHON_WITH_TORCH huggingface.py MODEL_FOLDER EXPERTS

EXPERTS is one of transformers' implementations of expert layers, "" for its own choice. All prompts
have one length, so that no row is padded: the best case for a batch.
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
        send(sample(model, command["prompts"], command["new_tok"]))


def sample(model: Any, prompts: list[list[int]], new_tok: int) -> dict[str, Any]:
    config = transformers.GenerationConfig(
        max_new_tokens=new_tok,
        min_new_tokens=new_tok,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "ids": out[:, ids.shape[1] :].tolist()}


if __name__ == "__main__":
    main(*sys.argv[1:])
