"""Tells what a call is for, where a harness does not say so itself.

An adapter's `chain` may return "" for 'no opinion'; then the rule here decides: a call whose
system prompt differs from that of the episode's first main call belongs to another agent. Roles
go by what auxiliary calls look like in the harnesses that we measured.
Not here: anything about tokens. Invariant: by the generic rule an episode's first call is on
chain "main".
"""

from __future__ import annotations

import hashlib
import re

from clawgym_jax.core.interfaces import Harness, RequestView
from clawgym_jax.core.types import Role

MAIN_CHAIN = "main"

_SUMMARY_ORDER = re.compile(
    r"respond with text only|context checkpoint compaction|<state_snapshot>"
    r"|summari[sz]e (?:this|the|our) (?:conversation|session|work)"
    r"|(?:detailed )?summary of (?:this|the|our) conversation",
    re.IGNORECASE,
)
_TITLE_ORDER = re.compile(r"\btitle\b", re.IGNORECASE)
_SUMMARY_WORD = re.compile(r"summar|compact|handoff", re.IGNORECASE)


def role_of(view: RequestView) -> Role:
    """The role that wording and tools suggest."""
    if view.last_user != view.first_user and _SUMMARY_ORDER.search(view.last_user):
        return Role.COMPACTION
    if view.tools:
        return Role.MAIN
    for asked in (view.system[:2000], view.last_user[:2000]):  # the user's may hold a transcript
        if _TITLE_ORDER.search(asked):
            return Role.TITLE
        if _SUMMARY_WORD.search(asked):
            return Role.COMPACTION
    return Role.MAIN


class RoleTracker:
    """Chain and role of each call of one episode."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._chains: dict[str, str] = {}  # system text -> chain

    def classify(self, view: RequestView) -> tuple[str, Role]:
        role = self._harness.role(view)
        chain = self._harness.chain(view) or self._generic_chain(view, role)
        if chain != MAIN_CHAIN and role is Role.MAIN:
            role = Role.SUBAGENT
        return chain, role

    def _generic_chain(self, view: RequestView, role: Role) -> str:
        known = self._chains.get(view.system)
        if known is not None:
            return known
        if role is not Role.MAIN:
            return MAIN_CHAIN
        digest = hashlib.blake2b(view.system.encode("utf-8", "replace"), digest_size=6).hexdigest()
        chain = f"agent-{digest}" if self._chains else MAIN_CHAIN
        self._chains[view.system] = chain
        return chain
