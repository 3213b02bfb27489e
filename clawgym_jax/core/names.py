"""Made-up lowercase names and the rule that keeps their splits apart.

Synthetic tasks and the tiny base model's pretraining text need names that nobody has seen
before ("banor", "ketu").  A stable hash of the name itself says which split it belongs to, so
that no list has to be shared: pretraining, cold start, training and held-out evaluation draw
from disjoint sets by construction.

A name is two syllables, each a consonant, a vowel and sometimes one of `FINALS`: 4 to 6
letters, over 100,000 names, and exactly two tokens for the tiny model's tokenizer.

Invariant: `name_split(draw_name(rng, split)) == split`, on every machine and in every process
(zlib.crc32, not `hash`).  This is not a source of secrets and knows nothing of tokenizers.
"""

import random
import re
import zlib
from typing import Literal, get_args

Split = Literal["pretrain", "cold", "train", "heldout"]

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
FINALS = "nrs"  # letters that may close a syllable

NAME_PATTERN = re.compile(f"(?:[{CONSONANTS}][{VOWELS}][{FINALS}]?){{2}}")

# Ordinary words of the same shape: they occur in instructions, so they are never names.
RESERVED = frozenset(
    """
    bane bare base bases basis begin bones bonus bore data date done file files five give
    given gives have here hero home human java lane lanes late later like line liner lines
    lives lose loses love loves made make makes male mine mines minus mode modes more move
    moves name names nine node nodes none nose note notes pages paper parse person pipe pose
    poses pure rate rates rerun rise rises role roles rose rule rules runner sale sales same
    save sense serve seven side sides sinus siren site sites size some sure take tape time
    timer times tire tone tune verse verses vote zero zone
    """.split()
)

_SPLIT_OF_BUCKET: tuple[Split, ...] = (
    "pretrain", "pretrain", "pretrain", "cold", "train", "train", "train", "heldout",
)  # fmt: skip


def name_split(name: str) -> Split:
    """The one split that may use `name`."""
    return _SPLIT_OF_BUCKET[zlib.crc32(name.encode("utf-8")) % len(_SPLIT_OF_BUCKET)]


def draw_name(rng: random.Random, split: Split) -> str:
    """Draws one name of `split`, uniformly over syllables, by rejection."""
    if split not in get_args(Split):
        raise ValueError(f"split: expected one of {get_args(Split)}, got {split!r}")
    while True:
        name: str = _syllable(rng) + _syllable(rng)
        if name not in RESERVED and name_split(name) == split:
            return name


def _syllable(rng: random.Random) -> str:
    final: str = rng.choice(("", "", *FINALS))
    return rng.choice(CONSONANTS) + rng.choice(VOWELS) + final
