"""The vendors' own client libraries, in threads, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from clawgym_jax.core.errors import Overloaded
from clawgym_jax.core.types import Delivery
from clawgym_jax.proxy import EpisodeTrace
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.config import ProxyConfig
from tests.proxy.support import (
    FAST,
    LOOK,
    LOOK_ANTHROPIC,
    Say,
    ScriptedEngine,
    call_text,
    stage,
    tiny_codec,
)

SAID = "<think>\nhm\n</think>\n\nI look.\n" + call_text("look", {"path": "ä"})
USER: Any = {"role": "user", "content": "Do it."}
TEXT_OK = [{"type": "text", "text": "ok"}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def with_client(
    use: Callable[[str, str], Any], *script: Say, config: ProxyConfig = FAST, **options: Any
) -> tuple[Any, EpisodeTrace, ScriptedEngine]:
    """Runs `use(base_url, key)` in a thread while the server serves."""

    async def run() -> tuple[Any, EpisodeTrace, ScriptedEngine]:
        async with stage(*script, config=config, **options) as s:
            result = await asyncio.to_thread(use, s.endpoint.base_url, s.endpoint.key)
            return result, await s.proxy.close_episode("ep"), s.engine

    return asyncio.run(run())


def claude(url: str, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30)


def gpt(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=30)


@pytest.mark.parametrize("stream", [True, False])
def test_anthropic_messages(stream: bool) -> None:
    def use(url: str, key: str) -> list[Any]:
        seen = []
        history: list[Any] = [USER]
        with claude(url, key) as client:
            for _ in range(2):
                common: Any = {
                    "model": "policy-x",
                    "max_tokens": 2048,
                    "messages": history,
                    "tools": [LOOK_ANTHROPIC],
                    "thinking": THINKING,
                }
                if stream:
                    with client.messages.stream(**common) as events:
                        message = events.get_final_message()
                else:
                    message = client.messages.create(**common)
                seen.append(message)
                calls = [b for b in message.content if b.type == "tool_use"]
                results = [
                    {"type": "tool_result", "tool_use_id": c.id, "content": "ok"} for c in calls
                ]
                history = [*history, {"role": "assistant", "content": message.content}]
                history.append({"role": "user", "content": results})
        return seen

    (first, second), trace, engine = with_client(use, SAID, "done")
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "hm" and first.content[0].signature
    assert first.content[1].text == "I look."
    assert first.content[2].input == {"path": "ä"} and first.content[2].id.isalnum()
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert first.model == "policy-x"
    assert first.usage.input_tokens == engine.asked[0].prompt_ids.size
    assert first.usage.output_tokens == trace.calls[0].completion_tok
    assert extends(trace.calls[1].prompt_ids, trace.calls[0])
    assert all(call.delivery is Delivery.DELIVERED for call in trace.calls)


@pytest.mark.parametrize("stream", [True, False])
def test_openai_chat(stream: bool) -> None:
    def use(url: str, key: str) -> list[Any]:
        seen = []
        history: list[Any] = [USER]
        with gpt(url, key) as client:
            for _ in range(2):
                common: Any = {"model": "policy-x", "messages": history, "tools": [LOOK]}
                if stream:
                    common["stream_options"] = {"include_usage": True}
                    with client.chat.completions.stream(**common) as events:
                        completion = events.get_final_completion()
                else:
                    completion = client.chat.completions.create(**common)
                seen.append(completion)
                message = completion.choices[0].message
                history = [*history, message.model_dump(exclude_none=True, exclude={"parsed"})]
                history += [
                    {"role": "tool", "tool_call_id": c.id, "content": TEXT_OK}
                    for c in message.tool_calls or ()
                ]
        return seen

    (first, second), trace, engine = with_client(use, SAID, "done")
    message = first.choices[0].message
    assert message.content == "I look." and message.reasoning_content == "hm"
    assert message.tool_calls[0].function.name == "look"
    assert message.tool_calls[0].id.isalnum()
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].finish_reason == "stop"
    assert first.model == "policy-x"
    assert first.usage.prompt_tokens == engine.asked[0].prompt_ids.size
    assert first.usage.completion_tokens == trace.calls[0].completion_tok
    assert extends(trace.calls[1].prompt_ids, trace.calls[0])


def test_slow_engine_is_bridged_by_signs_of_life() -> None:
    """The client would give up after 0.3 s of silence; the engine is busy for 0.8 s."""

    def use(url: str, key: str) -> Any:
        with claude(url, key).with_options(timeout=0.3) as client:
            events = client.messages.create(model="m", max_tokens=9, messages=[USER], stream=True)
            return [event.type for event in events]

    busy = [Overloaded("full")] * 5
    kinds, trace, _ = with_client(use, *busy, "done")
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert trace.causes == {"hidden Overloaded": 5}
    assert len(trace.calls) == 1


def test_engine_that_stays_away_is_an_error_in_both_protocols() -> None:
    config = ProxyConfig(engine_wait_s=0.0, settle_interval_s=0.002)

    def use(url: str, key: str) -> list[str]:
        seen = []
        with claude(url, key) as client, gpt(url, key) as other:
            for stream in (False, True):
                try:
                    list(
                        client.messages.create(
                            model="m", max_tokens=9, messages=[USER], stream=stream
                        )
                    )
                except anthropic.APIStatusError as error:
                    seen.append(type(error.body).__name__ + str(error.body))
                try:
                    list(other.chat.completions.create(model="m", messages=[USER], stream=stream))
                except openai.APIError as error:
                    seen.append(str(error.code))
        return seen

    seen, trace, _ = with_client(use, *[Overloaded("full")] * 4, config=config)
    assert len(seen) == 4
    assert all("overloaded" in text for text in seen), seen
    assert trace.calls == () and trace.failure.startswith("EngineAway: ")


def test_overflow_is_worded_as_each_protocol_does() -> None:
    def use(url: str, key: str) -> list[Any]:
        seen: list[Any] = []
        with claude(url, key) as client, gpt(url, key) as other:
            with pytest.raises(anthropic.BadRequestError) as long:
                client.messages.create(model="m", max_tokens=9, messages=[USER], stream=True)
            seen.append(long.value)
            with pytest.raises(openai.BadRequestError) as longer:
                other.chat.completions.create(model="m", messages=[USER], stream=True)
            seen.append(longer.value)
        return seen

    (one, two), trace, engine = with_client(use, window_tok=8)
    size = tiny_codec().render_fresh([USER]).size
    assert one.body["error"]["type"] == "invalid_request_error"
    assert f"prompt is too long: {size} tokens > 8 maximum" in one.body["error"]["message"]
    assert two.code == "context_length_exceeded"
    assert f"{size} tokens" in str(two)
    assert not engine.asked and trace.causes == {"overflow": 2}


def test_wrong_key_wrong_episode_and_bad_requests() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aa"}
    image: Any = {"type": "image", "source": source}

    def use(url: str, key: str) -> None:
        ask: Any = {"model": "m", "max_tokens": 9, "messages": [USER]}
        with claude(url, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as auth:
            client.messages.create(**ask)
        assert "prefix and key belong together" in str(auth.value)
        with gpt(url, "wrong") as other, pytest.raises(openai.AuthenticationError) as denied:
            other.chat.completions.create(model="m", messages=[USER])
        assert denied.value.code == "invalid_api_key"
        with claude(url + "x", key) as client, pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**ask)
        assert "open episode" in str(missing.value)
        with claude(url, key) as client, pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(**{**ask, "messages": [{"role": "user", "content": [image]}]})
        assert "text only" in str(bad.value)
        with gpt(url, key) as other, pytest.raises(openai.BadRequestError):
            other.chat.completions.create(model="m", messages=[USER], n=2)

    _, trace, engine = with_client(use)
    assert not engine.asked and trace.calls == ()


def test_models_and_token_counts() -> None:
    def use(url: str, key: str) -> tuple[list[str], list[str], int]:
        with claude(url, key) as client, gpt(url, key) as other:
            return (
                [model.id for model in client.models.list()],
                [model.id for model in other.models.list()],
                client.messages.count_tokens(model="m", messages=[USER]).input_tokens,
            )

    (ours, theirs, count), trace, _ = with_client(use)
    assert ours == theirs == ["policy"]
    assert count == tiny_codec().render_fresh([USER]).size
    assert trace.calls == ()
