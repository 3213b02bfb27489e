"""Names why a prompt does not simply append to what its chain sampled last.

Not here: which tokens are shared (ledger.py), what to do about it (tree). The names are for people
and for counting; nothing branches on them.
Invariant: no names exactly when the prompt starts with the chain's last prompt and completion, or
when it is the first of the main chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.types import CallRecord, Role
from clawgym_jax.proxy.splice import Prompt

_AUXILIARY = (Role.TITLE, Role.COMPACTION)
_NEW_ROOT = {Role.SUBAGENT: "sub-agent", Role.TITLE: "title", Role.COMPACTION: "compaction"}


@dataclass(frozen=True, slots=True)
class Earlier:
    """The newest recorded call of a chain."""

    call_id: str
    role: Role
    ids: np.ndarray  # i32[P + C]: its prompt and completion


def name_breaks(
    prompt: Prompt, role: Role, last: Earlier | None, ordinal: int, attempt: int
) -> tuple[str, ...]:
    """last: the call before this one in its chain. attempt > 0: sampled before."""
    if last is None:
        root = _NEW_ROOT.get(role)
        names = (root,) if root and ordinal else ()
    elif _starts_with(prompt.ids, last.ids):
        names = ()
    elif attempt:
        names = ("retry",)
    elif role in _AUXILIARY or (role in _NEW_ROOT and role is not last.role):
        names = (_NEW_ROOT[role],)
    elif last.role in _AUXILIARY:
        names = (str(last.role),)
    elif last.call_id in prompt.continues:
        names = ("edited history",)
    else:
        names = ("dropped turn",)
    return tuple(dict.fromkeys((*names, *prompt.causes)))


def extends(prompt_ids: np.ndarray, call: CallRecord) -> bool:
    """The prompt starts with the call's prompt and completion."""
    return _starts_with(prompt_ids, np.concatenate([call.prompt_ids, call.completion.ids]))


def _starts_with(ids: np.ndarray, start: np.ndarray) -> bool:
    return ids.size >= start.size and bool(np.array_equal(ids[: start.size], start))
