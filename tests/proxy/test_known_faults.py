"""Reported faults of systems like this one (A1 .. A17), as far as the proxy goes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion, Delivery, Finish, Role, SamplingParams
from clawgym_jax.proxy import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.config import ProxyConfig
from tests.proxy.support import (
    FAST,
    LOOK,
    LOOK_ANTHROPIC,
    AnyHarness,
    Stage,
    call_text,
    completion,
    stage,
    tiny_codec,
)

USER = {"role": "user", "content": "Do it."}


def billing(nonce: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"


@pytest.mark.parametrize("as_list", [True, False])
def test_a1_nonce_in_the_system_prompt(as_list: bool) -> None:
    def system(nonce: str) -> Any:
        if as_list:
            return [{"type": "text", "text": billing(nonce)}, {"type": "text", "text": "You act."}]
        return billing(nonce) + "\nYou act."

    async def run() -> None:
        async with stage("a", "b") as s:
            for nonce in ("36ee5", "0aaa9"):
                await s.messages([USER], system=system(nonce))
            one, two = (await s.proxy.close_episode("ep")).calls
            assert np.array_equal(one.prompt_ids, two.prompt_ids)
            assert one.chain == two.chain == "main"
            assert "billing" not in tiny_codec().decode(one.prompt_ids)

    asyncio.run(run())


async def three_thoughtful_turns(s: Stage, keep_thinking: bool) -> EpisodeTrace:
    history: list[Any] = [USER]
    for index in range(3):
        response = await s.messages(history, thinking={"type": "enabled", "budget_tokens": 9})
        blocks = response.json()["content"]
        assert blocks[0]["thinking"] == f"thought {index}"
        kept = [b for b in blocks if keep_thinking or b["type"] != "thinking"]
        history += [{"role": "assistant", "content": kept}, USER]
    return await s.proxy.close_episode("ep")


THOUGHTS = [f"<think>\nthought {index}\n</think>\n\nok" for index in range(3)]


@pytest.mark.parametrize("keep_thinking", [True, False])
def test_a2_old_thinking_is_restored(keep_thinking: bool) -> None:
    async def run() -> None:
        async with stage(*THOUGHTS) as s:
            one, two, three = (await three_thoughtful_turns(s, keep_thinking)).calls
            assert extends(two.prompt_ids, one) and extends(three.prompt_ids, two)
            assert one.breaks == two.breaks == three.breaks == ()

    asyncio.run(run())


def test_a2_old_thinking_forks_a_named_branch_on_request() -> None:
    async def run() -> None:
        async with stage(*THOUGHTS, config=ProxyConfig(history="branch")) as s:
            one, two, three = (await three_thoughtful_turns(s, False)).calls
            assert not extends(two.prompt_ids, one)
            assert "dropped thinking" in two.breaks and "dropped thinking" in three.breaks
            assert not two.spans and not two.continues
            assert "thought" not in tiny_codec().decode(two.prompt_ids)

    asyncio.run(run())


def test_a3_ids_that_encode_differently_are_kept() -> None:
    codec = tiny_codec()
    letters = [codec.encode_text(c)[0] for c in "done"]
    assert codec.encode_text("done").tolist() != letters  # the text has another encoding
    sampled = [*letters, codec.end_of_turn_id]

    async def run() -> None:
        async with stage(completion(sampled), "b") as s:
            answer = (await s.chat([USER])).json()["choices"][0]["message"]
            await s.chat([USER, answer, USER])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one)
            span = two.spans[0]
            spliced = two.prompt_ids[span.start : span.start + span.length]
            assert spliced.tolist() == sampled

    asyncio.run(run())


@pytest.mark.parametrize("by_id", [True, False])
def test_a4_arguments_reserialised(by_id: bool) -> None:
    sampled = '{"b": 1, "a": "\\u00fc", "c": 1.0, "d": [1, {"y": 2.5, "x": null}]}'
    resent = '{"a":"ü","b":1.0,"c":1,"d":[1.0,{"x":null,"y":2.50}]}'

    async def run() -> None:
        async with stage(call_text("look", sampled), "b") as s:
            answer = (await s.chat([USER], tools=[LOOK])).json()["choices"][0]["message"]
            call = answer["tool_calls"][0]
            call["function"]["arguments"] = resent
            if not by_id:
                call["id"] = "changed"
            result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
            await s.chat([USER, answer, result], tools=[LOOK])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one)
            assert two.continues == (one.call_id,) and not two.breaks

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["messages", "chat"])
def test_a5_streaming_with_tools_keeps_the_ids(protocol: str) -> None:
    async def run() -> None:
        async with stage("I look.\n" + call_text("look", {"path": "in"})) as s:
            if protocol == "messages":
                response = await s.messages([USER], tools=[LOOK_ANTHROPIC], stream=True)
            else:
                response = await s.chat([USER], tools=[LOOK], stream=True)
            assert "look" in response.text
            (call,) = (await s.proxy.close_episode("ep")).calls
            said = "I look.\n" + call_text("look", {"path": "in"}) + "<|im_end|>"
            assert call.completion.ids.tolist() == tiny_codec().encode_rendered(said).tolist()
            assert call.completion.logprobs.size == call.completion.ids.size

    asyncio.run(run())


@pytest.mark.parametrize("retry_header", [True, False])
def test_a6_timed_out_call_is_sent_again(retry_header: bool) -> None:
    async def run() -> None:
        async with stage("first", "second", "last", gated=True) as s:
            assert s.engine.gate is not None
            one = asyncio.create_task(s.chat([USER], stream=True))
            while not s.engine.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            headers = {"x-stainless-retry-count": "1"} if retry_header else {}
            two = asyncio.create_task(s.chat([USER], headers))
            await asyncio.sleep(0.05)
            one.cancel()  # the client's own timeout
            await asyncio.sleep(0.05)
            s.engine.gate.set()
            answer = (await two).json()["choices"][0]["message"]
            await s.chat([USER, answer, USER])
            calls = (await s.proxy.close_episode("ep")).calls
            trained = [call for call in calls if call.delivery is Delivery.DELIVERED]
            assert len(trained) == 2
            assert extends(trained[1].prompt_ids, trained[0])
            if retry_header:
                assert len(calls) == 2
            else:  # the first sample was cancelled, and is marked as such
                lost = [call for call in calls if call not in trained]
                assert [call.delivery for call in lost] == [Delivery.SUPERSEDED]
                assert lost[0].completion.finish is Finish.ABORT

    asyncio.run(run())


def test_a7_interleaved_sub_agents() -> None:
    async def run() -> None:
        async with stage("a1", "b1", "a2", "b2") as s:
            chains: dict[str, list[Any]] = {}
            for _ in range(2):
                for name in "AB":
                    system = {"role": "system", "content": f"You are agent {name}."}
                    history = chains.setdefault(name, [system, USER])
                    answer = (await s.chat(history)).json()["choices"][0]["message"]
                    history += [answer, USER]
            a1, b1, a2, b2 = (await s.proxy.close_episode("ep")).calls
            assert a1.chain == a2.chain == "main" and b1.chain == b2.chain != "main"
            assert extends(a2.prompt_ids, a1) and extends(b2.prompt_ids, b1)
            assert not extends(b2.prompt_ids, a1)
            assert [c.role for c in (a1, b1)] == [Role.MAIN, Role.SUBAGENT]
            assert b1.breaks == ("sub-agent",) and not (a2.breaks or b2.breaks)

    asyncio.run(run())


def broken(ids: list[int], **fields: Any) -> Completion:
    return dataclasses.replace(completion(ids), **fields)


@pytest.mark.parametrize(
    "said",
    [
        broken([5, 6, 7], logprobs=np.zeros(2, np.float32)),
        broken([5, 6, 7], logprobs=np.zeros(0, np.float32)),
        broken([5, 6, 7], raw_logprobs=None),
        broken([5, 6, 7], versions=np.zeros(1, np.uint32)),
        broken([5, 6, 7], logprobs=np.asarray([-1, np.nan, -1], np.float32)),
    ],
    ids=["n-1", "none", "no raw", "versions", "nan"],
)
def test_a14_missing_logprobs_quarantine_the_episode(said: Completion) -> None:
    async def run() -> None:
        async with stage(said, "never") as s:
            failed = s.proxy.failure_event("ep")
            response = await s.chat([USER])
            assert response.status_code == 500
            assert failed.is_set()
            assert (await s.chat([USER])).status_code == 500  # nothing more is sampled
            trace = await s.proxy.close_episode("ep")
            assert trace.calls == () and "log-probs" in trace.failure
            assert len(s.engine.asked) == 1

    asyncio.run(run())


def test_a16_harness_that_never_called() -> None:
    async def run() -> None:
        async with stage() as s:
            trace = await s.proxy.close_episode("ep")
            assert trace.failure == "0 calls captured"

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["messages", "chat"])
def test_a17_sampling_overrides(protocol: str) -> None:
    asked = {"temperature": 0.1, "top_p": 0.5, "max_tokens": 32000}

    async def run() -> None:
        async with stage("a", sampling=SamplingParams(temperature=0.7), max_tok=48) as s:
            await (s.messages if protocol == "messages" else s.chat)([USER], **asked)
            (call,) = (await s.proxy.close_episode("ep")).calls
            assert {name: call.requested[name] for name in asked} == asked
            assert (call.effective.temperature, call.effective.top_p) == (0.7, 1.0)
            assert call.effective.max_tok == 48
            assert s.engine.asked[0].params == call.effective

    asyncio.run(run())


def test_a17_max_tokens_is_the_smallest_limit() -> None:
    async def run() -> None:
        async with stage("a", "b", window_tok=30) as s:
            await s.chat([USER], max_completion_tokens=3)
            await s.chat([USER])
            small, rest = s.engine.asked
            assert small.params.max_tok == 3
            assert rest.params.max_tok == 30 - rest.prompt_ids.size

    asyncio.run(run())


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_truncated_distributions_are_refused_in_training(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected|must be off"):
        EpisodeSpec("e", AnyHarness(), None, SamplingParams(**params), 99, 9)  # type: ignore[arg-type]


def test_parallel_results_in_any_order_give_the_same_prompt() -> None:
    said = call_text("look", {"path": "a"}) + "\n" + call_text("look", {"path": "b"})

    async def run() -> None:
        async with stage(said, "x", "y") as s:
            answer = (await s.chat([USER], tools=[LOOK])).json()["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {index}"}
                for index, call in enumerate(answer["tool_calls"])
            ]
            await s.chat([USER, answer, *results], tools=[LOOK])
            await s.chat([USER, answer, *reversed(results)], tools=[LOOK])
            _, two, three = (await s.proxy.close_episode("ep")).calls
            assert np.array_equal(two.prompt_ids, three.prompt_ids)
            assert (three.attempt, three.breaks) == (1, ("retry",))
            assert three.effective.seed != two.effective.seed

    asyncio.run(run())


def test_a_moving_tail_is_an_edited_history_that_continues() -> None:
    """As OpenClaw does: a last user message that vanishes in the next call."""
    tail = {"role": "user", "content": "state: 1 job"}

    async def run() -> None:
        async with stage(call_text("look", {"path": "a"}), "x") as s:
            answer = (await s.chat([USER, tail], tools=[LOOK])).json()["choices"][0]["message"]
            call_id = answer["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": "r"}
            await s.chat([USER, answer, result, tail], tools=[LOOK])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert two.breaks == ("edited history",)
            assert two.continues == (one.call_id,)
            assert two.spans[0].length == one.completion_tok
            assert 0 < two.shared_tok < one.prompt_tok
            assert two.shared_tok + two.spliced_tok + two.encoded_tok == two.prompt_tok

    asyncio.run(run())


def test_a_dropped_turn_is_named() -> None:
    async def run() -> None:
        async with stage("", "x") as s:
            await s.chat([USER])
            await s.chat([{"role": "user", "content": "Do it.\nYou said nothing."}])
            _, two = (await s.proxy.close_episode("ep")).calls
            assert two.breaks == ("dropped turn",)

    asyncio.run(run())


def test_a_cut_completion_is_closed_by_environment_text() -> None:
    codec = tiny_codec()
    ids = codec.encode_rendered("one two").tolist()

    async def run() -> None:
        async with stage(completion(ids, Finish.LENGTH), "x") as s:
            body = (await s.chat([USER])).json()["choices"][0]
            assert body["finish_reason"] == "length"
            await s.chat([USER, body["message"], USER])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert extends(two.prompt_ids, one)
            assert two.prompt_ids[one.prompt_tok + len(ids)] == codec.end_of_turn_id
            assert two.spliced_tok == len(ids)

    asyncio.run(run())


def test_text_past_a_stop_string_is_recorded_and_not_shown() -> None:
    codec = tiny_codec()
    ids = codec.encode_rendered("one STOP two").tolist()

    async def run() -> None:
        async with stage(completion(ids, Finish.STOP, "STOP"), "x") as s:
            body = (await s.messages([USER], stop_sequences=["STOP"])).json()
            assert body["content"] == [{"type": "text", "text": "one"}]
            assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
            assert s.engine.asked[0].stop.strings == ("STOP",)
            await s.messages([USER, {"role": "assistant", "content": "one"}, USER])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert one.completion.ids.tolist() == ids and extends(two.prompt_ids, one)

    asyncio.run(run())


def test_seeds_depend_on_the_run_and_nothing_else() -> None:
    async def seeds() -> list[int]:
        async with stage("a", "b", config=FAST) as s:
            await s.chat([USER])
            await s.chat([USER])
            return [asked.params.seed for asked in s.engine.asked]

    first, second = asyncio.run(seeds()), asyncio.run(seeds())
    assert first == second and len(set(first)) == 2


def test_malformed_calls_reach_the_harness_raw() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"path": }}\n</tool_call>'

    async def run() -> None:
        async with stage(text, "x") as s:
            choice = (await s.chat([USER], tools=[LOOK])).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "look", "arguments": '{"path": }'}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
            await s.chat([USER, choice["message"], result], tools=[LOOK])
            trace = await s.proxy.close_episode("ep")
            assert extends(trace.calls[1].prompt_ids, trace.calls[0])
            assert trace.causes == {"malformed tool call": 1}
            assert json.dumps(trace.calls[0].text) == json.dumps(text)

    asyncio.run(run())
