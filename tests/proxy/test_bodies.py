"""Bodies and paths as harnesses and others send them: compressed, cut, too large, elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_jax.proxy import ProxyConfig
from clawgym_jax.proxy.bodies import object_of, slow_object_of
from clawgym_jax.proxy.faults import RequestFault
from clawgym_jax.proxy.protocol import dump, slow_dump
from tests.proxy.support import Stage, stage

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Do it."}]}).encode()
LIMIT = ProxyConfig(max_body_bytes=10_000, settle_interval_s=0.002)
ROOMY = ProxyConfig(max_body_bytes=200_000, settle_interval_s=0.002)  # a packed bomb fits
CALLS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


async def send(s: Stage, content: bytes, encoding: str, path: str = CALLS[1]) -> httpx.Response:
    headers = {**s.auth, "content-encoding": encoding}
    return await s.http.post(s.endpoint.base_url + path, content=content, headers=headers)


def test_compressed_bodies() -> None:
    packed = [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("", BODY),
    ]

    async def run() -> None:
        async with stage() as s:
            for encoding, content in packed:
                response = await send(s, content, encoding)
                assert response.status_code == 200, (encoding, response.text)
            calls = (await s.proxy.close_episode("ep")).calls
            assert len({call.prompt_ids.tobytes() for call in calls}) == 1

    asyncio.run(run())


BOMB = gzip.compress(b" " * 100_000_000, 9)
ODD: list[tuple[str, bytes, int, str]] = [
    ("gzip", BODY, 400, "compressed with gzip"),
    ("gzip", gzip.compress(BODY)[:-9], 400, "cut"),
    ("gzip", gzip.compress(BODY) + b"more", 400, "goes on"),
    ("gzip", b"", 400, "cut"),
    ("deflate", gzip.compress(BODY), 400, "compressed with deflate"),
    ("gzip", BOMB, 413, "max_body_bytes"),
    ("deflate", zlib.compress(b" " * 100_000), 413, "max_body_bytes"),
    ("br", BODY, 415, "send the body as it is"),
    ("zstd", BODY, 415, "zstd"),
    ("gzip, gzip", BODY, 415, "gzip"),
]


@pytest.mark.parametrize(
    ("encoding", "content", "status", "words"), ODD, ids=map(str, range(len(ODD)))
)
def test_odd_compressed_bodies(encoding: str, content: bytes, status: int, words: str) -> None:
    limit = ROOMY if content is BOMB else LIMIT

    async def run() -> None:
        async with stage(config=limit) as s:
            for path in CALLS:
                response = await send(s, content, encoding, path)
                assert response.status_code == status, response.text
                assert words in response.json()["error"]["message"]
            assert not s.engine.asked

    asyncio.run(run())


def test_a_bomb_is_never_held_whole() -> None:
    async def run() -> int:
        async with stage(config=ROOMY) as s:
            tracemalloc.start()
            try:
                assert (await send(s, BOMB, "gzip")).status_code == 413
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    assert asyncio.run(run()) < 10_000_000


@pytest.mark.parametrize("path", CALLS)
def test_too_large_a_body(path: str) -> None:
    async def run() -> None:
        async with stage(config=LIMIT) as s:
            response = await send(s, b" " * 10_001, "", path)
            assert response.status_code == 413
            error = response.json()["error"]
            assert "max_body_bytes" in error["message"]
            assert "request_too_large" in (error["type"], error.get("code"))

    asyncio.run(run())


def test_constants_that_are_not_json() -> None:
    async def run() -> None:
        async with stage() as s:
            for constant in ("NaN", "Infinity", "-Infinity"):
                body = f'{{"temperature": {constant}, '.encode() + BODY[1:]
                response = await send(s, body, "")
                assert response.status_code == 400 and constant in response.text

    asyncio.run(run())


# (method, path, with the key, status)
LOOKS: list[tuple[str, str, bool, int]] = [
    ("HEAD", "", False, 200),
    ("HEAD", "/", False, 200),
    ("HEAD", "/api/hello", False, 200),
    ("GET", "/api/hello", False, 200),
    ("GET", "/v1/models", False, 401),
    ("GET", "/v1/models/x", False, 401),
    ("GET", "/v1/models/some/name", True, 200),
    ("GET", "/v1/secrets", False, 401),
    ("GET", "/v1/secrets", True, 404),
    ("HEAD", "/v1/secrets", False, 401),
    ("GET", "/v1/messages", False, 401),
    ("GET", "/v1/messages", True, 405),
    ("GET", "/v1/responses", True, 405),
    ("GET", "/v1/responses/resp_1", True, 404),
    ("OPTIONS", "/v1/messages", False, 401),
    ("OPTIONS", "/v1/messages", True, 405),
    ("DELETE", "/v1/responses", True, 405),
    ("PUT", "/v1/chat/completions", True, 405),
    ("PATCH", "/v1/models", True, 404),
    ("POST", "/v1/models", True, 404),
    ("POST", "/", False, 401),
    ("POST", "/", True, 404),
    ("PROPFIND", "/v1/messages", True, 405),
    ("TRACE", "/%ff/%00", True, 404),
]


@pytest.mark.parametrize(("method", "path", "key", "status"), LOOKS)
def test_looks_and_other_methods(method: str, path: str, key: bool, status: int) -> None:
    async def run() -> None:
        async with stage() as s:
            headers = s.auth if key else {}
            response = await s.http.request(method, s.endpoint.base_url + path, headers=headers)
            assert response.status_code == status, response.text
            if method != "HEAD" and status >= 400:
                assert response.json()["error"]["message"].startswith("expected")
            assert ("allow" in response.headers) == (status == 405)
            assert not s.engine.asked

    asyncio.run(run())


@pytest.mark.parametrize("path", ["", "/", "/v1/messages", "/e", "/e/", "/e//v1/messages", "/e/x"])
def test_outside_of_every_prefix(path: str) -> None:
    async def run() -> None:
        async with stage() as s:
            for method in ("GET", "POST"):
                response = await s.http.request(method, s.proxy.origin + path)
                assert response.status_code == 404
                assert response.json()["error"]["message"].startswith("expected")

    asyncio.run(run())


def test_a_model_is_known_by_any_name() -> None:
    async def run() -> None:
        async with stage() as s:
            url = f"{s.endpoint.base_url}/v1/models"
            listed: Any = (await s.http.get(url, headers=s.auth)).json()
            assert [model["id"] for model in listed["data"]] == ["policy"]
            one = (await s.http.get(f"{url}/gpt-x", headers=s.auth)).json()
            assert (one["id"], one["object"], one["type"]) == ("gpt-x", "model", "model")

    asyncio.run(run())


def test_the_key_in_either_header() -> None:
    async def run() -> None:
        async with stage() as s:
            key, url = s.endpoint.key, f"{s.endpoint.base_url}/v1/models"
            for headers, status in (
                ({"authorization": f"bearer  {key}"}, 200),
                ({"x-api-key": key}, 200),
                ({"x-api-key": key, "authorization": "Bearer other"}, 200),
                ({"x-api-key": "other", "authorization": f"Bearer {key}"}, 200),
                ({"authorization": f"Basic {key}"}, 401),
                ({"authorization": key}, 401),
                ({"x-api-key": key + "x"}, 401),
                ({"x-api-key": ""}, 401),
            ):
                assert (await s.http.get(url, headers=headers)).status_code == status, headers

    asyncio.run(run())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), json_values, max_size=5), st.booleans())
@settings(max_examples=300)
def test_both_parsers_read_the_same(body: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        expected: Any = slow_object_of(raw)
    except RequestFault as fault:
        with pytest.raises(RequestFault) as found:
            object_of(raw)
        assert found.value.message == fault.message
    else:
        found_body = object_of(raw)
        assert found_body == expected and json.dumps(found_body) == json.dumps(expected)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_both_parsers_refuse_the_same(raw: bytes) -> None:
    results: list[Any] = []
    for parse in (object_of, slow_object_of):
        try:
            results.append(parse(raw))
        except RequestFault as fault:
            results.append(fault.message)
    assert results[0] == results[1]


@given(json_values)
@settings(max_examples=300)
def test_both_writers_say_the_same_on_one_line(value: Any) -> None:
    fast, slow = dump(value), slow_dump(value)
    assert json.loads(fast) == json.loads(slow)
    assert len(fast.decode().splitlines()) <= 1
