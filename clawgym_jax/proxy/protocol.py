"""What a wire protocol has to offer; a further one is one more file that fulfils this.

Invariant: nothing behind this seam knows HTTP, sessions or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

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
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for sign, escape in _LINE_ENDS.items():
        if sign in text:
            text = text.replace(sign, escape)
    return text.encode("utf-8", "replace")


# JSON escapes the ASCII ones; many readers of event streams split lines at these too.
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
