"""Says where the prefixes of two calls part, and what stands there instead.

Works on token ids: both are cut into messages at the token that starts a turn, and the first pair
of messages that differ is looked at. The causes that the proxy named when the call came in
(`CallRecord.breaks`) are told beside it.
Not here: naming causes (proxy/breaks.py), printing many calls (report/call_list.py).
Invariant: `appends` exactly when the later prompt starts with the earlier prompt and completion.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.ids import common_prefix
from clawgym_jax.core.types import CallRecord

Decode = Callable[[np.ndarray], str]
_SHOWN_CHARS = 60

CHANGED = "changed"
TAKEN_AWAY = "taken away"
MOVED = "moved"
INSERTED = "inserted"
NOT_THERE = "the sampled turn is not there"
EDITED_TURN = "the sampled turn is there in other words"
SAME = "the same prompt again"
SHORTER = "the history ends here"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a call's prompt relates to what an earlier call had seen and said."""

    earlier: str  # call ids
    later: str
    appends: bool
    shared_tok: int  # longest common prefix
    earlier_tok: int  # of the earlier call's prompt and completion
    message: int = -1  # index of the first message that differs; -1 where none does
    role: str = ""  # of that message in the earlier call
    what: str = ""  # one of the names above
    before: str = ""  # what the earlier call had there, from the first difference on
    after: str = ""  # what the later call has there
    causes: tuple[str, ...] = ()  # as the proxy named them

    def sentence(self) -> str:
        """For people."""
        if self.appends:
            return f"appends to {self.earlier}"
        named = f" [{', '.join(self.causes)}]" if self.causes else ""
        if self.what == SAME:
            return f"{self.what} as {self.earlier}{named}"
        return (
            f"parts from {self.earlier} after {self.shared_tok} of {self.earlier_tok} tokens, in "
            f"message {self.message} ({self.role}): {self.what}{named}; "
            f"was {self.before!r}, is {self.after!r}"
        )


def explain(
    earlier: CallRecord, later: CallRecord, decode: Decode, turn_start_id: int
) -> Explanation:
    """Where and why `later`'s prompt leaves `earlier`'s prompt and completion.

    turn_start_id: the token that starts a message (<|im_start|>).
    """
    old = np.concatenate([earlier.prompt_ids, earlier.completion.ids])
    new = later.prompt_ids
    shared = common_prefix(old, new)
    if shared == old.size:
        return Explanation(earlier.call_id, later.call_id, True, shared, int(old.size))
    ours, theirs = _messages(old, turn_start_id), _messages(new, turn_start_id)
    index = _first_difference(ours, theirs)
    return Explanation(
        earlier.call_id,
        later.call_id,
        False,
        shared,
        int(old.size),
        index,
        _role(ours[index], decode, turn_start_id),
        _what(earlier, later, ours, theirs, index),
        _shown(old[shared:], decode),
        _shown(new[shared:], decode),
        later.breaks,
    )


def _what(
    earlier: CallRecord,
    later: CallRecord,
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    index: int,
) -> str:
    if np.array_equal(earlier.prompt_ids, later.prompt_ids):
        return SAME
    mine = ours[index]
    if index >= len(theirs):
        return SHORTER
    if index == len(ours) - 1:  # the message that was sampled
        return EDITED_TURN if _starts_alike(mine, theirs[index]) else NOT_THERE
    if _among(theirs[index], ours[index + 1 :]) or _re_presents(later, theirs, index):
        return MOVED if _among(mine, theirs[index + 1 :]) else TAKEN_AWAY
    return INSERTED if _among(mine, theirs[index + 1 :]) else CHANGED


def _re_presents(later: CallRecord, theirs: Sequence[np.ndarray], index: int) -> bool:
    """The later call's message at `index` is a spliced turn."""
    start = sum(message.size for message in theirs[:index])
    end = start + theirs[index].size
    return any(start <= span.start < end for span in later.spans)


def _messages(ids: np.ndarray, turn_start_id: int) -> list[np.ndarray]:
    """The ids, cut before every token that starts a turn; nothing is lost."""
    starts = np.flatnonzero(ids == turn_start_id)
    cuts = [0, *(int(s) for s in starts if s), int(ids.size)]
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]


def _first_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> int:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if not np.array_equal(mine, other):
            return index
    return min(len(ours) - 1, len(theirs))


def _among(message: np.ndarray, others: Sequence[np.ndarray]) -> bool:
    return any(np.array_equal(message, other) for other in others)


def _starts_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """The same role: the ids up to the message's text agree (start, role, line break)."""
    return common_prefix(one, other) >= min(3, one.size)


def _role(message: np.ndarray, decode: Decode, turn_start_id: int) -> str:
    head = message[:8]
    if head.size and int(head[0]) == turn_start_id:
        head = head[1:]
    return decode(head).partition("\n")[0].strip() or "?"


def _shown(ids: np.ndarray, decode: Decode) -> str:
    text = decode(ids[:_SHOWN_CHARS])
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def explain_chains(
    calls: Sequence[CallRecord], decode: Decode, turn_start_id: int
) -> dict[str, Explanation]:
    """For every call but the first of its chain: how it relates to the one before it there."""
    last: dict[str, CallRecord] = {}
    out: dict[str, Explanation] = {}
    for call in sorted(calls, key=lambda call: call.ordinal):
        if call.chain in last:
            out[call.call_id] = explain(last[call.chain], call, decode, turn_start_id)
        last[call.chain] = call
    return out
