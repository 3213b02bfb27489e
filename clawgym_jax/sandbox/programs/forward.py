"""Forwards 127.0.0.1:PORT to a unix socket, alone or for as long as one program runs.

    python -I -S forward.py PORT SOCKET [ARGV...]

In a place without a network this is the only way out: to the proxy's socket, mounted in. With
ARGV, that program is started once the port listens, and its end is ours (exit code 128 + n when
signal n killed it). Without ARGV it serves until it is killed. Bytes are passed on untouched.
Invariant: what waits in memory is bounded: a side that does not read is not read for.
"""

# signal and socket themselves pull in enum: 5 ms of every episode.
import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys

LIMIT = 1 << 16
SPAWN_FAILED = 127


class Pump:
    """One connection: two sockets, what waits to be written to each, and which still talk."""

    def __init__(self, client: _socket.socket, path: str) -> None:
        self.client = client
        self.server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self.server.connect(path)
        except OSError:
            self.server.close()
            raise
        self.other = {client: self.server, self.server: client}
        self.waiting = {client: bytearray(), self.server: bytearray()}
        self.talking = {client, self.server}
        for sock in self.other:
            sock.setblocking(False)

    def events(self, sock: _socket.socket) -> int:
        """What to poll `sock` for."""
        wanted = 0
        if sock in self.talking and len(self.waiting[self.other[sock]]) < LIMIT:
            wanted |= select.POLLIN
        if self.waiting[sock]:
            wanted |= select.POLLOUT
        return wanted

    def handle(self, sock: _socket.socket, events: int) -> bool:
        """Moves bytes; False once the connection is over."""
        try:
            if events & select.POLLERR:
                return False
            if events & (select.POLLIN | select.POLLHUP):
                if sock not in self.talking:
                    return False
                self.read(sock)
            if events & select.POLLOUT:
                self.write(sock)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self.talking or any(self.waiting.values()))

    def read(self, sock: _socket.socket) -> None:
        data = sock.recv(LIMIT)
        if not data:
            self.talking.discard(sock)
        self.waiting[self.other[sock]] += data
        self.write(self.other[sock])

    def write(self, sock: _socket.socket) -> None:
        """Sends what waits; passes the end of the other side on once all of it is sent."""
        if self.waiting[sock]:
            sent = sock.send(self.waiting[sock])
            del self.waiting[sock][:sent]
        if not self.waiting[sock] and self.other[sock] not in self.talking:
            sock.shutdown(_socket.SHUT_WR)

    def close(self) -> None:
        for sock in self.other:
            sock.close()


class Forwarder:
    """The poll loop over a listener, its connections and perhaps a program's pidfd."""

    def __init__(self, port: int, path: str) -> None:
        self.path = path
        self.listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        self.listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(128)
        self.listener.setblocking(False)
        self.poll = select.poll()
        self.poll.register(self.listener, select.POLLIN)
        self.pumps: dict[int, tuple[Pump, _socket.socket]] = {}  # by file descriptor

    def accept(self) -> None:
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        client = _socket.socket(fileno=fd)
        try:
            client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            pump = Pump(client, self.path)
        except OSError as error:
            sys.stderr.write(f"forward: {self.path}: {error.strerror}\n")
            client.close()
            return
        for sock in pump.other:
            self.pumps[sock.fileno()] = (pump, sock)
            self.poll.register(sock, pump.events(sock))

    def turn(self, fd: int, events: int) -> None:
        pump, sock = self.pumps[fd]
        if pump.handle(sock, events):
            for each in pump.other:
                self.poll.modify(each, pump.events(each))
            return
        for each in pump.other:
            self.poll.unregister(each)
            del self.pumps[each.fileno()]
        pump.close()

    def serve(self, until: int = -1) -> None:
        """Serves until the file descriptor `until` is readable."""
        if until >= 0:
            self.poll.register(until, select.POLLIN)
        while True:
            for fd, events in self.poll.poll():
                if fd == until:
                    return
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.pumps:
                    self.turn(fd, events)


def main() -> int:
    port, path, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    forwarder = Forwarder(port, path)
    if not argv:
        forwarder.serve()
    ignored = (_signal.SIGPIPE, _signal.SIGXFSZ)  # by Python, not by the program
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=ignored)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return SPAWN_FAILED
    forwarder.serve(until=os.pidfd_open(pid))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
