"""What reading and writing cost in host memory: the parameters, plus what is in flight.

The model is 262 MB in float32; a second copy of anything large would show.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SLACK_BYTES = 24 << 20  # allocator and runtime


def _probe(mode: str, folder: pathlib.Path, *flags: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.model.stream_probe", mode, str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    out: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(mode, *flags, {name: f"{size / 1e6:.1f} MB" for name, size in out.items()})
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict[str, int]]:
    conftest.require(pathlib.Path("/proc/self/clear_refs").exists(), "needs Linux's /proc")
    folder = tmp_path_factory.mktemp("model")
    return folder, _probe("write", folder)


def test_writing_holds_a_row_at_a_time(written: tuple[pathlib.Path, dict[str, int]]) -> None:
    folder, memory = written
    assert memory["total_bytes"] > 256e6 and memory["row_bytes"] < 0.15 * memory["total_bytes"]
    assert memory["rise_bytes"] < 2 * memory["row_bytes"] + SLACK_BYTES
    assert len(list(folder.glob("*.safetensors"))) == 5


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (8, "float32"), (8, "bfloat16")])
def test_reading_holds_the_parameters_once(
    written: tuple[pathlib.Path, dict[str, int]], devices: int, dtype: str
) -> None:
    memory = _probe("read", written[0], f"--dtype={dtype}", f"--devices={devices}")
    expected = memory["total_bytes"] + memory["row_bytes"] + SLACK_BYTES
    assert memory["total_bytes"] <= memory["rise_bytes"] < expected
