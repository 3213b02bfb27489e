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

    def stream_error(self, fault: RequestFault) -> bytes:
        """An error after the headers are out."""
        ...

    def error(self, fault: RequestFault) -> dict[str, Any]:
        """Body of an error response."""
        ...


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
