"""Safetensors files, read and written one tensor at a time: memory stays that of one tensor.

A file is the header's length (u64), the header (JSON: name to dtype, shape and [start, stop) of
its bytes), and the bytes.  A model is one such file, or several and an index.

Reading maps a file, copies what is asked for and gives the pages back at once: pages that were
read once would otherwise count as this process's memory until the end.

Invariant: a folder that is being written holds the old model, or none (no config.json), or the
new one; never some of each.
Not here: which tensor is which parameter (`hf_names`).
Source: the format's specification in the safetensors repository.
"""

import contextlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from clawgym_jax.core.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SHARDS = "model-?????-of-?????.safetensors"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Spec(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Place(NamedTuple):
    spec: Spec
    mapped: mmap.mmap
    start: int  # byte of the file


class Reader:
    """The tensors of a model folder by name. Use as a context manager."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._places: dict[str, _Place] = {}
        self._maps = contextlib.ExitStack()
        try:
            for path, wanted in _files(folder).items():
                self._open(path, wanted)
        except BaseException:
            self._maps.close()
            raise

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: place.spec for name, place in self._places.items()}

    def copy(
        self, name: str, index: tuple[slice, ...], out: np.ndarray, transposed: bool = False
    ) -> None:
        """out[...] = tensor[index] (or its transpose), converted to out's dtype."""
        spec, mapped, start = self._places[name]
        whole = np.frombuffer(mapped, spec.dtype, math.prod(spec.shape), start)
        part = whole.reshape(spec.shape)[index]
        out[...] = part.T if transposed else part
        first = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, start + spec.nbytes - first)

    def _open(self, path: pathlib.Path, wanted: set[str] | None) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ModelError(f"{path}: {size} bytes are no safetensors file: download it again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.enter_context(mapped)
        header, data = _read_header(path, mapped)
        for name, entry in header.items():
            if wanted is None or name in wanted:
                spec = Spec(name, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
                self._places[name] = _Place(spec, mapped, data + entry["data_offsets"][0])

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.close()


def _files(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """The files that hold the model, and which tensors of each count (None: all)."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists() and index.exists():
        raise ModelError(f"{folder}: expected {WEIGHTS} or {INDEX}, got both: remove the stale one")
    if single.exists():
        return {single: None}
    if not index.exists():
        found = sorted(path.name for path in folder.glob("*"))[:20]
        raise ModelError(f"{folder}: expected {WEIGHTS} or {INDEX}, found {found}")
    files: dict[pathlib.Path, set[str] | None] = {}
    for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        names = files.setdefault(folder / file, set())
        assert names is not None
        names.add(name)
    missing = sorted(path.name for path in files if not path.exists())
    if missing:
        raise ModelError(f"{folder}: files named in {INDEX} are missing, download them: {missing}")
    return files


def _read_header(path: pathlib.Path, mapped: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and the byte at which the data starts."""
    start = 8 + int.from_bytes(mapped[:8], "little")
    try:
        header = json.loads(mapped[8:start]) if start <= len(mapped) else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: expected a safetensors header, found none: download it again")
    header.pop("__metadata__", None)
    size = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size > len(mapped):
        raise ModelError(f"{path}: expected {size} bytes, got {len(mapped)}: download it again")
    strange = {n: entry["dtype"] for n, entry in header.items() if entry["dtype"] not in _DTYPES}
    if strange:
        some = ", ".join(f"{name} ({dtype})" for name, dtype in list(strange.items())[:5])
        raise ModelError(
            f"{path}: expected tensors of {sorted(_DTYPES)}, got {len(strange)} of other types, "
            f"{some}, ...: take the unquantised checkpoint"
        )
    return header, start


def write_folder(
    folder: pathlib.Path,
    specs: Sequence[Spec],
    arrays: Iterable[np.ndarray],
    texts: Mapping[str, str],
    max_shard_bytes: int,
) -> None:
    """Writes one array per spec, asking for the next one only when the last is on disk.

    `texts` are small files by name, config.json among them.  Everything gets its final name at
    the end, at once; what a former model left in the folder is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = split(specs, max_shard_bytes)
    files = _shard_names(len(parts))
    texts = dict(texts)
    if len(parts) > 1:
        texts[INDEX] = _index(files, parts)
    waiting = iter(arrays)
    try:
        for name, part in zip(files, parts, strict=True):
            _write_file(_temporary(folder, name), part, waiting)
        for name, text in texts.items():
            _temporary(folder, name).write_text(text, encoding="utf-8")
    except BaseException:
        for name in (*files, *texts):
            _temporary(folder, name).unlink(missing_ok=True)
        raise
    _replace(folder, [*files, *texts])


def split(specs: Sequence[Spec], max_shard_bytes: int) -> list[list[Spec]]:
    """Consecutive runs of at most so many bytes; a larger tensor has a file of its own."""
    parts: list[list[Spec]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        if parts[-1] and spec.nbytes > room:
            parts.append([])
            room = max_shard_bytes
        parts[-1].append(spec)
        room -= spec.nbytes
    return parts


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _index(files: Sequence[str], parts: Sequence[Sequence[Spec]]) -> str:
    where = {spec.name: file for file, part in zip(files, parts, strict=True) for spec in part}
    total = sum(spec.nbytes for part in parts for spec in part)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(index, indent=2) + "\n"


def _write_file(path: pathlib.Path, specs: Sequence[Spec], arrays: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        offsets = [end, end := end + spec.nbytes]
        header[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            array = next(arrays)
            if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                raise ValueError(
                    f"{spec.name}: expected {spec.dtype}{spec.shape}, "
                    f"got {array.dtype}{array.shape}"
                )
            np.ascontiguousarray(array).tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _replace(folder: pathlib.Path, names: Sequence[str]) -> None:
    """Gives the finished files their names; config.json goes first and comes last."""
    (folder / CONFIG).unlink(missing_ok=True)
    for old in (folder / WEIGHTS, folder / INDEX, *folder.glob(_SHARDS)):
        old.unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name == CONFIG):
        _temporary(folder, name).replace(folder / name)


def _temporary(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f".{name}.tmp"
