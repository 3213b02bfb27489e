"""Asks the engine for one completion and makes sure that it is whole.

Faults of the engine that pass by themselves (restart, full queue, no weights yet) are waited out,
because a harness that sees an error rewrites its prompt or gives up. Not here: records, clients.
Invariant: a completion that leaves this file has one finite log-prob per id.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, LogprobError, NoWeights, Overloaded
from clawgym_jax.core.interfaces import Sampler
from clawgym_jax.core.types import Completion, SamplingParams, Stop
from clawgym_jax.proxy.faults import EngineAway

TRANSIENT = (EngineRestarted, NoWeights, Overloaded)
_LONGEST_PAUSE_S = 1.0


async def sample_patiently(
    sampler: Sampler,
    request_id: str,
    prompt_ids: np.ndarray,
    params: SamplingParams,
    stop: Stop,
    wait_s: float,
    on_transient: Callable[[str], None],
    give_up: Callable[[], bool],
) -> Completion:
    """Samples, waiting out transient faults for up to `wait_s`. give_up: nobody waits any more."""
    deadline_s = time.monotonic() + wait_s
    pause_s = 0.02
    while True:
        try:
            completion = await sampler.sample(request_id, prompt_ids, params, stop)
        except TRANSIENT as error:
            on_transient(type(error).__name__)
            if give_up() or time.monotonic() + pause_s > deadline_s:
                raise EngineAway(
                    f"expected an engine within {wait_s:g} s, got {type(error).__name__}: "
                    f"{error}; look at the engine's log or raise engine_wait_s",
                ) from error
        else:
            require_whole(completion, request_id)
            return completion
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def require_whole(completion: Completion, request_id: str) -> None:
    """Raises LogprobError unless every id has its log-probs and its version."""
    count = completion.ids.size
    for name in ("logprobs", "raw_logprobs", "versions"):
        array = getattr(completion, name)
        got = None if array is None else array.size
        if got != count:
            raise LogprobError(
                f"{request_id}: expected {count} {name} for {count} sampled ids, got {got}; "
                "the engine lost some: the episode is quarantined, nothing is padded"
            )
    for name in ("logprobs", "raw_logprobs"):
        array = getattr(completion, name)
        if not np.isfinite(array).all():
            raise LogprobError(f"{request_id}: expected finite {name}, got {array.tolist()}")


def stable_seed(*parts: object) -> int:
    """31 bits that depend on nothing but `parts`: the same in every process and on every host."""
    text = "\x1f".join(map(str, parts))
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
