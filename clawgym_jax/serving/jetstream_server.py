"""A process that serves JetStream's gRPC Decode over our engine: `python -m ... SPEC.json`.

The stock orchestrator's service and a small one of ours (`jetstream_side`) on one unix socket in a
private folder. It ends when its standard input does, so it never outlives its supervisor
(`jetstream_process`). Not here: who starts it again.
Invariant: a client that goes away frees its slot; weights come from folders, never over the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clawgym_jax.core.errors import EngineRestarted, SamplerError
from clawgym_jax.model import hf_weights, qwen3, sharding
from clawgym_jax.model.config import Qwen3Config
from clawgym_jax.model.parallel_serving import ServingParallel
from clawgym_jax.serving import jetstream_shim, jetstream_side
from clawgym_jax.serving.engine import Engine
from clawgym_jax.serving.jetstream_driver import request_of
from clawgym_jax.serving.jetstream_engine import JetStreamEngine
from clawgym_jax.serving.jetstream_host import Host, handle_of
from clawgym_jax.serving.jetstream_side import ServerSpec

_STOP_GRACE_S = 5.0


class Server:
    """The two services' methods."""

    def __init__(self, spec: ServerSpec) -> None:
        self._model = _model(spec)
        self._engine = JetStreamEngine(_engine(spec, self._model), _decoder(spec))
        self._host = Host(self._engine)

    # --- JetStream's service -----------------------------------------------------------------

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        handle = handle_of(request)
        context.add_done_callback(lambda rpc: self._over(handle, rpc.cancelled()))
        async with contextlib.aclosing(self._host.decode(request)) as responses:
            async for response in responses:
                yield response

    def _over(self, handle: int, cancelled: bool) -> None:
        """The RPC is through. Nobody comes for the outcome of one that was cancelled."""
        if cancelled:
            self._engine.forget(handle)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return jetstream_shim.wire().messages.HealthCheckResponse(is_live=True)

    # --- ours --------------------------------------------------------------------------------

    async def put(self, data: bytes) -> bytes:
        entry = self._engine.submit(request_of(jetstream_side.unpack_ask(data)))
        return jetstream_side.pack(handle=entry.handle)

    async def take(self, data: bytes) -> bytes:
        handle = jetstream_side.unpack(data)["handle"]
        entry = self._engine.entry(handle)
        if entry is None:
            raise SamplerError(f"no request has the handle {handle}")
        outcome = entry.outcome()
        self._engine.forget(handle)
        return jetstream_side.pack_outcome(outcome)

    async def cancel(self, data: bytes) -> bytes:
        self._host.cancel(jetstream_side.unpack(data)["handle"])
        return jetstream_side.pack()

    async def publish(self, data: bytes) -> bytes:
        fields = jetstream_side.unpack(data)
        await asyncio.to_thread(self._publish, fields["folder"], fields["version"])
        return jetstream_side.pack()

    def _publish(self, folder: str, version: int) -> None:
        self._engine.publish(hf_weights.read(folder, self._model)[2], version)

    async def state(self, _: bytes) -> bytes:
        stats = dataclasses.asdict(self._engine.stats)
        return jetstream_side.pack(version=self._engine.version, stats=stats)

    def close(self) -> None:
        self._host.close()


def _model(spec: ServerSpec) -> Qwen3Config:
    dtype, param_dtype = np.dtype(spec.dtype), np.dtype(spec.param_dtype)
    return hf_weights.read_config(spec.model).replace(dtype=dtype, param_dtype=param_dtype)


def _engine(spec: ServerSpec, model: Qwen3Config) -> Engine:
    parallel = ServingParallel.make(spec.mesh)
    graphdef, shapes = qwen3.abstract(model, parallel=parallel)
    if parallel is not None:
        sharding.check(model, shapes, parallel.mesh, sharding.SERVING)
    return Engine(graphdef, model, spec.engine, parallel)


def _decoder(spec: ServerSpec) -> Callable[[Sequence[int]], str] | None:
    if not spec.strings:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(spec.model) / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _handler(method: Callable[[bytes], Awaitable[bytes]]) -> Any:
    async def answer(data: bytes, _: Any) -> bytes:
        try:
            return await method(data)
        except Exception as error:
            return jetstream_side.pack_error(error)

    return jetstream_shim.wire().grpc.unary_unary_rpc_method_handler(answer)


async def serve(spec: ServerSpec) -> None:
    """Until standard input ends."""
    ours, wire = Server(spec), jetstream_shim.wire()
    server = wire.grpc.aio.server(options=jetstream_side.GRPC_OPTIONS)
    wire.services.add_OrchestratorServicer_to_server(ours, server)
    methods = (ours.put, ours.take, ours.cancel, ours.publish, ours.state)
    handlers = dict(zip(jetstream_side.METHODS, map(_handler, methods), strict=True))
    server.add_generic_rpc_handlers(
        (wire.grpc.method_handlers_generic_handler(jetstream_side.SERVICE, handlers),)
    )
    if not server.add_insecure_port(f"unix:{spec.socket}"):
        raise EngineRestarted(f"cannot listen on {spec.socket}")
    await server.start()
    try:
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        await asyncio.to_thread(ours.close)
        await server.stop(_STOP_GRACE_S)
        if spec.scratch:
            await asyncio.to_thread(shutil.rmtree, spec.scratch, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(serve(ServerSpec.read(Path(sys.argv[1]))))
