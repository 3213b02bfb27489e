"""A Sampler whose words come from a program and whose log-probs come from the model.

For demonstrations and tests: the policy reads the conversation as the model would, out of the
prompt's ids, and answers with text; the engine then says what probability it gives to exactly
those ids. Not here: any policy (demonstrator.py).
Invariant: without a scorer there is no completion; log-probs are never made up.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clawgym_jax.core.errors import ConfigError, LogprobError
from clawgym_jax.core.interfaces import Sampler
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.proxy.chat_template import ChatCodec


@dataclass(frozen=True, slots=True)
class Message:
    """One turn as it stands in the prompt, tool blocks and all."""

    role: str
    text: str


Conversation = tuple[Message, ...]
Policy = Callable[[Conversation, random.Random], str]


class ScriptedSampler:
    """Speaks for a model. Seeded by each call's SamplingParams.seed."""

    def __init__(self, policy: Policy, codec: ChatCodec, scorer: Sampler | None) -> None:
        if scorer is None:
            raise ConfigError(
                "a scripted sampler needs a scorer: expected a Sampler whose `score` gives the "
                "log-probs of the scripted ids, got None; pass the engine's"
            )
        self._policy = policy
        self._codec = codec
        self._scorer = scorer
        self._start_id = codec.token_id("<|im_start|>")

    async def sample(
        self, request_id: str, prompt_ids: np.ndarray, params: SamplingParams, stop: Stop
    ) -> Completion:
        conversation = self.read(prompt_ids)
        text = self._policy(conversation, random.Random(params.seed))
        text, stop_string = _until_stop(text, stop)
        ending = "" if stop_string else self._codec.end_of_turn
        ids = self._codec.encode_rendered(text + ending)
        finish = Finish.LENGTH if ids.size > params.max_tok else Finish.STOP
        ids = ids[: params.max_tok]
        scored = await self.score(prompt_ids, ids, params.temperature)
        if not np.array_equal(scored.ids, ids):
            raise LogprobError(
                f"{request_id}: the scorer answered for other ids than it was given "
                f"({scored.ids.size} ids, expected {ids.size})"
            )
        found = stop_string if finish is Finish.STOP else None
        return dataclasses.replace(scored, finish=finish, stop_string=found)

    async def score(
        self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
    ) -> Completion:
        return await self._scorer.score(prompt_ids, ids, temperature)

    def cancel(self, request_id: str) -> None:
        """Scripted turns are there at once: nothing to free."""

    def read(self, prompt_ids: np.ndarray) -> Conversation:
        """The turns of a prompt; the open assistant turn at its end is left out."""
        starts = np.flatnonzero(prompt_ids == self._start_id)
        messages = []
        for begin, end in zip(starts, [*starts[1:], prompt_ids.size], strict=True):
            turn = prompt_ids[begin + 1 : end]
            closes = np.flatnonzero(turn == self._codec.end_of_turn_id)
            if closes.size:
                role, _, text = self._codec.decode(turn[: closes[-1]]).partition("\n")
                messages.append(Message(role, text))
        return tuple(messages)


def _until_stop(text: str, stop: Stop) -> tuple[str, str | None]:
    """Text up to and with the stop string that comes first."""
    found = [(text.find(string), string) for string in stop.strings if string in text]
    if not found:
        return text, None
    position, string = min(found)
    return text[: position + len(string)], string
