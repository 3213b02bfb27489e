"""Tells what a call is for, where a harness does not say so itself.

An adapter's `chain` may return "" for 'no opinion'; then the rule here decides: a call whose
system prompt differs from that of the episode's first main call belongs to another agent, one for
each first message. Roles go by what auxiliary calls look like in the harnesses that we measured.
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
_PROBE = re.compile(r"\W*(?:quota|ping|test|hi|hello|warm ?up)\W*", re.IGNORECASE)
_READ_CHARS = 2000  # of an order, from its start


def role_of(view: RequestView) -> Role:
    """The role that wording and tools suggest."""
    if view.last_user != view.first_user and _SUMMARY_ORDER.search(view.last_user):
        return Role.COMPACTION
    if view.tools:
        return Role.MAIN
    if not view.system and _PROBE.fullmatch(view.last_user):
        return Role.PROBE
    # Side calls have a system prompt of their own; where there is none, the order is the message.
    order = (view.system or view.last_user)[:_READ_CHARS]
    if _TITLE_ORDER.search(order):
        return Role.TITLE
    if _SUMMARY_WORD.search(order):
        return Role.COMPACTION
    return Role.MAIN


class RoleTracker:
    """Chain and role of each call of one episode."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._main_system: str | None = None
        self._agents: set[str] = set()  # chains of other agents

    def classify(self, view: RequestView) -> tuple[str, Role]:
        role = self._harness.role(view)
        chain = self._harness.chain(view) or self._generic_chain(view, role)
        if chain != MAIN_CHAIN and role is Role.MAIN:
            role = Role.SUBAGENT
        return chain, role

    def chain_of(self, view: RequestView) -> str:
        """The chain that a call like this would have now; nothing is taken note of."""
        known = self._harness.chain(view)
        if known or view.system == self._main_system:
            return known or MAIN_CHAIN
        chain = f"agent-{_digest(view.system, view.first_user)}"
        return chain if chain in self._agents else MAIN_CHAIN

    def _generic_chain(self, view: RequestView, role: Role) -> str:
        """Agents of one kind that work at once are told apart by what they were asked."""
        if view.system == self._main_system:
            return MAIN_CHAIN
        chain = f"agent-{_digest(view.system, view.first_user)}"
        if chain in self._agents:
            return chain
        if role is not Role.MAIN:
            return MAIN_CHAIN
        if self._main_system is None:
            self._main_system = view.system
            return MAIN_CHAIN
        self._agents.add(chain)
        return chain


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for text in texts:
        digest.update(text.encode("utf-8", "replace") + b"\0")
    return digest.hexdigest()
