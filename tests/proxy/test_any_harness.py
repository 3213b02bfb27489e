"""Harnesses that do whatever they like to their history: what must hold anyway."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import CallRecord, SamplingParams
from clawgym_jax.proxy import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.proxy.faults import PromptOverflow
from clawgym_jax.proxy.ledger import ledger_of
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.session import Session
from clawgym_jax.tree.prefix_tree import build_tree
from tests.proxy.support import FAST, LOOK, AnyHarness, Asked, ScriptedEngine, call_text, tiny_codec

HABITS = (
    "append", "retry", "drop", "edit", "tail", "compact", "merge", "forge", "sub-agent",
    "reserialise", "respace", "split", "join turns", "forget thinking", "swap results", "lose ids",
)  # fmt: skip
LOOKS = call_text("look", {"b": 1, "a": "x"})
SAID = (
    "done", "", "ok", "<think>\nhm\n</think>\n\nok", LOOKS, f"I look.\n{LOOKS}\n{LOOKS}",
    '<tool_call>\n{"name": "look", "arguments": {"a": }}\n</tool_call>',
)  # fmt: skip


class Unruly:
    """Keeps a history and changes it by habit."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: list[Any] = [
            {"role": "system", "content": "You act."},
            {"role": "user", "content": "Do it."},
        ]

    def hears(self, message: dict[str, Any]) -> None:
        self.history.append(message)
        for index, call in enumerate(message.get("tool_calls", ())):
            content = f"found {index}"
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not message.get("tool_calls"):
            self.history.append({"role": "user", "content": f"go on {self.rng.randrange(3)}"})

    def rewrites(self, habit: str) -> None:
        """Says its assistant turns again in its own way, for good."""
        out: list[Any] = []
        for message in self.history:
            if message["role"] != "assistant":
                out.append(message)
                continue
            message = json.loads(json.dumps(message))
            text, calls = message.get("content") or "", message.get("tool_calls") or []
            if habit == "reserialise":
                for call in calls:
                    call["function"]["arguments"] = respelled(call["function"]["arguments"])
            elif habit == "respace":
                message["content"] = f"\n{text}  " if text else text
            elif habit == "lose ids":
                for call in calls:
                    call["id"] = f"call_{call['id']}"
            elif habit == "forget thinking":
                message.pop("reasoning_content", None)
            elif text and calls:
                out.append({"role": "assistant", "content": text})
                message["content"] = None
            out.append(message)
        self.history = out

    def joins(self) -> None:
        """Two texts said one after another become one message; what was between them goes."""
        said = [i for i, m in enumerate(self.history) if m["role"] == "assistant"]
        plain = [i for i in said if not self.history[i].get("tool_calls")]
        if len(plain) > 1:
            first, second = plain[-2:]
            texts = [self.history[i].get("content") or "" for i in (first, second)]
            self.history[first : second + 1] = [{"role": "assistant", "content": "".join(texts)}]

    def swaps(self) -> None:
        tools = [i for i, m in enumerate(self.history) if m["role"] == "tool"]
        for left, right in itertools.pairwise(tools):
            if right == left + 1:
                pair = self.history[left : right + 1]
                self.history[left : right + 1] = pair[::-1]

    def asks(self, habit: str) -> list[Any]:
        """The messages of the next request; some habits change the history for good."""
        spot = self.rng.randrange(1, len(self.history))
        if habit == "drop" and len(self.history) > 3:
            del self.history[spot]
        elif habit in ("reserialise", "respace", "split", "forget thinking", "lose ids"):
            self.rewrites(habit)
        elif habit == "join turns":
            self.joins()
        elif habit == "swap results":
            self.swaps()
        elif habit == "edit":
            self.history[spot] = {**self.history[spot], "content": "edited"}
        elif habit == "compact":
            self.history[1:] = [{"role": "user", "content": "Continued. Do it."}]
        elif habit == "merge":
            self.history.append({"role": "assistant", "content": "ok\nok"})
        elif habit == "forge":
            self.history.insert(spot, {"role": "assistant", "content": self.rng.choice(SAID[:3])})
        if habit == "tail":
            return [*self.history, {"role": "user", "content": "state"}]
        if habit == "sub-agent":
            return [{"role": "system", "content": "You help."}, self.history[1]]
        return self.history


