"""Text of single tokens, and how surprised the policy was by each.

A byte-level token may be a part of a character; such tokens are joined until they are text.
Not here: markup. Invariant: the pieces' texts add up to the text of all ids.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion
from clawgym_jax.proxy.chat_template import ChatCodec

_BROKEN = "�"
_LONGEST_CHARACTER = 4  # bytes, so at most this many tokens
LEVELS = ("p ≥ 0.9", "p ≥ 0.5", "p ≥ 0.1", "p ≥ 0.01", "p < 0.01")
_BORDERS = tuple(-math.log(p) for p in (0.9, 0.5, 0.1, 0.01))


@dataclass(frozen=True, slots=True)
class Piece:
    """Usually one token."""

    text: str
    logprob: float  # sum over the tokens in it
    version: int  # of the weights that sampled the last of them

    @property
    def level(self) -> int:
        """Index into LEVELS."""
        return bisect.bisect_left(_BORDERS, -self.logprob)


def load_codec(folder: Path | None) -> tuple[ChatCodec | None, str]:
    """(codec, "") or (None, why there is none)."""
    if folder is None:
        return None, "no tokenizer was found (expected in the run's model/ or model.path)"
    try:
        return ChatCodec.from_folder(folder), ""
    except (ConfigError, OSError, ValueError) as error:
        return None, f"the tokenizer could not be read: {error}"


def pieces(codec: ChatCodec, completion: Completion) -> list[Piece]:
    """The sampled tokens as text."""
    ids, logprobs = completion.ids, completion.logprobs
    out, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = codec.decode(ids[start:stop])
        whole = not text.endswith(_BROKEN) or stop - start == _LONGEST_CHARACTER
        if not whole and stop < len(ids):
            continue
        out.append(Piece(text, _total(logprobs[start:stop]), _last(completion.versions[:stop])))
        start = stop
    return out


def versions(completion: Completion) -> str:
    """The weight versions that sampled a completion: "3", or "3, 4" where they were swapped."""
    return ", ".join(str(v) for v in np.unique(completion.versions).tolist()) or "–"


def _total(logprobs: np.ndarray) -> float:
    return float(np.sum(logprobs, dtype=np.float64))


def _last(values: Sequence[int] | np.ndarray) -> int:
    return int(values[-1]) if len(values) else 0
