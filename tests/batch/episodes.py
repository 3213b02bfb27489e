"""Episodes for tests of batches: written down call by call, or random."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from clawgym_jax.core.types import CallRecord, Episode, EpisodeRecord, Grade, Outcome, Span
from tests.tree.histories import make_call, random_rollout


def episode(
    name: str, calls: list[CallRecord], score: float | None, group: str = "g", **changes: object
) -> Episode:
    record = EpisodeRecord(
        run_id="r", episode_id=name, group_id=group, task_id="t", harness="h", split="train",
        step=0, seed=0, outcome=Outcome.OK, detail="", grade=Grade(score),
        call_ids=tuple(c.call_id for c in calls), timings_s={},
    )  # fmt: skip
    return Episode(dataclasses.replace(record, **changes), tuple(calls))  # type: ignore[arg-type]


def simple(
    name: str, score: float | None, tokens: int, group: str = "g", **changes: object
) -> Episode:
    """One call with a prompt of three tokens."""
    ids = list(range(10, 10 + tokens))
    return episode(name, [make_call(0, [1, 2, 3], ids, episode=name)], score, group, **changes)


def forked_calls(name: str, branches: int = 3) -> list[CallRecord]:
    """A call of two tokens that `branches` calls of one, two, ... tokens extend, each its way."""
    calls = [make_call(0, [1, 2], [5, 6], episode=name)]
    span = (Span(2, 2, f"{name}.0"),)
    for i in range(branches):
        ids = [30 + i + j for j in range(i + 1)]
        calls.append(make_call(i + 1, [1, 2, 5, 6, 7 + i], ids, span, episode=name))
    return calls


def presented_again(histories: Sequence[Sequence[int]], name: str = "e") -> list[CallRecord]:
    """Calls of one rollout, each with the turns of its history behind a prompt of its own.

    No prompt starts with another: by tokens every call is a root. Call i samples i + 1 tokens.
    """
    calls: list[CallRecord] = []
    for i, history in enumerate(histories):
        prompt, spans = [100 + i], []
        for j in history:
            ids = calls[j].completion.ids.tolist()
            spans.append(Span(len(prompt), len(ids), calls[j].call_id))
            prompt += [*ids, 7]
        told = tuple(span.call_id for span in spans)
        ids = [10 * (i + 1) + k for k in range(i + 1)]
        calls.append(make_call(i, prompt, ids, tuple(spans), episode=name, continues=told))
    return calls


def random_episodes(seed: int, count: int = 4) -> list[Episode]:
    rng = np.random.default_rng(seed)
    return [
        episode(f"e{i}", random_rollout(seed + i, f"e{i}"), float(rng.uniform()), group="ab"[i % 2])
        for i in range(count)
    ]


def with_routing(call: CallRecord, seed: int, layers: int = 2, k: int = 2) -> CallRecord:
    """Random experts of every token but the last, as an engine records them."""
    shape = (call.prompt_tok + call.completion_tok, layers, k)
    routing = np.random.default_rng(seed).integers(0, 200, shape).astype(np.uint8)
    routing[-1] = 255
    completion = dataclasses.replace(call.completion, routing=routing)
    return dataclasses.replace(call, completion=completion)
