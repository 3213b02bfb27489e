"""What travels through JetStream and beside it comes out as it went in, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.errors import EngineRestarted, NoWeights, SamplerError
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model.parallel_serving import ServingMeshConfig
from clawgym_jax.serving import jetstream_rows, jetstream_side
from clawgym_jax.serving.engine import EngineConfig
from clawgym_jax.serving.jetstream_front import Ask
from clawgym_jax.serving.jetstream_rows import COLUMNS, Outcome, Reader
from clawgym_jax.serving.jetstream_side import ServerSpec

FLOATS = st.floats(width=32, allow_nan=False)
TOKENS = st.tuples(st.integers(0, 2**31 - 1), FLOATS, FLOATS, st.integers(0, 2**32 - 1))


def handed_out(row: np.ndarray) -> list[int]:
    """As the stock orchestrator does: the values up to the first that is invalid."""
    values, valid = row[:COLUMNS].tolist(), row[COLUMNS : 2 * COLUMNS].tolist()
    return values[: valid.index(0)] if 0 in valid else values


@given(st.lists(st.one_of(st.none(), TOKENS), max_size=12), st.booleans())
def test_rows_keep_every_bit(steps: list[Any], bare_end: bool) -> None:
    reader = Reader()
    for i, step in enumerate([*steps, None] if bare_end else steps):
        row = jetstream_rows.empty(3)[1]
        if step is not None:
            jetstream_rows.write(row, *step)
        if i == len(steps) - (not bare_end):
            jetstream_rows.end(row)
        reader.add(handed_out(row))
    told = [step for step in steps if step is not None]
    done = reader.completion(Outcome(Finish.ABORT, cached_tok=3))
    assert reader.over == (bare_end or bool(steps))
    assert done.ids.tolist() == [t[0] for t in told] and done.ids.dtype == np.int32
    for got, at in ((done.logprobs, 1), (done.raw_logprobs, 2)):
        assert got.tobytes() == np.array([t[at] for t in told], np.float32).tobytes()
    assert done.versions.tolist() == [t[3] for t in told] and done.versions.dtype == np.uint32
    assert (done.finish, done.cached_tok) == (Finish.ABORT, 3)


def test_a_stream_that_breaks_off_is_no_completion() -> None:
    reader = Reader()
    row = jetstream_rows.empty(1)[0]
    jetstream_rows.write(row, 1, -0.5, -0.5, 1)
    reader.add(handed_out(row))
    with pytest.raises(EngineRestarted, match="broke off"):
        reader.completion(Outcome(Finish.STOP))
    with pytest.raises(SamplerError, match="expected a row of 5 or 6 integers"):
        reader.add([1, 2, 3])


def test_asks_and_outcomes_arrive_whole() -> None:
    prompt, ids = np.arange(5, dtype=np.int32), np.array([7, 8], np.int32)
    params = SamplingParams(0.5, 0.9, 3, 0.1, 2**40, 17)
    ask = Ask("r", prompt, params, Stop((1, 2), ("a", "b")), ids)
    got = jetstream_side.unpack_ask(jetstream_side.pack_ask(ask))
    assert (got.request_id, got.params, got.stop) == ("r", params, ask.stop)
    np.testing.assert_array_equal(got.prompt, prompt)
    np.testing.assert_array_equal(got.forced, ids)

    routing = np.arange(28, dtype=np.uint8).reshape(7, 2, 2)
    logprobs, versions = np.array([-1.5, -2], np.float32), np.array([4, 4], np.uint32)
    scored = Completion(ids, logprobs, logprobs, versions, Finish.STOP, routing)
    outcome = Outcome(Finish.STOP, "a", 2, routing, scored)
    back = jetstream_side.unpack_outcome(jetstream_side.pack_outcome(outcome))
    assert (back.finish, back.stop_string, back.cached_tok) == (Finish.STOP, "a", 2)
    assert back.scored is not None and back.scored.logprobs.tolist() == [-1.5, -2]
    np.testing.assert_array_equal(back.routing, routing)


@pytest.mark.parametrize("error", [NoWeights("none yet"), EngineRestarted("gone"), ValueError("v")])
def test_errors_keep_their_type(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        jetstream_side.unpack(jetstream_side.pack_error(error))
    with pytest.raises(EngineRestarted, match="KeyError"):
        jetstream_side.unpack(jetstream_side.pack_error(KeyError("x")))


def test_a_spec_reads_as_it_was_written(tmp_path: Path) -> None:
    engine = EngineConfig(slots=2, window_tok=64, prefill_chunks=(4, 16), swap_policy="abort")
    spec = ServerSpec("/s", "/m", "float32", "float32", engine, ServingMeshConfig(1, 2), True)
    spec.write(tmp_path / "spec.json")
    assert ServerSpec.read(tmp_path / "spec.json") == spec
