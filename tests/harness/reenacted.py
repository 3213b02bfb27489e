"""What tests share that re-enact a harness's habits at the proxy, without its program.

Invariant: every sampled call is kept, or dropped under one reason; `closed` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawgym_jax.core.types import CallRecord
from clawgym_jax.tree.filters import FilterConfig, Selection, select_calls
from tests.proxy.support import Stage, call_text

LOOKED = call_text("look", '{"path": "a/b"}')
BROKEN = call_text("look", '{"path": "a/b')


@dataclass(frozen=True)
class Closed:
    """An episode after its end."""

    calls: tuple[CallRecord, ...]
    selection: Selection

    @property
    def dropped(self) -> dict[int, str]:
        return self.selection.dropped


async def closed(s: Stage) -> Closed:
    trace = await s.proxy.close_episode("ep")
    assert not trace.failure
    selection = select_calls(trace.calls, FilterConfig())
    assert sorted([*selection.kept, *selection.dropped]) == list(range(len(trace.calls)))
    return Closed(trace.calls, selection)
