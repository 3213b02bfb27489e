"""Names why a prompt does not simply append to what its chain sampled last.

Not here: which tokens are shared (ledger.py), what to do about it (tree). The names are for people
and for counting; nothing branches on them.
Invariant: no names exactly when the prompt starts with the chain's last prompt and completion, or
when it is the first of the main chain.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.core.types import CallRecord, Role
from clawgym_jax.proxy.splice import Prompt

_NEW_ROOT = {Role.SUBAGENT: "sub-agent", Role.TITLE: "title", Role.COMPACTION: "compaction"}


def name_breaks(
    prompt: Prompt, role: Role, last: CallRecord | None, ordinal: int, attempt: int
) -> tuple[str, ...]:
    """last: the newest recorded call of the same chain. attempt > 0: sampled before."""
    if last is None:
        root = _NEW_ROOT.get(role)
        names = (root,) if root and ordinal else ()
    elif extends(prompt.ids, last):
        names = ()
    elif attempt:
        names = ("retry",)
    elif role in _NEW_ROOT and role is not last.role:
        names = (_NEW_ROOT[role],)
    elif last.role in (Role.COMPACTION, Role.TITLE) and role is not last.role:
        names = (str(last.role),)
    elif last.call_id in prompt.continues:
        names = ("edited history",)
    else:
        names = ("dropped turn",)
    return tuple(dict.fromkeys((*names, *prompt.causes)))


def extends(prompt_ids: np.ndarray, call: CallRecord) -> bool:
    """The prompt starts with the call's prompt and completion."""
    seen = call.prompt_tok
    end = seen + call.completion_tok
    return (
        prompt_ids.size >= end
        and bool(np.array_equal(prompt_ids[:seen], call.prompt_ids))
        and bool(np.array_equal(prompt_ids[seen:end], call.completion.ids))
    )
