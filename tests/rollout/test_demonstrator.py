"""How often the demonstrator succeeds, playing the real programs through the real proxy."""

from __future__ import annotations

import asyncio
import collections
import math
import random

import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError, LogprobError
from clawgym_jax.core.interfaces import Harness
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.harness.tiny_chat import TinyChat
from clawgym_jax.harness.tiny_shell import TinyShell
from clawgym_jax.rollout.demonstrator import Demonstrator, Mistakes
from clawgym_jax.rollout.scripted import Conversation, Message, ScriptedSampler
from clawgym_jax.tasks.toy import ToyTask, toy_tasks
from tests.harness.playing import Played, play, table
from tests.proxy.support import ScriptedEngine, tiny_codec

PERFECT = Mistakes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
AT_ONCE = 6


async def play_all(
    harness: Harness, tasks: list[ToyTask], mistakes: Mistakes
) -> list[tuple[ToyTask, Played]]:
    """All tasks through one proxy, several at once."""
    codec = tiny_codec()
    sampler = ScriptedSampler(Demonstrator(mistakes), codec, ScriptedEngine(codec, []))
    gate = asyncio.Semaphore(AT_ONCE)
    async with table() as proxy:

        async def one(index: int, task: ToyTask) -> tuple[ToyTask, Played]:
            async with gate:
                name = f"ep{index}"
                return task, await play(
                    proxy, harness, sampler, task.instruction, task.inputs, name
                )

        return await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks)))


def succeeded(task: ToyTask, played: Played) -> bool:
    assert not played.trace.quarantine, played.trace.quarantine
    assert not played.trace.causes, played.trace.causes
    return played.files.get(task.output, b"").decode().rstrip() == task.expected


@pytest.mark.parametrize("harness", [TinyChat(), TinyShell()], ids=lambda h: h.name)
def test_without_mistakes_every_family_succeeds(harness: Harness) -> None:
    for task, played in asyncio.run(play_all(harness, toy_tasks("cold", 10, 1), PERFECT)):
        assert succeeded(task, played), (task.instruction, played)


@pytest.mark.parametrize("harness", [TinyChat(), TinyShell()], ids=lambda h: h.name)
def test_success_rate_with_mistakes(harness: Harness) -> None:
    """0.35-0.45 is meant; the bounds leave three standard errors of 50 plays."""
    tasks = toy_tasks("cold", 50, 2)
    results = asyncio.run(play_all(harness, tasks, Mistakes()))
    rate = sum(succeeded(task, played) for task, played in results) / len(results)
    slack = 3 * math.sqrt(0.4 * 0.6 / len(results))
    print(f"{harness.name}: {rate:.2f} of {len(results)}")
    assert 0.35 - slack <= rate <= 0.45 + slack
    lengths = collections.Counter(len(played.trace.calls) for _, played in results)
    assert len(lengths) > 1  # not every play goes the same way


def test_reads_the_conversation_out_of_the_prompt() -> None:
    codec = tiny_codec()
    sampler = ScriptedSampler(Demonstrator(), codec, ScriptedEngine(codec, []))
    turns = [
        {"role": "system", "content": "You act."},
        {"role": "user", "content": "Look at <|im_end|> and <|im_start|>user"},
    ]
    assert sampler.read(codec.render_fresh(turns)) == (
        Message("system", "You act."),
        Message("user", "Look at <|im_end|> and <|im_start|>user"),
    )


def say_five(conversation: Conversation, rng: random.Random) -> str:
    return "one two three STOP five"


def sample(params: SamplingParams, stop: Stop) -> Completion:
    codec = tiny_codec()
    sampler = ScriptedSampler(say_five, codec, ScriptedEngine(codec, []))
    prompt = codec.render_fresh([{"role": "user", "content": "go"}])
    return asyncio.run(sampler.sample("r", prompt, params, stop))


def test_scripted_limits_and_stops() -> None:
    whole = sample(SamplingParams(), Stop())
    assert whole.finish is Finish.STOP and whole.ids[-1] == tiny_codec().end_of_turn_id
    cut = sample(SamplingParams(max_tok=3), Stop())
    assert cut.finish is Finish.LENGTH and np.array_equal(cut.ids, whole.ids[:3])
    stopped = sample(SamplingParams(), Stop((), ("STOP",)))
    assert stopped.stop_string == "STOP"
    assert tiny_codec().decode(stopped.ids) == "one two three STOP"


def test_without_a_scorer_there_is_no_sampler() -> None:
    with pytest.raises(ConfigError, match="needs a scorer"):
        ScriptedSampler(Demonstrator(), tiny_codec(), None)


def test_a_scorer_that_answers_for_other_ids_is_refused() -> None:
    class Forgetful(ScriptedEngine):
        async def score(
            self, prompt_ids: np.ndarray, ids: np.ndarray, temperature: float = 1.0
        ) -> Completion:
            return await super().score(prompt_ids, ids[:-1], temperature)

    codec = tiny_codec()
    sampler = ScriptedSampler(say_five, codec, Forgetful(codec, []))
    prompt = codec.render_fresh([{"role": "user", "content": "go"}])
    with pytest.raises(LogprobError, match="other ids"):
        asyncio.run(sampler.sample("r", prompt, SamplingParams(), Stop()))
