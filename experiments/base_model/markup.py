"""Synthetic documents as text in which predictable stretches are marked.

`known("banor")` marks characters that follow from what stands before them (an answer, the rest
of a repetition); everything else (fresh names, the choice of a format) is noise that the model
need not spend itself on.  The loss weights the two 1 and 0.1.

`Writer` is what every kind of document draws from: seeded randomness, fresh names of the
pretraining split (`clawgym_jax.core.names`), and `size`, the tokens it may use.
"""

import functools
import itertools
import random
from collections.abc import Sequence

from clawgym_jax.core import names

OPEN, CLOSE = "\x01", "\x02"
EXTENSIONS = (".txt", ".csv", ".log", ".md", ".json", ".dat", ".cfg")


def known(text: str) -> str:
    """Marks `text` as predictable; marks inside it are absorbed."""
    return OPEN + text.replace(OPEN, "").replace(CLOSE, "") + CLOSE


def plain(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


@functools.cache
def names_of(split: names.Split) -> tuple[str, ...]:
    """All names of a split, in alphabetical order."""
    syllables = [
        c + v + f for c in names.CONSONANTS for v in names.VOWELS for f in ("", *names.FINALS)
    ]
    candidates = (a + b for a, b in itertools.product(syllables, repeat=2))
    return tuple(n for n in candidates if n not in names.RESERVED and names.name_split(n) == split)


class Writer:
    """Seeded source of names and choices for one document of about `size` tokens."""

    def __init__(self, rng: random.Random, size: int, split: names.Split = "pretrain") -> None:
        self.rng = rng
        self.size = size
        self._pool = names_of(split)

    def name(self) -> str:
        return self._pool[int(self.rng.random() * len(self._pool))]

    def names(self, count: int) -> list[str]:
        """`count` different names."""
        out: dict[str, None] = {}
        while len(out) < count:
            out[self.name()] = None
        return list(out)

    def value(self) -> str:
        """What a key may be set to: mostly a name, at times a number."""
        if self.rng.random() < 0.85:
            return self.name()
        return str(self.rng.randrange(10, 1000))

    def count(self, low: int, high: int, tokens_each: int) -> int:
        """How many items of `tokens_each` tokens to write: within bounds and `size`."""
        return self.rng.randint(low, max(low, min(high, self.size // tokens_each)))

    def pick(self, *options: str) -> str:
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def sample(self, items: Sequence[str], count: int) -> list[str]:
        return self.rng.sample(list(items), min(count, len(items)))
