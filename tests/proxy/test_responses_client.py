"""The `openai` client's Responses calls, in a thread, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from clawgym_jax.core.errors import Overloaded
from clawgym_jax.core.types import Delivery, Finish
from clawgym_jax.proxy import ProxyConfig
from clawgym_jax.proxy.breaks import extends
from tests.proxy.support import LOOK, call_text, completion, tiny_codec
from tests.proxy.test_official_clients import gpt, with_client

FUNCTION: Any = {"type": "function", "strict": False, **LOOK["function"]}  # type: ignore[dict-item]
PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes a file."}
SPACE: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
}
TOOLS = [FUNCTION, PATCH, SPACE]
SAID = (
    "<think>\nhm\n</think>\n\nI look.\n"
    + call_text("look", {"path": "ä"})
    + call_text("patch", {"input": "+x"})
    + call_text("agents__spawn", {"n": 1})
    + call_text("look", '{"path": }')
)


def outputs_of(items: list[Any]) -> list[Any]:
    """Results of all calls, the last call's first."""
    kinds = {
        "function_call": "function_call_output",
        "custom_tool_call": "custom_tool_call_output",
    }
    return [
        {"type": kinds[item.type], "call_id": item.call_id, "output": f"ran {item.name}"}
        for item in reversed(items)
        if item.type in kinds
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_turns_with_reasoning_and_all_kinds_of_calls(stream: bool) -> None:
    def use(url: str, key: str) -> list[Any]:
        seen = []
        history: list[Any] = [{"role": "user", "content": "Do it."}]
        with gpt(url, key) as client:
            for _ in range(2):
                common: Any = {
                    "model": "policy-x",
                    "instructions": "Act.",
                    "input": history,
                    "tools": TOOLS,
                    "store": False,
                    "include": ["reasoning.encrypted_content"],
                }
                if stream:
                    with client.responses.stream(**common) as events:
                        response: Any = events.get_final_response()
                else:
                    response = client.responses.create(**common)
                seen.append(response)
                history = [*history, *response.output, *outputs_of(response.output)]
        return seen

    (first, second), trace, engine = with_client(use, SAID, "done")
    kinds = ["reasoning", "message", "function_call", "custom_tool_call", *["function_call"] * 2]
    assert [item.type for item in first.output] == kinds
    assert first.output[0].summary[0].text == "hm"
    assert first.output_text == "I look." and second.output_text == "done"
    assert first.output[2].arguments == '{"path": "ä"}' and first.output[2].call_id.isalnum()
    assert first.output[3].input == "+x"
    assert (first.output[4].namespace, first.output[4].name) == ("agents", "spawn")
    assert first.output[5].arguments == '{"path": }'
    assert (first.status, second.status, first.model) == ("completed", "completed", "policy-x")
    usage = first.usage
    assert usage.input_tokens == engine.asked[0].prompt_ids.size
    assert usage.output_tokens == trace.calls[0].completion_tok
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert extends(trace.calls[1].prompt_ids, trace.calls[0])
    assert trace.causes == {"malformed tool call": 1}
    prompt = tiny_codec().decode(trace.calls[1].prompt_ids)
    ran = [prompt.rindex(f"ran {name}") for name in ("look", "spawn", "patch")]
    assert ran == sorted(ran, reverse=True)
    assert all(call.protocol == "openai-responses" for call in trace.calls)
    assert all(call.delivery is Delivery.DELIVERED for call in trace.calls)


def test_what_was_asked_for_is_recorded() -> None:
    def use(url: str, key: str) -> None:
        with gpt(url, key) as client:
            client.responses.create(
                model="m",
                input="Do it.",
                temperature=0.1,
                max_output_tokens=7,
                tools=[FUNCTION, {"type": "web_search"}],
                tool_choice={"type": "function", "name": "look"},
                reasoning={"effort": "high"},
                parallel_tool_calls=False,
            )

    _, trace, engine = with_client(use, "ok")
    asked = trace.calls[0].requested
    assert asked["temperature"] == 0.1 and asked["max_output_tokens"] == 7
    assert asked["tool_choice"] == {"type": "function", "name": "look"}
    assert asked["reasoning"] == {"effort": "high"}
    assert asked["tools_left_out"] == ["web_search"]
    assert engine.asked[0].params.max_tok == 7
    assert engine.asked[0].params.temperature == 1.0


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_answer_is_incomplete(stream: bool) -> None:
    def use(url: str, key: str) -> Any:
        with gpt(url, key) as client:
            if not stream:
                return client.responses.create(model="m", input="Do it.")
            events = client.responses.create(model="m", input="Do it.", stream=True)
            *_, last = events
            assert last.type == "response.incomplete"
            return last.response

    said = completion(tiny_codec().encode_rendered("half").tolist(), Finish.LENGTH)
    response, _, _ = with_client(use, said)
    assert response.status == "incomplete" and response.output_text == "half"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_errors() -> None:
    def use(url: str, key: str) -> None:
        ask: Any = {"model": "m", "input": "Do it."}
        with gpt(url, "wrong") as client, pytest.raises(openai.AuthenticationError) as denied:
            client.responses.create(**ask)
        assert denied.value.code == "invalid_api_key"
        with gpt(url + "x", key) as client, pytest.raises(openai.NotFoundError):
            client.responses.create(**ask)
        with gpt(url, key) as client:
            with pytest.raises(openai.BadRequestError, match="send the whole history"):
                client.responses.create(**ask, previous_response_id="resp_1")
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve("resp_1")
            for streamed in (False, True):
                with pytest.raises(openai.BadRequestError) as long:
                    client.responses.create(model="m", input="long " * 4096, stream=streamed)
                assert long.value.code == "context_length_exceeded"
                assert "exceeds the context window of this model" in str(long.value)

    _, trace, engine = with_client(use)
    assert not engine.asked and trace.causes == {"overflow": 2}


def test_an_engine_that_stays_away() -> None:
    away = ProxyConfig(engine_wait_s=0.0, settle_interval_s=0.002)

    def use(url: str, key: str) -> Any:
        with gpt(url, key) as client:
            *_, last = client.responses.create(model="m", input="Do it.", stream=True)
            return last

    last, trace, _ = with_client(use, Overloaded("full"), config=away)
    assert last.type == "response.failed" and last.response.error.code == "overloaded"
    assert trace.calls == ()


def test_length_of_a_prompt() -> None:
    def use(url: str, key: str) -> tuple[int, int]:
        with gpt(url, key) as client:
            common: Any = {"model": "m", "input": "Do it.", "tools": [FUNCTION]}
            counted = client.responses.input_tokens.count(**common, instructions="Act.")
            asked = client.responses.create(**common, instructions="Act.")
            return counted.input_tokens, asked.usage.input_tokens

    (counted, fed), trace, _ = with_client(use, "ok")
    assert counted == fed == trace.calls[0].prompt_tok
