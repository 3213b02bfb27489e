"""Records through msgpack and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core import wire
from clawgym_jax.core.errors import RecordError
from clawgym_jax.core.types import (
    CallRecord,
    Completion,
    Delivery,
    EpisodeRecord,
    Finish,
    Grade,
    Outcome,
    Role,
    SamplingParams,
    Span,
)

texts = st.text(max_size=8)
i32s = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda x: np.asarray(x, np.int32))
f32s = st.lists(st.floats(width=32), max_size=5).map(lambda x: np.asarray(x, np.float32))
completions = st.builds(
    Completion,
    ids=i32s,
    logprobs=f32s,
    raw_logprobs=f32s,
    versions=i32s.map(lambda x: x.astype(np.uint32)),
    finish=st.sampled_from(Finish),
    routing=st.none() | st.just(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)),
    stop_string=st.none() | texts,
)
plain = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | texts, st.lists, max_leaves=4)
counts = st.integers(0, 2**40)
spans = st.builds(Span, start=counts, length=counts, call_id=texts)
calls = st.builds(
    CallRecord,
    ordinal=counts,
    attempt=counts,
    shared_tok=counts,
    spliced_tok=counts,
    encoded_tok=counts,
    run_id=texts,
    role=st.sampled_from(Role),
    prompt_ids=i32s,
    completion=completions,
    spans=st.lists(spans, max_size=2).map(tuple),
    continues=st.lists(texts, max_size=2).map(tuple),
    breaks=st.lists(texts, max_size=2).map(tuple),
    requested=st.dictionaries(texts, plain, max_size=3),
    effective=st.builds(SamplingParams, temperature=st.floats(0, 2), seed=counts),
    delivery=st.sampled_from(Delivery),
    received_at_s=st.floats(0, 1e9),
    queued_s=st.floats(0, 1e9),
)
episodes = st.builds(
    EpisodeRecord,
    step=counts,
    seed=counts,
    outcome=st.sampled_from(Outcome),
    grade=st.builds(
        Grade,
        score=st.none() | st.floats(0, 1),
        checks=st.dictionaries(texts, st.floats(0, 1), max_size=2),
        seconds=st.floats(0, 9),
    ),
    call_ids=st.lists(texts, max_size=2).map(tuple),
    timings_s=st.dictionaries(texts, st.floats(0, 9), max_size=2),
    started_at_s=st.floats(0, 1e9),
)


def same(left: Any, right: Any) -> bool:
    """Equality that looks into arrays, their dtype and their shape."""
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@given(calls | episodes)
def test_decode_inverts_encode(record: Any) -> None:
    assert same(wire.decode(wire.encode(record)), record)


def test_a_field_that_is_missing_takes_its_default() -> None:
    body = msgpack.unpackb(wire.encode(minimal_episode()), raw=False)
    del body["started_at_s"]
    assert wire.decode(msgpack.packb(body)).started_at_s == 0.0


def test_an_unknown_field_is_an_error() -> None:
    body = msgpack.unpackb(wire.encode(minimal_episode()), raw=False)
    with pytest.raises(RecordError, match="colour"):
        wire.decode(msgpack.packb({**body, "colour": "red"}))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"a": 1})])
def test_garbage_is_a_record_error(data: bytes) -> None:
    with pytest.raises(RecordError):
        wire.decode(data)


def test_what_has_no_kind_cannot_be_stored() -> None:
    with pytest.raises(RecordError, match="kind"):
        wire.encode({"a": 1})
    with pytest.raises(RecordError, match="set"):
        wire.encode({"kind": "x", "value": {1}})


def minimal_episode() -> EpisodeRecord:
    return EpisodeRecord(
        "run",
        "ep",
        "g",
        "t",
        "h",
        "train",
        0,
        0,
        Outcome.OK,
        "",
        Grade(1.0),
        ("c",),
        {"total": 1.0},
    )
