"""Errors as both OpenAI protocols word them.

Not here: which fault it is (faults.py), events (the protocol files).
Invariant: a prompt that is too long is named by the code that makes harnesses compact.
"""

from __future__ import annotations

from typing import Any

from clawgym_jax.proxy.faults import FaultKind, RequestFault

_ERRORS = {
    FaultKind.INVALID: ("invalid_request_error", None),
    FaultKind.OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    FaultKind.AUTH: ("invalid_request_error", "invalid_api_key"),
    FaultKind.NOT_FOUND: ("invalid_request_error", "not_found"),
    FaultKind.METHOD: ("invalid_request_error", "method_not_allowed"),
    FaultKind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    FaultKind.ENCODING: ("invalid_request_error", "unsupported_encoding"),
    FaultKind.INTERNAL: ("server_error", "internal_error"),
    FaultKind.OVERLOADED: ("server_error", "overloaded"),
}


def error_code(fault: RequestFault) -> str | None:
    return _ERRORS[fault.kind][1]


def error_body(fault: RequestFault, message: str) -> dict[str, Any]:
    kind, code = _ERRORS[fault.kind]
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
