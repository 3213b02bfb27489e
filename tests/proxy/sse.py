"""Server-sent events, read by the letter of their specification."""

from __future__ import annotations

import json
from typing import Any


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Data of each event. Comments are passed over; an event's name must be its type."""
    events = []
    for block in raw.decode("utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if "data" not in fields or fields["data"] == "[DONE]":
            continue
        event = json.loads(fields["data"])
        assert fields.get("event", event.get("type")) == event.get("type")
        events.append(event)
    return events
