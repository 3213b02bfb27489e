"""Server-sent events over a raw socket, for the tiny harness programs.

Lies beside agent.py in the sandbox and imports only C modules: `socket` and `http.client` would
double the start-up time of a program that lives for half a second. Not a general HTTP client:
one POST per connection, http only. Invariant: a stream that ends early raises, it never looks
complete.
"""

from __future__ import annotations

import _socket
import json
import time

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class ApiError(Exception):
    """The server refused, or could not be reached. status 0: no answer at all, or a cut one."""

    def __init__(self, status: int, message: object) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @property
    def passes(self) -> bool:
        """Worth sending again."""
        return self.status in (0, 408, 409, 429) or self.status >= 500


def with_retries(attempts: int, action: Callable[[int], Any]) -> Any:
    """action(attempt), again after a fault that may pass, with growing pauses."""
    for attempt in range(attempts):
        try:
            return action(attempt)
        except ApiError as error:
            if not error.passes or attempt + 1 == attempts:
                raise
        time.sleep(0.1 * 2**attempt)
    raise ApiError(0, "no attempts configured")


def post_events(
    url: str, headers: dict[str, Any], body: dict[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yields the JSON of each data line of a streamed answer. "[DONE]" ends it."""
    host, port, path = _parts(url)
    sock = None
    try:
        sock = _connect(host, port, timeout_s)
        payload = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + payload)
        for line in _Response(sock).lines():
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
    except OSError as error:
        raise ApiError(0, error) from error
    finally:
        if sock is not None:
            sock.close()


def _parts(url: str) -> tuple[str, int, str]:
    rest = url.removeprefix("http://")
    if rest == url:
        raise ApiError(400, f"expected a base URL that starts with http://, got {url}")
    place, _, path = rest.partition("/")
    host, _, port = place.partition(":")
    return host, int(port or 80), "/" + path


def _connect(host: str, port: int, timeout_s: float) -> _socket.socket:
    family, kind, proto, _, address = _socket.getaddrinfo(
        host, port, _socket.AF_INET, _socket.SOCK_STREAM
    )[0]
    sock = _socket.socket(family, kind, proto)
    sock.settimeout(timeout_s)
    sock.connect(address)
    return sock


class _Response:
    """Status, headers and body of one answer."""

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        status_line = self._line().split(None, 2)
        if len(status_line) < 2:
            raise ApiError(0, "expected an HTTP answer, the connection was closed")
        status = int(status_line[1])
        self.headers: dict[bytes, bytes] = {}
        while line := self._line():
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip().lower()
        if status != 200:
            raise ApiError(status, b"".join(self._pieces()).decode("utf-8", "replace"))

    def lines(self) -> Iterator[bytes]:
        """Lines of the body, as they come."""
        rest = b""
        for piece in self._pieces():
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole

    def _pieces(self) -> Iterator[bytes]:
        if self.headers.get(b"transfer-encoding") != b"chunked":
            yield self._take(int(self.headers.get(b"content-length", 0)))
            return
        while size := int(self._line().split(b";")[0] or b"0", 16):
            yield self._take(size)
            self._take(2)

    def _line(self) -> bytes:
        while b"\r\n" not in self.buffer:
            self._fill()
        line, _, self.buffer = self.buffer.partition(b"\r\n")
        return line

    def _take(self, size: int) -> bytes:
        while len(self.buffer) < size:
            self._fill()
        taken, self.buffer = self.buffer[:size], self.buffer[size:]
        return taken

    def _fill(self) -> None:
        piece = self.sock.recv(65536)
        if not piece:
            raise ApiError(0, "the answer was cut off")
        self.buffer += piece
