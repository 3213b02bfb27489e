"""uvicorn's HTTP protocol with a limit on headers, which it does not have with this parser.

What runs in a sandbox can send what it likes; without a limit one connection could fill the
host's memory. Not here: bodies (bodies.py has their limit).
Invariant: of headers that are not complete no more is held than the limit and one read.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 1 << 16
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose headers go on and on."""

    _in_headers = True
    _header_bytes = 0

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.transport.write(_REFUSAL)
                self.transport.close()
