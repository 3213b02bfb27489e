"""Bodies of requests: read within a limit, inflated, decoded.

Not here: what a body says (protocol files).
Invariant: no more than the limit is ever held, compressed or not; text in a body can be encoded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request as HttpRequest

from clawgym_jax.proxy.faults import FaultKind, RequestFault, invalid

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_ZLIB_FIRST_BYTES = (0x08, 0x18, 0x28, 0x38, 0x48, 0x58, 0x68, 0x78)


async def read_json(http: HttpRequest, limit_bytes: int) -> Mapping[str, Any]:
    """The JSON object that a request carries. Raises RequestFault."""
    encoding = http.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", *_WINDOW_BITS):
        raise RequestFault(
            FaultKind.ENCODING,
            f"expected content-encoding gzip, deflate or none, got {encoding[:40]!r}; "
            "send the body as it is",
        )
    raw = await _read(http, limit_bytes)
    if encoding in _WINDOW_BITS:
        raw = _inflate(raw, encoding, limit_bytes)
    return object_of(raw)


async def _read(http: HttpRequest, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _inflate(raw: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Some senders' deflate lacks the header that the standard asks for."""
    bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and raw and raw[0] not in _ZLIB_FIRST_BYTES:
        bits = -15
    inflater = zlib.decompressobj(bits)
    try:
        text = inflater.decompress(raw, limit_bytes + 1)
    except zlib.error as error:
        raise invalid(f"a body compressed with {encoding}", raw[:20], str(error)) from error
    if len(text) > limit_bytes:
        raise _too_large(limit_bytes)
    if not inflater.eof or inflater.unused_data:
        raise invalid(f"one whole {encoding} stream as body", raw[:20], "it is cut or goes on")
    return text


def _too_large(limit_bytes: int) -> RequestFault:
    return RequestFault(
        FaultKind.TOO_LARGE,
        f"expected a body of at most {limit_bytes} bytes, got more; raise max_body_bytes",
    )


def object_of(raw: bytes) -> Mapping[str, Any]:
    """The JSON object of a body, by the fast parser; what it refuses, the slow one explains."""
    try:
        body = _FAST.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return slow_object_of(raw)
    if not isinstance(body, dict):
        raise invalid("a JSON object as body", body)
    return body


def slow_object_of(raw: bytes) -> Mapping[str, Any]:
    """By the standard library: mends half surrogates, and says what is wrong."""
    try:
        body = _DECODER.decode(raw.decode("utf-8"))
        if not isinstance(body, dict):
            raise invalid("a JSON object as body", body)
        return dict(_without_lone_surrogates(body)) if _has_surrogates(raw) else body
    except (ValueError, RecursionError) as error:
        raise invalid("a JSON object in UTF-8 as body", raw[:80], str(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_FAST = msgspec.json.Decoder()
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _has_surrogates(raw: bytes) -> bool:
    """Escapes of them, halves or pairs."""
    return b"\\u" in raw and (b"\\ud" in raw or b"\\uD" in raw)


def _without_lone_surrogates(value: Any) -> Any:
    """Halves of surrogate pairs are no text: they become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_lone_surrogates(k): _without_lone_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_lone_surrogates(item) for item in value]
    return value
