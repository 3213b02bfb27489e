"""An append-only file of records that survives kill -9 at any byte.

A frame is: u32 length, u32 crc32 of the payload, payload (see `wire`). One `os.writev` per frame,
so what a killed process wrote before the kill is in the file. Opening for append cuts a torn tail;
reading stops before it, so a log can be read while it is written. Not here: what records mean.
Invariant: the sequence read back is always a prefix of the sequence appended.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawgym_jax.core import wire
from clawgym_jax.core.errors import RecordError

MAGIC = b"CLAWLOG1"
_HEAD = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 30


class RecordLog:
    """Appends records; thread-safe; one writer process per file (enforced by a lock)."""

    def __init__(self, path: Path, sync: bool = False) -> None:
        """sync: fsync after each record (survives power loss, not only kill -9)."""
        import fcntl

        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._sync = sync
        self._lock = threading.Lock()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise RecordError(
                f"{self.path} is being written by another process; "
                "stop that run or use another --workdir"
            ) from error
        end = _valid_end(self._fd, self.path)
        self._cut_tail(end)
        os.lseek(self._fd, end, os.SEEK_SET)
        self._end = end
        if end == 0:
            _write_all(self._fd, MAGIC)
            self._end = len(MAGIC)

    def append(self, record: Any) -> None:
        """Returns once the record is the operating system's (or the disk's, with sync)."""
        payload = wire.encode(record)
        if len(payload) > MAX_RECORD_BYTES:
            raise RecordError(f"a record of {len(payload)} bytes exceeds {MAX_RECORD_BYTES}")
        head = _HEAD.pack(len(payload), zlib.crc32(payload))
        with self._lock:
            try:
                _write_all(self._fd, head, payload)
            except BaseException:
                os.ftruncate(self._fd, self._end)  # disk full: leave no torn frame in the middle
                os.lseek(self._fd, self._end, os.SEEK_SET)
                raise
            self._end += len(head) + len(payload)
            if self._sync:
                os.fdatasync(self._fd)

    def _cut_tail(self, end: int) -> None:
        """Drops what lies behind the last whole record, but keeps its bytes in PATH.torn."""
        tail = os.pread(self._fd, os.fstat(self._fd).st_size - end, end)
        if tail:
            with self.path.with_name(self.path.name + ".torn").open("ab") as file:
                file.write(tail)
            os.ftruncate(self._fd, end)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_log(path: Path) -> Iterator[Any]:
    """Yields the records of a log, stopping before a torn tail. A missing file has none."""
    for payload in _payloads(Path(path)):
        yield wire.decode(payload)


def _payloads(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
            return
        if magic != MAGIC:
            raise RecordError(f"{path} is not a record log: it starts with {magic!r}")
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, crc = _HEAD.unpack(head)
            if length > MAX_RECORD_BYTES:
                return
            payload = file.read(length)
            if len(payload) < length:
                return
            if zlib.crc32(payload) != crc:
                if not file.read(1):
                    return
                raise RecordError(
                    f"{path} is damaged at byte {file.tell() - 1 - length}: a record's checksum is "
                    "wrong and others follow, so this is no torn tail; restore the file from a copy"
                )
            yield payload


def _valid_end(fd: int, path: Path) -> int:
    """Offset just behind the last whole record; 0 for an empty or header-torn file."""
    size = os.fstat(fd).st_size
    if size < len(MAGIC):
        return 0
    end = len(MAGIC)
    for payload in _payloads(path):
        end += _HEAD.size + len(payload)
    return end


def _write_all(fd: int, *parts: bytes) -> None:
    """In one call where the system takes all of it, without a copy of what is to be written."""
    written = os.writev(fd, parts)
    if written < sum(map(len, parts)):
        view = memoryview(b"".join(parts))[written:]
        while view:
            view = view[os.write(fd, view) :]
