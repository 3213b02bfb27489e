"""What a wire protocol has to offer; a further one is one more file that fulfils this.

Invariant: nothing behind this seam knows HTTP, sessions or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from clawgym_jax.proxy.faults import RequestFault
from clawgym_jax.proxy.turns import Answer, Request


class WireProtocol(Protocol):
    name: str
    keepalive: bytes  # a sign of life in a stream, which clients ignore

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Request:
        """Raises RequestFault."""
        ...

    def message(self, request: Request, answer: Answer) -> dict[str, Any]:
        """Body of an answer that is not streamed."""
        ...

    def stream_start(self, request: Request, call_id: str, prompt_tok: int) -> bytes:
        """First bytes of a stream, sent before the sample is known."""
        ...

    def stream_events(self, request: Request, answer: Answer) -> Iterator[bytes]:
        """The rest; the last item is the event that ends the message."""
        ...

    def stream_error(self, request: Request, call_id: str, fault: RequestFault) -> bytes:
        """What ends a stream that has begun and gets no answer."""
        ...

    def error(self, fault: RequestFault) -> dict[str, Any]:
        """Body of an error response."""
        ...


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8, on what every reader of lines takes for one line."""
    try:
        raw = _FAST.encode(value)
    except (ValueError, TypeError, OverflowError, RecursionError):  # half surrogates, long integers
        raw = slow_dump(value)
    if _MAY_END_LINES.search(raw):
        for sign, escape in _LINE_ENDS.items():
            raw = raw.replace(sign, escape)
    return raw


def slow_dump(value: Any) -> bytes:
    """By the standard library, which takes everything."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


_FAST = msgspec.json.Encoder()
# JSON escapes the ASCII ones; many readers of event streams split lines at these too.
_LINE_ENDS = {s.encode(): b"\\u%04x" % ord(s) for s in "\x85\u2028\u2029"}
_MAY_END_LINES = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
