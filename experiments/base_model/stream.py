"""Rows of tokens and loss weights from synthetic documents.

A row starts at the start of a document and is filled with documents until it is full; the last
one is cut.  Kinds are drawn by weight; `repeats` is the share of plain repetition.

Invariant: row i of seed s is the same on every machine (own generator per row).
"""

import random
from collections.abc import Iterator

import numpy as np
import tokenizers

from experiments.base_model import dialogues, documents, markup

EPISODE_TOKENS = 150  # shorter room is not given to whole episodes
NOISE_WEIGHT = 0.1  # loss weight of characters that cannot be predicted

KINDS: dict[documents.Kind, float] = {
    documents.repeat: 1.0,
    documents.table: 1.6,
    documents.csv: 0.5,
    documents.json_object: 0.6,
    documents.listing: 0.9,
    documents.shell: 1.0,
    documents.ends: 0.7,
    documents.count: 1.8,
    documents.sorting: 0.2,
    documents.escape: 0.8,
    documents.instruction: 0.4,
    dialogues.turns: 0.6,
    dialogues.read_and_tell: 2.0,
    dialogues.episode: 2.2,
}


def encode(tokenizer: tokenizers.Tokenizer, marked: str) -> tuple[list[int], list[float]]:
    """Token ids of marked text and the weight of each: the mean over its characters."""
    text, flags, inside = [], [0], 0
    for character in marked:
        if character == markup.OPEN:
            inside = 1
        elif character == markup.CLOSE:
            inside = 0
        else:
            text.append(character)
            flags.append(flags[-1] + inside)  # running number of predictable characters
    encoding = tokenizer.encode("".join(text))
    weights = [
        NOISE_WEIGHT + (1 - NOISE_WEIGHT) * (flags[b] - flags[a]) / max(1, b - a)
        for a, b in encoding.offsets
    ]
    return encoding.ids, weights


def row(
    tokenizer: tokenizers.Tokenizer, seed: str, length: int, repeats: float
) -> tuple[np.ndarray, np.ndarray]:
    """i32[length + 1] tokens and f32[length + 1] weights."""
    rng = random.Random(seed)
    kinds, shares = list(KINDS), list(KINDS.values())
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) <= length:
        kind = documents.repeat if rng.random() < repeats else rng.choices(kinds, shares)[0]
        left = length + 1 - len(ids)
        size = max(24, int(left * rng.uniform(0.4, 1.0)))
        if kind is dialogues.episode and left < EPISODE_TOKENS:
            kind = dialogues.read_and_tell if left > 60 else documents.table
        tokens, token_weights = encode(tokenizer, kind(markup.Writer(rng, size)))
        ids += tokens
        weights += token_weights
    return np.array(ids[: length + 1], np.int32), np.array(weights[: length + 1], np.float32)


def batches(
    tokenizer: tokenizers.Tokenizer, seed: int, rows: int, length: int, repeats: float, start: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless i32[rows, length + 1], f32[rows, length + 1]; batch `start` first."""
    index = start
    while True:
        made = [
            row(tokenizer, f"{seed}/{length}/{index}/{r}", length, repeats) for r in range(rows)
        ]
        yield np.stack([m[0] for m in made]), np.stack([m[1] for m in made])
        index += 1
