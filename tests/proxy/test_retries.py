"""Disconnects, repeats and the end of an episode."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawgym_jax.core.types import Delivery, Finish
from clawgym_jax.proxy.breaks import extends
from clawgym_jax.proxy.call_log import read_calls
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.flight import Flight
from clawgym_jax.proxy.openai_chat import OpenAIChat
from clawgym_jax.proxy.streaming import Client, answer_stream, answer_whole
from clawgym_jax.proxy.turns import Answer, Request, Turn
from tests.proxy.support import USER, Stage, completion, stage, tiny_codec

REQUEST = Request("openai-chat", "m", (Turn("user", "Do it."),), (), None)
PATIENT = ProxyConfig(settle_interval_s=0.002, retry_grace_s=5.0, keepalive_s=0.02)
HASTY = ProxyConfig(settle_interval_s=0.002, retry_grace_s=0.05, keepalive_s=0.02)


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def hang_up(s: Stage, **options: Any) -> None:
    """Sends the request and goes away while the engine is still at it."""
    before = len(s.engine.asked)
    request = asyncio.create_task(s.chat([USER], **options))
    await until(lambda: len(s.engine.asked) > before)
    await asyncio.sleep(0.03)
    request.cancel()
    await asyncio.wait({request})
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("stream", [True, False])
def test_a_repeat_within_the_grace_gets_the_same_sample(stream: bool) -> None:
    async def run() -> None:
        async with stage("one", "two", config=PATIENT, gated=True) as s:
            assert s.engine.gate is not None
            await hang_up(s, stream=stream)
            s.engine.gate.set()
            response = await s.chat([USER])
            assert response.json()["choices"][0]["message"]["content"] == "one"
            (call,) = (await s.proxy.close_episode("ep")).calls
            assert call.delivery is Delivery.DELIVERED
            assert len(s.engine.asked) == 1 and not s.engine.cancelled

    asyncio.run(run())


def test_a_sample_that_ended_unseen_waits_for_the_repeat() -> None:
    async def run() -> None:
        async with stage("one", config=PATIENT, gated=True) as s:
            assert s.engine.gate is not None
            await hang_up(s, stream=True)
            s.engine.gate.set()
            await until(lambda: read_calls(s.log_path))
            assert read_calls(s.log_path)[0].delivery is Delivery.PENDING
            response = await s.chat([USER])
            assert response.json()["choices"][0]["message"]["content"] == "one"
            assert read_calls(s.log_path)[0].delivery is Delivery.DELIVERED

    asyncio.run(run())


def test_a_repeat_ends_the_grace() -> None:
    config = ProxyConfig(settle_interval_s=0.002, retry_grace_s=0.3, keepalive_s=0.02)

    async def run() -> None:
        async with stage("one", "two", config=config, gated=True) as s:
            assert s.engine.gate is not None
            await hang_up(s)
            repeat = asyncio.create_task(s.chat([USER]))
            await asyncio.sleep(0.5)
            s.engine.gate.set()
            assert (await repeat).json()["choices"][0]["message"]["content"] == "one"
            assert not s.engine.cancelled

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left_as_the_sample_came_has_not_got_it(stream: bool) -> None:
    answer = Answer("ep.0", Turn("assistant", "one"), "stop", None, 1, 1, 0)
    outcomes: list[Delivery] = []

    async def run(stays: bool) -> None:
        async def receive() -> dict[str, Any]:
            if stays:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            return None

        async def sample() -> Answer:
            return answer

        flight = Flight(
            "ep.0",
            1,
            9.0,
            lambda: None,
            lambda _, outcome: outcomes.append(outcome),
            lambda _: None,
        )
        flight.launch(sample())
        await flight.task
        async with Client(receive, send) as client:
            await asyncio.sleep(0)
            if stream:
                await answer_stream(client, OpenAIChat(), REQUEST, flight, 9.0)
            else:
                await answer_whole(client, OpenAIChat(), REQUEST, flight)

    asyncio.run(run(stays=False))
    assert outcomes == []
    asyncio.run(run(stays=True))
    assert outcomes == [Delivery.DELIVERED]


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_grace_the_sample_is_cancelled(stream: bool) -> None:
    async def run() -> None:
        async with stage("one", "two", config=HASTY, gated=True) as s:
            assert s.engine.gate is not None
            await hang_up(s, stream=stream)
            await until(lambda: s.engine.cancelled == ["ep.0"])
            s.engine.gate.set()
            response = await s.chat([USER])
            assert response.json()["choices"][0]["message"]["content"] == "two"
            lost, kept = (await s.proxy.close_episode("ep")).calls
            assert (lost.delivery, lost.completion.finish) == (
                Delivery.DISCONNECTED,
                Finish.ABORT,
            )
            assert (kept.delivery, kept.attempt) == (Delivery.DELIVERED, 1)

    asyncio.run(run())


def test_the_same_body_after_a_delivered_answer_is_sampled_anew() -> None:
    async def run() -> None:
        async with stage("one", "two") as s:
            said = [
                (await s.chat([USER])).json()["choices"][0]["message"]["content"] for _ in range(2)
            ]
            assert said == ["one", "two"]

    asyncio.run(run())


def test_two_live_connections_are_two_samples_without_a_retry_header() -> None:
    async def run() -> None:
        async with stage("one", "two", gated=True) as s:
            assert s.engine.gate is not None
            both = [asyncio.create_task(s.chat([USER])) for _ in range(2)]
            await until(lambda: len(s.engine.asked) == 2)
            s.engine.gate.set()
            answers = [await task for task in both]
            texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
            assert texts == {"one", "two"}
            calls = (await s.proxy.close_episode("ep")).calls
            assert [call.delivery for call in calls] == [Delivery.DELIVERED] * 2

    asyncio.run(run())


def test_two_live_connections_with_a_retry_header_are_one_sample() -> None:
    async def run() -> None:
        async with stage("one", "two", gated=True) as s:
            assert s.engine.gate is not None
            one = asyncio.create_task(s.chat([USER]))
            await until(lambda: s.engine.asked)
            two = asyncio.create_task(s.chat([USER], {"x-stainless-retry-count": "2"}))
            await asyncio.sleep(0.05)
            s.engine.gate.set()
            bodies = [(await task).json() for task in (one, two)]
            assert bodies[0]["id"] == bodies[1]["id"]
            trace = await s.proxy.close_episode("ep")
            assert len(trace.calls) == 1 and trace.causes["repeat joined"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("told_apart", [True, False])
def test_equal_bodies_of_two_sub_agents_at_once(told_apart: bool) -> None:
    """Two samples that say the same in other tokens; each agent goes on from its own."""
    codec = tiny_codec()
    letters = [codec.encode_text(c)[0] for c in "done"]
    spelled = [
        completion([*ids, codec.end_of_turn_id]) for ids in (letters, codec.encode_text("done"))
    ]
    agents: list[dict[str, str]] = (
        [{"x-agent": "a1"}, {"x-agent": "a2"}] if told_apart else [{}, {}]
    )
    body = [{"role": "system", "content": "You help."}, USER]

    async def run() -> None:
        async with stage(*spelled, "a", "b", gated=True) as s:
            assert s.engine.gate is not None
            both = []
            for agent in agents:
                both.append(asyncio.create_task(s.chat(body, agent)))
                await until(lambda: len(s.engine.asked) == len(both))
            s.engine.gate.set()
            answers = [(await task).json()["choices"][0]["message"] for task in both]
            assert [answer["content"] for answer in answers] == ["done", "done"]
            for agent, answer in zip(agents, answers, strict=True):
                await s.chat([*body, answer, {"role": "user", "content": str(agent)}], agent)
            first, second, *later = (await s.proxy.close_episode("ep")).calls
            assert len({c.call_id for c in (first, second)}) == 2
            assert all(c.delivery is Delivery.DELIVERED for c in (first, second))
            for call, own in zip(later, (first, second), strict=True):
                if told_apart:
                    assert extends(call.prompt_ids, own)
                else:  # nothing tells whose they are: the latest that was delivered
                    assert extends(call.prompt_ids, second)

    asyncio.run(run())


KILLED = """
import asyncio, os, signal, sys
from clawgym_jax.proxy import recorder
from tests.proxy.support import stage, USER

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

