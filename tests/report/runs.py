"""Run folders as a real run leaves them, small: real logs, real metrics, a real tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clawgym_jax
from clawgym_jax.core.log import RecordLog
from clawgym_jax.core.types import (
    CallRecord,
    Delivery,
    EpisodeRecord,
    Grade,
    Outcome,
    Role,
    Span,
)
from clawgym_jax.proxy.call_log import delivery_frame
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.rollout.store import CALLS, EPISODES
from clawgym_jax.train.metrics import MetricsWriter
from tests.tree.histories import make_call

TOKENIZER = Path(clawgym_jax.__file__).parent / "data" / "tiny_base"
HOSTILE = "</span><script>alert('x')</script><img src=x onerror=alert(1)> & \x1b[31m\u202e"
SCORES = {"mean": 0.5, "full": 0.5, "low": 0.29, "high": 0.71, "graded": 20, "ungraded": 1}


def branching_calls(codec: ChatCodec, episode: str = "train-s0001-g000-r00") -> list[CallRecord]:
    """A main chain with a retry that was dropped, a sub-agent, and hostile text in and out."""
    head = codec.encode_text("Write the first line of a.txt to b.txt.\n").tolist()
    look = codec.encode_text("list_files in").tolist()
    found = codec.encode_text(f"\nfound: {HOSTILE}\n").tolist()
    say = codec.encode_text(HOSTILE).tolist()
    other = codec.encode_text("Only search: where is a.txt?\n").tolist()
    done = codec.encode_text("done ✓ naïve").tolist()
    first = make_call(0, head, look, episode=episode, logprob=-0.02)
    spliced = (Span(len(head), len(look), first.call_id),)
    second = [*head, *look, *found]
    third = [*second, *say]
    return [
        first,
        make_call(1, second, done, spliced, episode=episode, logprob=-3.0),
        dataclasses.replace(
            make_call(2, second, say, spliced, episode=episode, logprob=-0.4, version=2),
            attempt=1,
            breaks=("retry",),
        ),
        dataclasses.replace(
            make_call(3, other, done, episode=episode, role=Role.SUBAGENT, chain=HOSTILE),
            breaks=("sub-agent",),
        ),
        make_call(
            4, [*third, *codec.encode_text("\nand?\n").tolist()], done,
            (*spliced, Span(len(second), len(say), f"{episode}.2")), episode=episode, logprob=-6.0,
        ),
    ]  # fmt: skip


def record_of(calls: Sequence[CallRecord], **changes: Any) -> EpisodeRecord:
    record = EpisodeRecord(
        run_id="r",
        episode_id=calls[0].episode_id,
        group_id="g",
        task_id="toy_1",
        harness="tiny_chat",
        split="train",
        step=1,
        seed=1,
        outcome=Outcome.OK,
        detail="",
        grade=Grade(1.0),
        call_ids=tuple(call.call_id for call in calls),
        timings_s={"sandbox": 0.1, "model": 2.0, "total": 2.5},
    )
    return dataclasses.replace(record, **changes)


def log_calls(folder: Path, calls: Sequence[CallRecord], delivered: bool = True) -> None:
    with RecordLog(folder / CALLS) as log:
        for call in calls:
            log.append(call)
            if delivered:
                log.append(delivery_frame(call.call_id, Delivery.DELIVERED, 1.0))


def log_episodes(folder: Path, records: Sequence[EpisodeRecord]) -> None:
    with RecordLog(folder / EPISODES) as log:
        for record in records:
            log.append(record)


def write_metrics(folder: Path, steps: int) -> None:
    with MetricsWriter(folder) as metrics:
        for update in range(1, 4):
            metrics.write("cold", update, {"nll": 1.0 / update})
        for step in range(1, steps + 1):
            metrics.write("train", step, step_metrics(step))


def step_metrics(step: int) -> dict[str, Any]:
    return {
        "reward/tiny_chat": 0.1 * step,
        "reward/tiny_shell": float("nan") if step == 2 else 0.05 * step,
        "entropy": 0.3,
        "clip_share": 0.001,
        "logprob_gap_max": 2e-5,
        "logprob_gap_mean": 0.0,
        "sampled_tok": 500,
        "tree_tok": 1000,
        "repeated_tok": 100,
        "padding_tok": 50,
        "linear_tok": 5500,
        "rollout_s": 10.0,
        "serving_busy_s": 8.0,
        "pack_s": 0.5,
        "old_logprobs_s": 1.5,
        "update_s": 4.0,
        "publish_s": 0.25,
        "step_s": 17.0,
        "rollouts/in the loss": 60,
        "rollouts/no reward": 4,
        "dropped_tok/dead leaf": 33,
        "groups/groups": 8,
    }


def whole_run(folder: Path, steps: int = 3) -> Path:
    """A finished run with two episodes: one to look at, one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    codec = ChatCodec.from_folder(TOKENIZER)
    calls = branching_calls(codec)
    failed = [make_call(0, [5, 6, 7], [8], episode="train-s0000-g000-r00")]
    log_calls(folder, [*failed, *calls])
    lost = Grade(None, f"no sandbox {HOSTILE}")
    log_episodes(
        folder,
        [
            record_of(failed, step=0, outcome=Outcome.INFRASTRUCTURE, grade=lost),
            record_of(calls),
        ],
    )
    write_metrics(folder, steps)
    config = {
        "name": f"quick {HOSTILE}",
        "seed": 0,
        "harnesses": ["tiny_chat"],
        "loop": {"steps": 3, "reinforce": {"max_logprob_gap": 1e-4}},
        "model": {"path": "tiny_base"},
        "batch": {"filters": {"max_leaves": 16, "from_a_newer_version": 1}},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    after = {**SCORES, "mean": 0.8, "full": 0.8, "low": 0.58, "high": 0.92}
    progress = {"before": {"tiny_chat": SCORES}, "after": {"tiny_chat": after},
                "seconds": 120.0, "done": True}  # fmt: skip
    (folder / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    return folder
