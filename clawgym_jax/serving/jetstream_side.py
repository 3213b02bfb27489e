"""What JetStream's gRPC messages have no place for, as msgpack beside them on the same server.

A DecodeRequest carries a handle. What it stands for is `Put` before, how it ended is `Take`n
after; `Cancel`, `Publish` and `State` are the rest of the service. Also here: what the server's
process is started with. Not here: tokens and log-probs, which come as rows of Decode.
Invariant: a typed error raised on one side is the same type, with the same text, on the other.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym_jax.core import errors, wire
from clawgym_jax.core.types import Completion, Finish, SamplingParams, Stop
from clawgym_jax.model.parallel_serving import ServingMeshConfig
from clawgym_jax.serving.jetstream_front import Ask
from clawgym_jax.serving.jetstream_rows import Outcome
from clawgym_jax.serving.state import EngineConfig

SERVICE = "clawgym_jax.Side"
PUT, TAKE, CANCEL, PUBLISH, STATE = METHODS = ("Put", "Take", "Cancel", "Publish", "State")
GRPC_OPTIONS = (  # routing of a long context is tens of megabytes
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        errors.NoWeights,
        errors.EngineRestarted,
        errors.Overloaded,
        errors.SamplerError,
        errors.ModelError,
        ValueError,
    )
}


@dataclass(frozen=True)
class ServerSpec:
    """What a server process is started with."""

    socket: str  # path of the unix socket to listen on
    model: str  # model folder: its shape, and its tokenizer where stop strings are wanted
    dtype: str  # of activations
    param_dtype: str  # of the weights that are published
    engine: EngineConfig
    mesh: ServingMeshConfig
    strings: bool = False  # decode with the folder's tokenizer.json, for stop strings
    scratch: str = ""  # a folder to remove at the end: its owner may have been killed

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ServerSpec:
        fields = json.loads(path.read_text(encoding="utf-8"))
        engine: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.pop("engine").items()
        }
        mesh = ServingMeshConfig(**fields.pop("mesh"))
        return cls(engine=EngineConfig(**engine), mesh=mesh, **fields)


def pack(**fields: Any) -> bytes:
    return wire.encode({"kind": "side", **fields})


def pack_error(error: Exception) -> bytes:
    return pack(error=_error_fields(error))


def unpack(data: bytes) -> dict[str, Any]:
    """The fields; raises the error that was packed instead."""
    fields: dict[str, Any] = wire.decode(data)
    if fields.get("error"):
        raise _error(fields["error"])
    return fields


def pack_ask(ask: Ask) -> bytes:
    return pack(
        request_id=ask.request_id,
        prompt=ask.prompt,
        params=dataclasses.asdict(ask.params),
        token_ids=list(ask.stop.token_ids),
        strings=list(ask.stop.strings),
        forced=ask.forced,
    )


def unpack_ask(data: bytes) -> Ask:
    f = unpack(data)
    stop = Stop(tuple(f["token_ids"]), tuple(f["strings"]))
    return Ask(f["request_id"], f["prompt"], SamplingParams(**f["params"]), stop, f["forced"])


def pack_outcome(outcome: Outcome) -> bytes:
    if outcome.error is not None:
        return pack_error(outcome.error)
    scored = outcome.scored
    return pack(
        finish=str(outcome.finish),
        stop_string=outcome.stop_string,
        cached_tok=outcome.cached_tok,
        routing=outcome.routing,
        scored=None
        if scored is None
        else [scored.ids, scored.logprobs, scored.raw_logprobs, scored.versions],
    )


def unpack_outcome(data: bytes) -> Outcome:
    f = unpack(data)
    finish, routing, cached_tok = Finish(f["finish"]), f["routing"], f["cached_tok"]
    scored = None
    if f["scored"] is not None:
        ids, logprobs, raw, versions = f["scored"]
        scored = Completion(
            ids, logprobs, raw, versions, finish, routing=routing, cached_tok=cached_tok
        )
    return Outcome(finish, f["stop_string"], cached_tok, routing, scored)


def _error_fields(error: Exception) -> list[str]:
    name = type(error).__name__
    return [name, str(error)] if name in _ERRORS else ["EngineRestarted", repr(error)]


def _error(fields: list[str]) -> Exception:
    name, text = fields
    return _ERRORS[name](text)