def respelled(arguments: str) -> str:
    """The same JSON value in other words; Claude Code's form of what is no JSON."""
    try:
        items = json.loads(arguments).items()
    except ValueError:
        items = [("__unparsedToolInput", {"raw": arguments, "len": len(arguments)})]
    return json.dumps(dict(reversed(list(items))), indent=1)


async def episode(habits: list[str], seed: int, path: Path) -> tuple[EpisodeTrace, list[Asked]]:
    rng = random.Random(seed)
    codec, protocol = tiny_codec(), OpenAIChat()
    engine = ScriptedEngine(codec, [rng.choice(SAID) for _ in habits])
    spec = EpisodeSpec("ep", AnyHarness(), engine, SamplingParams(), 700, 64, seed)
    harness = Unruly(rng)
    with RecordLog(path) as log:
        session = Session(spec, codec, log, "run", FAST)
        for habit in habits:
            messages = harness.asks(habit)
            request = protocol.parse({"model": "m", "messages": messages, "tools": [LOOK]}, {})
            try:
                flight = session.submit(await session.prepare(request))
            except PromptOverflow:
                break
            answer = await flight.task
            if rng.random() < 0.9:
                flight.delivered()
            flight.detach()
            if habit not in ("retry", "sub-agent"):
                harness.hears(protocol.message(request, answer)["choices"][0]["message"])
        return await session.close(), engine.asked


def common(one: CallRecord, other: CallRecord) -> int:
    """Longest common prefix of two prompts, counted one by one."""
    pairs = zip(one.prompt_ids.tolist(), other.prompt_ids.tolist(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(st.sampled_from(HABITS), min_size=1, max_size=12), st.integers(0, 10**6))
@settings(max_examples=150)
def test_records_are_whole_whatever_a_harness_does(habits: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        trace, asked = asyncio.run(episode(habits, seed, path))
        logged = read_calls(path)
    calls = trace.calls
    assert [c.call_id for c in logged] == [c.call_id for c in calls]
    assert [c.delivery for c in logged] == [c.delivery for c in calls]
    by_id = {call.call_id: call for call in calls}
    for call, at_engine in zip(calls, asked, strict=True):
        assert np.array_equal(call.prompt_ids, at_engine.prompt_ids)
        earlier = calls[: call.ordinal]
        shared = max([common(call, e) for e in earlier], default=0)
        assert call.shared_tok == shared
        ledger_of(call).require_balance(call.call_id)
        end = 0
        for span in call.spans:
            assert span.start >= end
            end = span.start + span.length
            spliced = call.prompt_ids[span.start : end]
            ids = by_id[span.call_id].completion.ids
            assert np.array_equal(spliced, ids[: span.length])
            merged = "merged turns" in call.breaks  # then without the end token, but for the last
            assert span.length == ids.size or (merged and span.length == ids.size - 1)
        assert len(set(call.continues)) == len(call.continues)
        last = [e for e in earlier if e.chain == call.chain][-1:]
        appends = not last or extends(call.prompt_ids, last[0])
        assert appends or call.breaks
    tree = build_tree(calls)
    for index, (call, at_engine) in enumerate(zip(calls, asked, strict=True)):
        whole = [*at_engine.prompt_ids.tolist(), *call.completion.ids.tolist()]
        assert tree.tokens_of(index).tolist() == whole  # the tree's tokens are the engine's
    seeds = [call.effective.seed for call in calls]
    assert len(set(seeds)) == len(seeds)


MILD = ("append", "reserialise", "respace", "split", "forget thinking", "swap results")


@given(st.lists(st.sampled_from(MILD), min_size=1, max_size=10), st.integers(0, 10**6))
@settings(max_examples=60)
def test_saying_the_same_in_other_words_breaks_nothing(habits: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace, _ = asyncio.run(episode(habits, seed, Path(folder) / "log"))
    assert not any(call.breaks for call in trace.calls)
    for call in trace.calls[1:]:
        assert extends(call.prompt_ids, trace.calls[call.ordinal - 1])
