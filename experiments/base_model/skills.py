"""What a model can do, as exact-match rates on documents over held-out names.

Teacher forcing: an answer (a marked stretch) counts if the greedy prediction is right at every
one of its tokens, which is the same as greedy decoding giving it.  Fixed seeds, so that two
models answer the same questions.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from clawgym_jax.core.names import Split
from experiments.base_model import dialogues, documents, markup

Predict = Callable[[np.ndarray], Any]  # i32[B, N] tokens -> i32[B, N], greedy next token
BATCH = 32


@dataclasses.dataclass(frozen=True)
class Skill:
    """Documents of one kind and the row length they fit into."""

    name: str
    kind: documents.Kind
    size: int
    length: int


def _copy(distance: int) -> documents.Kind:
    """Names once, then again: every name of the second part lies `distance` tokens back."""

    def kind(w: markup.Writer) -> str:
        text = "\n".join(w.names(distance // 3)) + "\n"
        return text + "\ncopy\n" + markup.known(text)

    return kind


SKILLS = (
    Skill("copy_32", _copy(32), 0, 96),
    Skill("copy_128", _copy(128), 0, 256),
    Skill("copy_220", _copy(220), 0, 512),
    Skill("lookup", documents.table, 110, 160),
    Skill("csv", documents.csv, 100, 160),
    Skill("json", documents.json_object, 100, 160),
    Skill("path", documents.listing, 90, 160),
    Skill("ends", documents.ends, 60, 96),
    Skill("count", documents.count, 70, 96),
    Skill("sorting", documents.sorting, 50, 64),
    Skill("escape", documents.escape, 90, 128),
    Skill("shell", documents.shell, 120, 256),
    Skill("answer", dialogues.read_and_tell, 200, 256),
    Skill("episode", dialogues.episode, 400, 512),
)


def measure(
    predict: Predict,
    tokenizer: tokenizers.Tokenizer,
    rows: int = 96,
    skills: tuple[Skill, ...] = SKILLS,
    split: Split = "heldout",
) -> dict[str, float]:
    """Share of answers that are right, per skill; `copy_*` per token."""
    return {skill.name: _measure(skill, predict, tokenizer, rows, split) for skill in skills}


def _measure(
    skill: Skill, predict: Predict, tokenizer: tokenizers.Tokenizer, rows: int, split: Split
) -> float:
    right = total = 0
    for start in range(0, rows, BATCH):
        tokens = np.zeros((BATCH, skill.length), np.int32)
        answers = []
        for r in range(BATCH):
            rng = random.Random(f"{skill.name}/{start + r}")
            ids, spans = spans_of(tokenizer, skill.kind(markup.Writer(rng, skill.size, split)))
            ids = ids[: skill.length]
            tokens[r, : len(ids)] = ids
            answers.append([s for s in spans if s[1] <= len(ids)])
        correct = np.asarray(predict(tokens))[:, :-1] == tokens[:, 1:]  # [:, i]: token i + 1
        for r, spans in enumerate(answers):
            for begin, end in spans:
                got = correct[r, begin - 1 : end - 1]
                if skill.name.startswith("copy"):
                    got = got[2:]  # the first name cannot be known to come again
                    right, total = right + int(got.sum()), total + got.size
                else:
                    right, total = right + int(got.all()), total + 1
    return right / max(total, 1)


def spans_of(
    tokenizer: tokenizers.Tokenizer, marked: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and the [begin, end) token ranges that lie wholly in a marked stretch."""
    encoding = tokenizer.encode(markup.plain(marked))
    spans, position = [], 0
    for piece in marked.split(markup.OPEN):
        inside, *after = piece.split(markup.CLOSE)
        if after:
            begin = position
            stop = position + len(inside)
            tokens = [i for i, (a, b) in enumerate(encoding.offsets) if begin <= a and b <= stop]
            if tokens:
                spans.append((tokens[0], tokens[-1] + 1))
        position += sum(len(part) for part in (inside, *after))
    return encoding.ids, spans
