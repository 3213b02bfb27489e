"""The record log: what a killed writer leaves behind, and two writers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.log import MAGIC, RecordLog, read_log

RECORDS = [{"kind": "n", "n": n, "pad": "x" * (7 * n)} for n in range(4)]


def write(path: Path) -> list[int]:
    """The file size after each record."""
    sizes = []
    with RecordLog(path) as log:
        for record in RECORDS:
            log.append(record)
            sizes.append(path.stat().st_size)
    return sizes


def test_killed_at_any_byte_a_prefix_is_read_and_appending_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    sizes = write(whole)
    data = whole.read_bytes()
    for cut in range(len(data) + 1):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(data[:cut])
        expected = RECORDS[: sum(size <= cut for size in sizes)]
        assert list(read_log(path)) == expected
        with RecordLog(path) as log:
            log.append({"kind": "more"})
        assert list(read_log(path)) == [*expected, {"kind": "more"}]
        torn = path.with_name(path.name + ".torn")
        kept = max([size for size in sizes if size <= cut], default=len(MAGIC))
        assert torn.exists() == (cut > kept or 0 < cut < len(MAGIC))
        if cut > kept:
            assert torn.read_bytes() == data[kept:cut]


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys\nfrom clawgym_jax.core.log import RecordLog\n"
        "from clawgym_jax.core.errors import RecordError\n"
        "from pathlib import Path\n"
        "try:\n    RecordLog(Path(sys.argv[1]))\n"
        "except RecordError as error:\n    print(error); sys.exit(3)\n"
    )
    with RecordLog(path) as log:
        with pytest.raises(RecordError, match="another"):
            RecordLog(path)
        other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert (other.returncode, "another --workdir" in other.stdout) == (3, True)
        log.append(RECORDS[0])
    assert list(read_log(path)) == RECORDS[:1]


def test_what_was_appended_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom clawgym_jax.core.log import RecordLog\n"
        "log = RecordLog(Path(sys.argv[1]))\n"
        "for n in range(3): log.append({'kind': 'n', 'n': n})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], check=False)
    assert done.returncode == -9
    assert [record["n"] for record in read_log(path)] == [0, 1, 2]


def test_another_file_is_not_taken_for_a_log(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"these are my notes")
    with pytest.raises(RecordError, match="not a record log"):
        list(read_log(path))
    with pytest.raises(RecordError, match="not a record log"):
        RecordLog(path)
    assert path.read_bytes() == b"these are my notes"


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert list(read_log(tmp_path / "none")) == []


def test_damage_in_the_middle_is_no_torn_tail(tmp_path: Path) -> None:
    """Whole records follow a wrong checksum: neither read past nor cut, but reported."""
    path = tmp_path / "x.log"
    with RecordLog(path) as log:
        for number in range(3):
            log.append({"kind": "note", "number": number})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordError, match="damaged at byte"):
        list(read_log(path))
    with pytest.raises(RecordError, match="damaged at byte"):
        RecordLog(path)
    assert path.read_bytes() == bytes(data)