recorder.delivery_frame = killed  # after the last event, before its record

async def run():
    async with stage("one", folder=sys.argv[1]) as s:
        url = f"{s.endpoint.base_url}/v1/chat/completions"
        body = {"model": "m", "messages": [USER], "stream": True}
        async with s.http.stream("POST", url, json=body, headers=s.auth) as response:
            async for line in response.aiter_lines():
                print(line, flush=True)

asyncio.run(run())
"""


def test_a_crash_between_the_last_event_and_its_record_is_undelivered(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (call,) = read_calls(tmp_path / "calls.log")
    assert call.text == "one" and call.delivery is Delivery.PENDING


def test_closing_cancels_what_nobody_waits_for() -> None:
    async def run() -> None:
        async with stage("one", config=PATIENT, gated=True) as s:
            await hang_up(s, stream=True)
            (call,) = (await asyncio.wait_for(s.proxy.close_episode("ep"), 2)).calls
            assert call.completion.finish is Finish.ABORT
            assert call.delivery is Delivery.DISCONNECTED
            assert s.engine.cancelled == ["ep.0"]
            assert read_calls(s.log_path)[0].delivery is Delivery.DISCONNECTED

    asyncio.run(run())


def test_closing_is_bounded_while_a_client_still_waits() -> None:
    config = ProxyConfig(settle_interval_s=0.002, settle_timeout_s=0.1, keepalive_s=0.02)

    async def run() -> None:
        async with stage("one", config=config, gated=True) as s:
            request = asyncio.create_task(s.chat([USER]))
            await until(lambda: s.engine.asked)
            trace = await asyncio.wait_for(s.proxy.close_episode("ep"), 2)
            assert trace.calls[0].completion.finish is Finish.ABORT
            assert (await request).json()["choices"][0]["finish_reason"] == "length"
            assert (await s.chat([USER])).status_code == 404

    asyncio.run(run())


def test_an_engine_that_ignores_a_cancel_does_not_block_the_end() -> None:
    config = ProxyConfig(settle_timeout_s=0.1, cancel_timeout_s=0.05)

    async def run() -> None:
        async with stage("one", config=config, gated=True) as s:
            s.engine.cancel = lambda request_id: None  # type: ignore[method-assign]
            await hang_up(s)
            trace = await asyncio.wait_for(s.proxy.close_episode("ep"), 15)
            assert trace.calls == ()
            assert trace.causes["engine ignored a cancel"] == 1

    asyncio.run(run())


def test_the_record_is_written_before_the_answer() -> None:
    async def run() -> None:
        async with stage("one") as s:
            url = f"{s.endpoint.base_url}/v1/chat/completions"
            body = {"model": "m", "messages": [USER], "stream": True}
            async with s.http.stream("POST", url, json=body, headers=s.auth) as response:
                async for line in response.aiter_lines():
                    if '"one"' in line:
                        assert [c.call_id for c in read_calls(s.log_path)] == ["ep.0"]
                        return
            raise AssertionError("the answer never came")

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answered_call_leaves_no_cycles_and_no_flight(stream: bool) -> None:
    """With 300 agents at once, the collector's passes over them held up everybody's answers."""

    async def run() -> None:
        async with stage(*map(str, range(6)), config=PATIENT) as s:
            await s.chat([USER], stream=stream)
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for index in range(5):
                    await s.chat([USER, {"role": "user", "content": str(index)}], stream=stream)
                gc.collect()
                left = [type(item).__name__ for item in gc.garbage]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
            assert not {"Client", "RequestResponseCycle", "CancelledError", "Flight"} & set(left)
            assert not [item for item in gc.get_objects() if isinstance(item, Flight)]

    asyncio.run(run())
