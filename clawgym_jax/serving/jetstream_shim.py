"""The stock google-jetstream 0.2.2 on a current jax: what has to be changed, and nothing else.

The package is the last one of an archived project. As released:
- `orchestrator.delete_pytree` calls `jax.tree_map`, which is gone; the first insert then kills the
  process. Replaced.
- Importing it sets the root logger to DEBUG and hangs a handler on it; every step logs through
  `logging.info`, which configures the root logger. Undone, and its messages get a logger of their
  own, named "jetstream".
- A thread that fails kills its process with SIGKILL, in process with it the trainer. Ours reports.
- Its generate thread asserts that a slot is in use after it looked for new requests, but the last
  one may be freed while it looks. Nothing is wrong then, and it holds nothing: it starts again.
Imported when a driver is made, in no other file; the orchestrator brings TensorFlow (5 s).
Invariant: the orchestrator, its driver and its gRPC messages are the package's own code.
Source: jetstream/core/orchestrator.py of the release.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.serving.jetstream_rows import COLUMNS

_IDLE = "At this point we must have some requests"  # the assertion of an idle generate thread
_INT32_MAX = (1 << 31) - 1
_patching = threading.Lock()


@dataclass(frozen=True)
class Wire:
    """Its gRPC side, without the rest of it."""

    grpc: Any
    messages: Any  # jetstream_pb2
    services: Any  # jetstream_pb2_grpc

    def request(self, handle: int, max_tok: int) -> Any:
        """A DecodeRequest for a handle.

        As token ids, so that rows come back as integers; the session cache must stay empty.
        """
        message = self.messages.DecodeRequest
        tokens, most = message.TokenContent(token_ids=[handle]), min(max_tok, _INT32_MAX)
        return message(token_content=tokens, max_tokens=most)


@dataclass(frozen=True)
class Stock:
    """Its engine room."""

    orchestrator: Any  # jetstream.core.orchestrator
    engine_api: Any  # jetstream.engine.engine_api


@functools.cache
def wire() -> Wire:
    """Imports the messages only: no TensorFlow."""
    with _importing():
        import grpc
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        return Wire(grpc, jetstream_pb2, jetstream_pb2_grpc)


@functools.cache
def load() -> Stock:
    """Imports the orchestrator and mends it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        with _importing():
            from jetstream.core import orchestrator
            from jetstream.engine import engine_api
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    orchestrator.logging = logging.getLogger("jetstream")
    orchestrator.delete_pytree = _delete_arrays
    return Stock(orchestrator, engine_api)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"the jetstream driver needs google-jetstream, which cannot be imported ({error}): "
            "pip install clawgym_jax[jetstream], or choose driver=native"
        ) from error


def start_driver(engine: Any, on_failure: Callable[[Exception], None]) -> Any:
    """The stock driver in interleaved mode, running; a thread of it that fails is reported."""
    stock = load()
    params = engine.load_params()
    with _patching:
        stock.orchestrator.JetThread = functools.partial(_Thread, on_failure)
        return stock.orchestrator.Driver(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[params],
            generate_params=[params],
            interleaved_mode=True,
            jax_padding=False,
        )


def results(rows: np.ndarray, on_read: Callable[[], None]) -> Any:
    """i32[slots, 2 * COLUMNS + 1] (values, validity, length) as what the driver takes from a step.

    on_read: called by the thread that hands the tokens out.
    """
    return _result_type()(
        data=rows,
        tokens_idx=(0, COLUMNS),
        valid_idx=(COLUMNS, 2 * COLUMNS),
        length_idx=(2 * COLUMNS, 2 * COLUMNS + 1),
        samples_per_slot=1,
    ).noticed(on_read)


@functools.cache
def _result_type() -> Any:
    class Results(load().engine_api.ResultTokens):  # type: ignore[misc]
        """Already numpy; says when it is read."""

        def noticed(self, on_read: Callable[[], None]) -> Any:
            object.__setattr__(self, "_on_read", on_read)
            return self

        def convert_to_numpy(self) -> Any:
            self._on_read()
            return self

    return Results


class _Thread(threading.Thread):
    """Takes the place of the package's JetThread."""

    def __init__(
        self,
        on_failure: Callable[[Exception], None],
        target: Callable[[], None],
        name: str,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=f"jetstream-{name}", daemon=True)
        self._work = target
        self._on_failure = on_failure

    def run(self) -> None:
        while True:
            try:
                return self._work()
            except AssertionError as error:
                if not str(error).startswith(_IDLE):
                    return self._on_failure(error)
            except Exception as error:
                return self._on_failure(error)


def _delete_arrays(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()
