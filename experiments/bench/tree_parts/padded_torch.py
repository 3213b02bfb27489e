"""Paths one by one in Hugging Face's Qwen3 on torch, right-padded in batches: loss, backward.

    PYTHON_WITH_TORCH padded_torch.py MODEL_FOLDER

Kind to torch: batches are sorted by length; the attention mask is left out unless asked for, since
under a causal mask no token sees the padding on its right, and torch has a faster path without
one; logits are made at trained tokens only; whoever asks says which expert layers and how many
threads. Memory is
what VmHWM rises by in a step, plus the weights; it means something in the first step only,
since later ones find memory that the process has kept.
Source of the loss: `losses.policy.clipped_surrogate`, in torch's words.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import transformers

from experiments.bench.serving_parts import lines

Columns = dict[str, torch.Tensor]
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Paths:
    """Padded batches of at most `batch_tok` tokens each (or of one path)."""

    def __init__(self, file: str, batch_tok: int) -> None:
        data = np.load(file)
        lengths = data["lengths"]
        starts = np.cumsum([0, *lengths])
        order = np.argsort(-lengths, kind="stable")
        self.batches: list[tuple[torch.Tensor, torch.Tensor, Columns]] = []
        self.padded_tok = 0
        while order.size:
            rows = max(1, batch_tok // int(lengths[order[0]]))
            members, order = order[:rows], order[rows:]
            tokens = np.zeros((len(members), int(lengths[members[0]])), np.int64)
            mask = np.zeros_like(tokens)
            for row, path in enumerate(members):
                tokens[row, : lengths[path]] = data["tokens"][starts[path] : starts[path + 1]]
                mask[row, : lengths[path]] = 1
            place = {int(path): row for row, path in enumerate(members)}
            inside = np.isin(data["path"], members)
            columns = {
                name: torch.from_numpy(data[name][inside])
                for name in ("pred", "target", "weight", "advantage", "old")
            }
            columns["row"] = torch.tensor([place[int(p)] for p in data["path"][inside]])
            self.batches.append((torch.from_numpy(tokens), torch.from_numpy(mask), columns))
            self.padded_tok += tokens.size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Columns]]:
        """(tokens i64[B, N], attention mask i64[B, N], trained tokens) of each batch."""
        return iter(self.batches)


def loss_of(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor | None, at: Columns
) -> torch.Tensor:
    """-sum of W min(rho A, clip(rho) A) at temperature 1."""
    out = model.model(input_ids=tokens, attention_mask=mask, use_cache=False)
    hidden = out.last_hidden_state
    logits = model.lm_head(hidden[at["row"], at["pred"]])
    new = torch.log_softmax(logits, -1).gather(-1, at["target"][:, None])[:, 0]
    ratio = torch.exp(new - at["old"])
    bounded = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * at["advantage"]
    return -torch.sum(at["weight"] * torch.minimum(ratio * at["advantage"], bounded))


def step(model: Any, paths: Paths, masked: bool) -> float:
    """Adds gradients to the model's; -> the loss."""
    total = 0.0
    for tokens, mask, columns in paths:
        loss = loss_of(model, tokens, mask if masked else None, columns)
        loss.backward()
        total += float(loss.detach())
    return total


def reset_peak() -> None:
    """Sets the process's highest memory to what it holds now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_kib() -> int:
    """The highest memory since. `ru_maxrss` is the same, but no less than what the parent held."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measured(model: Any, paths: Paths, experts: str, threads: int, masked: bool) -> dict[str, Any]:
    """One step. experts: an implementation of expert layers as transformers names it, or ""."""
    torch.set_num_threads(threads)
    if experts:
        model.set_experts_implementation(experts)
    model.zero_grad(set_to_none=True)
    reset_peak()
    idle_kib = peak_kib()
    start = time.perf_counter()
    loss = step(model, paths, masked)
    seconds = time.perf_counter() - start
    risen_kib = peak_kib() - idle_kib
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    mib = risen_kib / 1024 + weights_bytes / 2**20
    return {"seconds": seconds, "loss": loss, "mib": round(mib, 1)}


def main(folder: str) -> None:
    send = lines.answers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    send(
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "attention": model.config._attn_implementation,
        }
    )
    paths: Paths | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "read":
            paths = Paths(**command)
            send({"padded_tok": paths.padded_tok, "batches": len(paths.batches)})
        elif do == "step":
            assert paths is not None, "expected a file of paths first"
            send(measured(model, paths, **command))
        else:
            np.save(command["file"], model.get_input_embeddings().weight.grad.numpy())
            send({})


if __name__ == "__main__":
    main(*sys.argv[1:])
