"""Records as msgpack: one schema for the call log, the episode log and anything sent between hosts.

Not here: files and framing (see `log`). Invariant: decode(encode(x)) == x, arrays with dtype.
A field that an old record lacks takes its default; an unknown field is an error, never dropped.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

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

_ARRAY_EXT = 1
_RECORDS: dict[str, type] = {
    "call": CallRecord,
    "episode": EpisodeRecord,
}
_NAMES = {cls: name for name, cls in _RECORDS.items()}
_ENUMS: dict[str, type[enum.StrEnum]] = {
    "role": Role,
    "finish": Finish,
    "delivery": Delivery,
    "outcome": Outcome,
}
_ATOMS = frozenset({str, int, float, bool, bytes, type(None), np.ndarray})
_FIELDS: dict[type, tuple[str, ...]] = {}
_NESTED: dict[str, type] = {"completion": Completion, "effective": SamplingParams, "grade": Grade}


def encode(record: Any) -> bytes:
    """Bytes of a CallRecord, an EpisodeRecord or a plain mapping with a "kind"."""
    if type(record) in _NAMES:
        body = {"kind": _NAMES[type(record)], **_plain(record)}
    elif isinstance(record, Mapping) and "kind" in record:
        body = dict(record)
    else:
        raise RecordError(
            f"cannot encode {type(record).__name__}; expected one of {sorted(_RECORDS)} "
            'or a mapping with a "kind"'
        )
    packed: bytes = msgpack.packb(body, default=_pack_ext, use_bin_type=True)
    return packed


def decode(data: bytes) -> Any:
    """The record that `encode` was given; a plain dict for kinds that have no class."""
    try:
        body = msgpack.unpackb(data, ext_hook=_unpack_ext, raw=False, strict_map_key=False)
    except Exception as error:
        raise RecordError(f"not a msgpack record ({len(data)} bytes): {error}") from error
    if not isinstance(body, dict) or "kind" not in body:
        raise RecordError(f'expected a map with a "kind", got {type(body).__name__}')
    cls = _RECORDS.get(body["kind"])
    if cls is None:
        return body
    return _revive(cls, {key: value for key, value in body.items() if key != "kind"})


def _plain(record: Any) -> dict[str, Any]:
    """A dataclass as a dict of plain values, arrays left alone."""
    return {name: _plain_value(getattr(record, name)) for name in _field_names(type(record))}


def _plain_value(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple and value and _field_names(type(value[0])):
        return [_plain(item) for item in value]
    if _field_names(kind):
        return _plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, enum.StrEnum) else value


def _field_names(cls: type) -> tuple[str, ...]:
    """Of a class that is a dataclass; nothing for any other."""
    names = _FIELDS.get(cls)
    if names is None:
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        names = _FIELDS[cls] = tuple(field.name for field in fields)
    return names


def _revive(cls: type, body: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(body) - known)
    if unknown:
        raise RecordError(
            f"{cls.__name__} has no fields {unknown}; it was written by a newer version: upgrade"
        )
    for name, value in body.items():
        if name in _ENUMS and value is not None:
            body[name] = _ENUMS[name](value)
        elif name in _NESTED and isinstance(value, dict):
            body[name] = _revive(_NESTED[name], value)
        elif name == "spans":
            body[name] = tuple(_revive(Span, item) for item in value)
        elif isinstance(value, list):
            body[name] = tuple(value)
    try:
        return cls(**body)
    except TypeError as error:
        raise RecordError(f"a {cls.__name__} record lacks a field: {error}") from error


def _pack_ext(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        head = msgpack.packb([value.dtype.str, list(value.shape)])
        return msgpack.ExtType(_ARRAY_EXT, head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise RecordError(f"cannot store a {type(value).__name__} in a record")


def _unpack_ext(code: int, data: bytes) -> Any:
    if code != _ARRAY_EXT:
        raise RecordError(f"unknown extension type {code}")
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    dtype, shape = unpacker.unpack()
    start = unpacker.tell()
    return np.frombuffer(data, dtype=np.dtype(dtype), offset=start).reshape(shape).copy()
