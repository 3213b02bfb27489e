"""What harnesses look at before and between their calls: signs of life and model lists.

Not here: calls of the model (episode_app.py). Invariant: without the key nothing is told but that
a server is there.
"""

from __future__ import annotations

from typing import Any

MODEL = "policy"
OPEN_PATHS = ("", "v1", "api/hello")  # looked at without a key


def is_known(path: str) -> bool:
    return path in OPEN_PATHS or path == "models" or path.startswith("models/")


def answer_probe(path: str) -> dict[str, Any]:
    """Body of the answer to GET; path: below /v1."""
    if path == "models":
        listed = {"object": "list", "data": [_model_card(MODEL)], "has_more": False}
        return {**listed, "first_id": MODEL, "last_id": MODEL}
    if path.startswith("models/"):
        return _model_card(path.removeprefix("models/"))
    return {"ok": True}


def _model_card(name: str) -> dict[str, Any]:
    """Both makers' fields: each client reads its own. Any name is served."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "run",
    }
