"""Which Hugging Face tensors a parameter of ours is made of, with their shapes.

We keep linear weights as [in, out] and stack what a scan or a grouped matmul walks over: layers
of one kind, then experts.  Hugging Face keeps [out, in], one tensor per layer and expert.

Invariant: every tensor of the model is in exactly one `Stack`, at one place.
Not here: bytes.  Source: `state_dict` of Qwen3ForCausalLM and Qwen3MoeForCausalLM as saved by
`save_pretrained` (which splits the fused experts of transformers 5 again).
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clawgym_jax.core.errors import ModelError
from clawgym_jax.model.config import Qwen3Config

Path = tuple[Any, ...]  # of a parameter in the flat state: ("segments", 0, "q")
Shape = tuple[int, ...]

_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Stack:
    """One parameter of ours: equal tensors of theirs under leading layer and expert axes."""

    lead: Shape  # (), (layers,) or (layers, experts)
    names: tuple[str, ...]  # one per place in `lead`, last axis fastest
    theirs: Shape  # of each tensor in the file
    transposed: bool

    @property
    def shape(self) -> Shape:
        """Of our parameter."""
        return self.lead + (self.theirs[::-1] if self.transposed else self.theirs)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The part of a stack that one layer owns, or all of a parameter that no layer does."""

    path: Path
    layer: int | None  # row of the parameter's first axis
    names: tuple[str, ...]


def stacks(config: Qwen3Config) -> dict[Path, Stack]:
    """Every parameter of the model, by its path in `qwen3.abstract`'s flat state."""
    d, v = config.hidden_size, config.vocab_size
    out: dict[Path, Stack] = {("embed",): Stack((), ("model.embed_tokens.weight",), (v, d), False)}
    start = 0
    for segment, (is_moe, count) in enumerate(config.segments):
        layers = range(start, start + count)
        start += count
        for ours, (theirs, shape, transposed) in _layer(config, is_moe).items():
            experts = range(config.num_experts) if "{expert}" in theirs else None
            out["segments", segment, ours] = Stack(
                lead=(count,) if experts is None else (count, len(experts)),
                names=tuple(
                    f"model.layers.{layer}.{theirs.format(expert=expert)}.weight"
                    for layer in layers
                    for expert in experts or (0,)
                ),
                theirs=shape,
                transposed=transposed,
            )
    out["norm",] = Stack((), ("model.norm.weight",), (d,), False)
    if not config.tie_word_embeddings:
        out["head",] = Stack((), (_HEAD,), (v, d), True)
    return out


def _layer(config: Qwen3Config, is_moe: bool) -> dict[str, tuple[str, Shape, bool]]:
    """Our name of a layer's parameter: theirs, its shape there, whether it is transposed."""
    d, hd = config.hidden_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    out: dict[str, tuple[str, Shape, bool]] = {
        "input_norm": ("input_layernorm", (d,), False),
        "q": ("self_attn.q_proj", (q, d), True),
        "k": ("self_attn.k_proj", (kv, d), True),
        "v": ("self_attn.v_proj", (kv, d), True),
        "o": ("self_attn.o_proj", (d, q), True),
        "q_norm": ("self_attn.q_norm", (hd,), False),
        "k_norm": ("self_attn.k_norm", (hd,), False),
        "post_norm": ("post_attention_layernorm", (d,), False),
    }
    prefix, f = ("mlp.", config.intermediate_size)
    if is_moe:
        out["router"] = ("mlp.gate", (config.num_experts, d), True)
        prefix, f = "mlp.experts.{expert}.", config.moe_intermediate_size
    for ours, theirs in _MLP.items():
        out[ours] = (prefix + theirs, (d, f) if ours == "down" else (f, d), True)
    return out


def in_file_order(stacks: Mapping[Path, Stack]) -> Iterator[Rows]:
    """Everything once, layer after layer, as a reader that streams would want it."""
    rows = [
        (name_order, Rows(path, layer, names))
        for path, stack in stacks.items()
        for name_order, layer, names in _rows(stack)
    ]
    for _, row in sorted(rows, key=lambda pair: pair[0]):
        yield row


def _rows(stack: Stack) -> Iterator[tuple[int, int | None, tuple[str, ...]]]:
    """(number of the layer in the model, row in the stack, names)."""
    if not stack.lead:
        yield -1, None, stack.names
        return
    each = len(stack.names) // stack.lead[0]
    for row in range(stack.lead[0]):
        names = stack.names[row * each : (row + 1) * each]
        yield int(names[0].split(".")[2]), row, names


def check(found: Mapping[str, Shape], config: Qwen3Config, where: str) -> None:
    """Raises ModelError that names every missing, unexpected and misshapen tensor."""
    expected = {name: s.theirs for s in stacks(config).values() for name in s.names}
    ignored = {_HEAD} if config.tie_word_embeddings else set()  # written by some, the embedding
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and name not in ignored]
    misshapen: dict[tuple[Shape, Shape], list[str]] = {}
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            misshapen.setdefault((shape, found[name]), []).append(name)
    lines = [f"missing: {text}" for text in summarise(missing)]
    lines += [f"unexpected: {text}" for text in summarise(unexpected)]
    for (shape, got), names in misshapen.items():
        lines += [f"expected shape {shape}, got {got}: {text}" for text in summarise(names)]
    if not lines:
        return
    if any(name.endswith("mlp.experts.gate_up_proj") for name in unexpected):
        lines.append("the experts are fused: save_pretrained(..., save_original_format=True)")
    lines.append("do config.json and the weights belong together, and is the download complete?")
    raise ModelError(f"{where}: these are not the weights of config.json:\n  " + "\n  ".join(lines))


def summarise(names: Iterable[str]) -> list[str]:
    """One line per kind of name: how many there are, and the first three."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    lines = []
    for kind, members in kinds.items():
        some = ", ".join(members[:3]) + (", ..." if len(members) > 3 else "")
        lines.append(some if len(members) <= 3 else f"{len(members)} of {kind}: {some}")
    return lines
