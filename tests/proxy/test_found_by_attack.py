"""What an attacker found once: each stays found."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from clawgym_jax.core.types import Role
from clawgym_jax.harness.generic import Generic
from clawgym_jax.proxy import ProxyConfig
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.http_bounds import MAX_HEADER_BYTES
from clawgym_jax.proxy.matching import KnownTurn, Place, SampledTurns
from clawgym_jax.proxy.splice import in_call_order
from clawgym_jax.proxy.turns import ToolCall, Turn
from tests.proxy.support import LOOK, USER, call_text, stage, tiny_codec

CALLS = tuple(ToolCall(name, "look", f'{{"path": "{name}"}}') for name in "pq")


def test_results_of_adjacent_assistant_messages_stay_with_their_calls() -> None:
    turns = [*(Turn("assistant", "", (call,)) for call in CALLS)]
    results = [Turn("tool", f"of {call.id}", tool_call_id=call.id) for call in CALLS]
    for shown in (results, results[::-1]):
        assert in_call_order([*turns, *shown]) == [*turns, *results]
    again = [Turn("user", "x"), Turn("assistant", "", CALLS[1:]), *results[::-1]]
    assert in_call_order(again)[-2:] == results[::-1]  # q is this turn's only call


def test_repetitive_texts_do_not_stop_the_world() -> None:
    """Counted, not timed: at most one candidate for each place in the text."""
    sampled, looked_at = SampledTurns(), 0
    for index in range(100):
        turn = Turn("assistant", "ok")
        ids = tiny_codec().encode_text("ok")
        sampled.add(KnownTurn(f"c{index}", index, turn, ids, index, ()))
    starting = sampled._starting

    def counted(*arguments: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return starting(*arguments)

    sampled._starting = counted  # type: ignore[method-assign]
    match = sampled.match(Turn("assistant", "ok " * 40 + "I see " + "a" * 50), Place(-1))
    assert not match.parts and looked_at <= 41


def test_overlong_text_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, encoded = tiny_codec(), 0
    encode = codec.encode_text

    def counted(text: str) -> Any:
        nonlocal encoded
        encoded += len(text)
        return encode(text)

    async def run() -> None:
        async with stage("fine", window_tok=512) as s:
            monkeypatch.setattr(codec, "encode_text", counted)
            huge = {"role": "user", "content": "x" * (513 * codec.longest_token_chars)}
            refused = await s.chat([huge])
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert encoded == 0
            assert (await s.chat([USER])).status_code == 200

    asyncio.run(run())


def test_deeply_nested_arguments_are_a_call_like_any_other() -> None:
    deep = '{"a":' + "[" * 600 + "]" * 600 + "}"

    async def run() -> None:
        async with stage(call_text("look", deep), "b", max_tok=4000) as s:
            answer = (await s.chat([USER], tools=[LOOK])).json()["choices"][0]["message"]
            await s.chat([USER, answer, USER], tools=[LOOK])
            trace = await s.proxy.close_episode("ep")
            assert not trace.failure and len(trace.calls) == 2

    asyncio.run(run())


def test_a_repeat_with_other_limits_is_another_request() -> None:
    config = ProxyConfig(settle_interval_s=0.002, retry_grace_s=5.0)

    async def run() -> None:
        async with stage("one", "two", config=config, gated=True) as s:
            assert s.engine.gate is not None
            first = asyncio.create_task(s.chat([USER], max_tokens=1))
            while not s.engine.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            first.cancel()
            await asyncio.wait({first})
            s.engine.gate.set()
            answer = await s.chat([USER], max_tokens=50, stop=["STOP"])
            assert answer.json()["choices"][0]["message"]["content"] == "two"
            assert s.engine.asked[1].stop.strings == ("STOP",)

    asyncio.run(run())


@pytest.mark.parametrize("text", ["T1. plus NOTE", "NOTE T1.", "NOTE"])
def test_text_added_to_a_turn_is_not_lost(text: str) -> None:
    async def run() -> None:
        async with stage("T1.\n" + call_text("look", {"path": "a"}), "b") as s:
            answer = (await s.chat([USER], tools=[LOOK])).json()["choices"][0]["message"]
            await s.chat([USER, {**answer, "content": text}, USER], tools=[LOOK])
            _, second = (await s.proxy.close_episode("ep")).calls
            assert "NOTE" in tiny_codec().decode(second.prompt_ids)
            assert "edited turn" in second.breaks and not second.spans

    asyncio.run(run())


def test_one_id_for_two_calls_is_an_edited_turn() -> None:
    sampled = SampledTurns()
    ids = tiny_codec().encode_text("x")
    sampled.add(KnownTurn("c0", 0, Turn("assistant", "", CALLS), ids, 1, ()))
    twice = Turn("assistant", "", (CALLS[0], CALLS[0]))
    assert sampled.match(twice, Place(1)).cause == "edited turn"


def test_count_tokens_knows_the_agent() -> None:
    said = [f"<think>\n{thought}\n</think>\n\nok" for thought in ("a", "a much longer thought")]

    async def run() -> None:
        async with stage(*said, "x") as s:
            agents = [{"x-agent": "one"}, {"x-agent": "two"}]
            for agent in agents:
                await s.messages([USER], agent)
            history = [USER, {"role": "assistant", "content": "ok"}, USER]
            body = {"model": "m", "messages": history}
            url = f"{s.endpoint.base_url}/v1/messages/count_tokens"
            counted = await s.http.post(url, json=body, headers={**s.auth, **agents[0]})
            await s.messages(history, agents[0])
            assert counted.json()["input_tokens"] == s.engine.asked[-1].prompt_ids.size

    asyncio.run(run())


def test_system_news_in_a_conversation_is_not_another_agent() -> None:
    async def run() -> None:
        async with stage("a", "b", harness=Generic()) as s:
            system = {"role": "system", "content": "You act."}
            answer = (await s.chat([system, USER])).json()["choices"][0]["message"]
            news = {"role": "system", "content": "today is monday"}
            await s.chat([system, USER, answer, USER, news])
            one, two = (await s.proxy.close_episode("ep")).calls
            assert (two.chain, two.role, two.breaks) == ("main", Role.MAIN, ())
            assert extends(two.prompt_ids, one)

    asyncio.run(run())


def test_headers_without_end_are_refused() -> None:
    async def run() -> None:
        async with stage("fine") as s:
            port = s.proxy.port

            def flood() -> bytes:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
                    line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
                    sent = 0
                    try:
                        while sent < 4 * MAX_HEADER_BYTES:
                            sent += line.send(b"x-more: " + b"y" * 8000 + b"\r\n")
                        return line.recv(100)
                    except ConnectionError:
                        return b"closed"

            answer = await asyncio.to_thread(flood)
            assert answer.startswith((b"HTTP/1.1 431", b"closed"))
            assert (await s.chat([USER])).status_code == 200

    asyncio.run(run())
