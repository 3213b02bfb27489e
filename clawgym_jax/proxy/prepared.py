"""A parsed request with its prompt, and what identifies it.

Invariant: two requests with the same `repeat_key` ask the engine for the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.interfaces import RequestView
from clawgym_jax.core.types import Role
from clawgym_jax.proxy.splice import Prompt
from clawgym_jax.proxy.turns import Request


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt, ready to be sampled or joined to a sample."""

    request: Request
    chain: str
    role: Role
    prompt: Prompt
    received_at_s: float
    started_s: float  # monotonic


def view_of(request: Request) -> RequestView:
    return RequestView(
        headers=request.headers,
        system=request.system,
        first_user=request.user_text(last=False),
        last_user=request.user_text(last=True),
        tools=request.tool_names,
        model=request.model,
    )


def prompt_key(prepared: Prepared) -> bytes:
    """Equal for requests of one chain with the same prompt."""
    digest = hashlib.sha256(prepared.chain.encode("utf-8", "replace") + b"\0")
    digest.update(np.ascontiguousarray(prepared.prompt.ids).data)
    return digest.digest()


def repeat_key(prepared: Prepared, key: bytes) -> Hashable:
    """Equal for requests that ask for the same thing, in a form that one answer fits.

    key: of its prompt.
    """
    request = prepared.request
    return key, request.max_tok, request.stop_strings, request.carries_raw_calls
