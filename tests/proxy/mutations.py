"""Requests that a harness in trouble might send: valid ones of all protocols, damaged at random."""

from __future__ import annotations

import copy
import gzip
import json
import random
from typing import Any

from tests.proxy.raw_http import Wire
from tests.proxy.support import LOOK, LOOK_ANTHROPIC

TEXTS = [
    "", "x", "\x00", "\ud800", "\udfff\ud800", "🙂", "<|im_end|>\n<|im_start|>system", "\u2028",
    "\ufdd0",
    "<think>", "</think>", "<tool_call>{", "ep", "user", "tool", "{", "e" * 3000, "../..", "%s{0}",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**400, -0.0, 1e308, 1e-320, float("inf"), float("nan"),
    [], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"type": "text", "text": 3},
    [{"type": "image"}], {"type": "object"}, ["x", 3],
]  # fmt: skip
PATHS = [
    "/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens", "/v1/chat/completions",
    "/v1/responses", "/v1/responses/input_tokens", "/chat/completions", "//v1//messages", "/v1",
    "/v1/models", "/v1/models/x", "/v1/embeddings", "/api/hello", "/%00%ff", "/v1/messages/",
    "/../ep1/v1/messages", "/v1/responses/resp_1", "",
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"]
HEADERS = [
    ("content-encoding", "gzip"), ("content-encoding", "br"), ("content-encoding", "deflate"),
    ("content-type", "text/plain"), ("content-type", "multipart/form-data"),
    ("x-stainless-retry-count", "-1"), ("x-agent", "\xff\xfe"), ("x-agent", "a" * 4000),
    ("accept-encoding", "zstd"), ("anthropic-version", "x"), ("expect", "100-continue"),
    ("x-claude-code-agent-id", "a"), ("thread-id", "t"), ("x-codex-turn-metadata", "{"),
]  # fmt: skip

USER = {"role": "user", "content": "Do it."}
PARTS = [{"type": "text", "text": "Do it."}, {"type": "text", "text": "Now."}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "Act."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"path": "x"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": PARTS}, *PARTS]},
        ],
        "tools": [LOOK_ANTHROPIC], "thinking": {"type": "enabled", "budget_tokens": 9},
        "stop_sequences": ["END"], "tool_choice": {"type": "auto"}, "temperature": 1.0,
    },
    "/v1/chat/completions": {
        "model": "m", "stream_options": {"include_usage": True}, "stop": "END",
        "messages": [
            {"role": "system", "content": "Act."}, {"role": "user", "content": PARTS},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "a", "type": "function",
                 "function": {"name": "look", "arguments": '{"path": "x"}'}},
                {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "x"}}]},
            {"role": "tool", "tool_call_id": "b", "content": PARTS},
            {"role": "tool", "tool_call_id": "a", "content": "ok"},
        ],
        "tools": [LOOK, {"type": "custom", "custom": {"name": "patch", "description": "d"}}],
        "max_completion_tokens": 9,
    },
    "/v1/responses": {
        "model": "m", "instructions": "Act.", "max_output_tokens": 9, "store": False,
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "So."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "namespace": "n",
             "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "a", "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": "b",
             "output": [{"type": "input_text", "text": "ok"}]},
        ],
        "tools": [
            {"type": "function", "name": "look", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "tool_search", "execution": "client"}, {"type": "web_search"},
        ],
        "reasoning": {"effort": "high"}, "text": {"format": {"type": "text"}},
    },
}  # fmt: skip


def damaged(rng: random.Random, prefix: str, key: str) -> Wire:
    """A request below `prefix`; about one in five has nothing wrong with it."""
    path = rng.choice(list(VALID))
    body = copy.deepcopy(VALID[path])
    body["stream"] = rng.random() < 0.5
    body["metadata"] = {"n": rng.randrange(10**6)}
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        damage(rng, body)
    raw = damaged_text(rng, body) if rng.random() < 0.25 else encoded(rng, body)
    if path == "/v1/messages" and rng.random() < 0.1:
        path += "/count_tokens"
    method = rng.choice(METHODS) if rng.random() < 0.03 else "POST"
    if rng.random() < 0.04:
        path = rng.choice(PATHS)
    if rng.random() < 0.02:
        prefix = rng.choice(["", "/e", "/e/", "/e/none", "/health", "/e/%ff"])
    return Wire(method, prefix + path, headers_of(rng, key), raw)


def damage(rng: random.Random, body: dict[str, Any]) -> None:
    """Changes one place of a body."""
    places = list(places_of(body))
    holder, key = rng.choice(places)
    deed = rng.randrange(8)
    if deed < 3:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif deed == 3:
        holder[key] = rng.choice(TEXTS)
    elif deed == 4:
        del holder[key]
    elif deed == 5:
        other, spot = rng.choice(places)
        holder[key] = copy.deepcopy(other[spot])
    elif deed == 6:
        holder[key] = [holder[key]]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[rng.choice(TEXTS)] = holder.pop(key)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of everything in a value."""
    found: list[tuple[Any, Any]] = []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places_of(value[key])
    return found


def encoded(rng: random.Random, body: Any) -> bytes:
    ascii_only = rng.random() < 0.5
    return json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


def damaged_text(rng: random.Random, body: Any) -> bytes:
    """A body's text, damaged as text."""
    raw = encoded(rng, body)
    spot = rng.randrange(len(raw))
    deed = rng.randrange(10)
    if deed == 0:
        return raw[:spot]
    if deed == 1:
        return raw[:spot] + bytes([rng.randrange(256)]) + raw[spot + 1 :]
    if deed == 2:
        return b'{"model": 3, "messages": 0, "input": {}, "model": "m", ' + raw[1:]
    if deed == 3:
        return b"\xef\xbb\xbf" + raw
    if deed == 4:
        return raw.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-7"]))
    if deed == 5:
        return gzip.compress(raw)[: rng.choice([5, 40, None])]
    if deed == 6:
        deep = rng.choice([50, 600, 990, 5000])
        nested = rng.choice([b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep])
        place = rng.choice([b'"object"', b'"Do it."', b'"x"', b'"m"', b'"Act."'])
        return raw.replace(place, nested, 1)
    if deed == 7:
        return b'{"metadata": ' + b"9" * rng.choice([400, 5000]) + b", " + raw[1:]
    if deed == 8:
        giant = b"g" * rng.choice([10_000, 10_000, 10_000, 200_000])
        return raw.replace(b"Do it.", giant, 1)
    return rng.choice([b"", b"null", b"[]", b'"x"', b"NaN", b"{}", b"\x00" * 9, raw + raw])


def headers_of(rng: random.Random, key: str) -> tuple[tuple[str, str], ...]:
    if rng.random() < 0.03:
        key = rng.choice(["", "wrong", "\xe4", key + "x"])
    name, value = rng.choice([("x-api-key", key), ("authorization", f"Bearer {key}")])
    headers = [(name, value)]
    if rng.random() < 0.1:
        headers.append(rng.choice(HEADERS))
    return tuple(headers)
