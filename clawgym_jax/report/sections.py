"""The parts of the page that show numbers: curves, seconds, tokens, what was dropped.

Each takes the run and returns markup, or a sentence that says what is missing. Not here: held-out
results (`results`), the episode that is shown token by token.
Invariant: sums and means are over the lines of metrics.jsonl or the records of episodes.log as they
are; nothing is measured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clawgym_jax.core.types import EpisodeRecord
from clawgym_jax.report.curves import Series, line_chart, stacked_columns
from clawgym_jax.report.markup import Html, el, join, missing, short, table
from clawgym_jax.report.results import headline
from clawgym_jax.report.run_data import RunData
from clawgym_jax.report.scales import shown

_TIMES = {
    "old_logprobs_s": "old log-probs",
    "update_s": "update",
    "pack_s": "packing",
    "values_s": "values",
    "value_update_s": "updates of the value model",
    "publish_s": "publish",
}
_MOST_REASONS = 12
Line = Mapping[str, Any]


# --- curves ---------------------------------------------------------------------------------------


def curves(run: RunData) -> Html:
    """Reward per harness, entropy, clipping, log-prob gap; the cold start's loss."""
    return join(
        None if run.train else missing("No training step is done yet."),
        el("div", _training_curves(run), _cold_curve(run), class_="charts"),
    )


def _training_curves(run: RunData) -> Html | None:
    if not run.train:
        return None
    steps = [line["step"] for line in run.train]
    names = sorted({k for line in run.train for k in line if k.startswith("reward/")})
    rewards = [_series(run.train, key, key.removeprefix("reward/")) for key in names]
    limit = run.config.get("loop", {}).get("reinforce", {}).get("max_logprob_gap")
    gaps = [
        _series(run.train, "logprob_gap_max", "largest"),
        _series(run.train, "logprob_gap_mean", "mean"),
    ]
    return join(
        line_chart("Reward", "mean over a step's graded rollouts", steps, rewards),
        line_chart("Entropy", "nats per trained token", steps,
                   [_series(run.train, "entropy", "entropy")]),
        line_chart("Clip share", "share of trained tokens whose ratio was clipped", steps,
                   [_series(run.train, "clip_share", "clip share")]),
        line_chart("Log-prob gap", "|engine - trainer| on the sampled tokens; logarithmic", steps,
                   gaps, limit=limit or None, log=True),
        _critic_curve(run, steps),
    )  # fmt: skip


def _critic_curve(run: RunData, steps: Sequence[int]) -> Html | None:
    """With PPO: how much of the returns' variance the values explained before they were updated."""
    if not any("explained_variance" in line for line in run.train):
        return None
    explained = [_series(run.train, "explained_variance", "explained variance")]
    return line_chart("Value model", "explained variance of returns; 1 = all", steps, explained)


def _cold_curve(run: RunData) -> Html | None:
    if not run.cold:
        return None
    steps = [line["step"] for line in run.cold]
    nll = [_series(run.cold, "nll", "negative log-likelihood")]
    return line_chart("Cold start", "nats per demonstrated token, by update", steps, nll)


def _series(lines: Sequence[Line], key: str, name: str) -> Series:
    return Series(name, tuple(_value(line, key) for line in lines))


# --- seconds --------------------------------------------------------------------------------------


def seconds(run: RunData) -> Html:
    """Where a step's time goes, and an episode's."""
    if not run.train:
        return missing("No training step is done yet, so no step was timed.")
    steps = [line["step"] for line in run.train]
    parts = _step_parts(run.train)
    means = [(p.name, sum(v or 0.0 for v in p.values) / len(steps)) for p in parts]
    whole = sum(mean for _, mean in means)
    rows = [[n, f"{mean:.2f}", f"{100 * mean / whole if whole else 0:.1f} %"] for n, mean in means]
    note = "seconds per step; serving is the time in which the engine was sampling"
    return el(
        "div",
        stacked_columns("Where a step's seconds go", note, steps, parts),
        el("div", table(["part", "seconds", "share"], [*rows, ["step", f"{whole:.2f}", "100 %"]],
                        f"mean of {len(steps)} steps"),
           _episode_seconds(run)),
        class_="charts",
    )  # fmt: skip


def _step_parts(lines: Sequence[Line]) -> list[Series]:
    """Parts that add up to step_s. Serving happens within the rollouts' time."""
    serving = [min(_some(x, "serving_busy_s"), _some(x, "rollout_s")) for x in lines]
    waiting = [_some(x, "rollout_s") - s for x, s in zip(lines, serving, strict=True)]
    parts = [Series("serving", tuple(serving)), Series("rest of the rollout", tuple(waiting))]
    timed = {k: name for k, name in _TIMES.items() if any(k in x for x in lines)}
    parts += [Series(name, tuple(_some(x, k) for x in lines)) for k, name in timed.items()]
    named = [sum(p.values[i] or 0.0 for p in parts) for i in range(len(lines))]
    rest = [max(0.0, _some(x, "step_s") - n) for x, n in zip(lines, named, strict=True)]
    return [*parts, Series("other", tuple(rest))]


def _episode_seconds(run: RunData) -> Html | None:
    trained = [e for e in run.episodes if e.split == "train"]
    names = list(dict.fromkeys(k for e in trained for k in e.timings_s))
    if not names:
        return None
    by_harness = {h: [e for e in trained if e.harness == h] for h in run.harnesses}
    columns = [h for h, own in by_harness.items() if own]
    rows = [
        [n, *(f"{_mean([e.timings_s.get(n, 0.0) for e in by_harness[h]]):.2f}" for h in columns)]
        for n in names
    ]
    return table(["part", *columns], rows, "mean seconds of a training episode, by harness")


# --- tokens ---------------------------------------------------------------------------------------


def tokens(run: RunData) -> Html:
    """The tree against one row per call."""
    if not run.train:
        return missing("No training step is done yet, so no batch was packed.")
    steps = [line["step"] for line in run.train]
    keys = {"sampled_tok": "sampled", "tree_tok": "unique in the trees",
            "repeated_tok": "repeated ancestors", "padding_tok": "padding",
            "linear_tok": "one row per call"}  # fmt: skip
    total = {k: sum(_some(line, k) for line in run.train) for k in keys}
    packed = total["tree_tok"] + total["repeated_tok"]
    words = (
        f"The trainer computed {shown(packed)} tokens (repeated ancestors included, padding not); "
        f"one row per call would have been {shown(total['linear_tok'])}"
    )
    ratio = f", {total['linear_tok'] / packed:.1f} times as many." if packed else "."
    tree = [Series("tree", tuple(_some(x, "tree_tok") + _some(x, "repeated_tok")
                                 for x in run.train))]  # fmt: skip
    chart = line_chart("Tokens of a step's batch", "without padding", steps,
                       [*tree, _series(run.train, "linear_tok", "one row per call")])  # fmt: skip
    rows = [[name, shown(total[k]), shown(total[k] / len(steps))] for k, name in keys.items()]
    return join(
        el("p", words + ratio),
        el("div", chart, table(["tokens", "all steps", "mean step"], rows, "tokens trained on"),
           class_="charts"),
    )  # fmt: skip


# --- outcomes -------------------------------------------------------------------------------------


def outcomes(run: RunData) -> Html:
    """How episodes ended, by split and harness, and everything that was left out."""
    if not run.episodes:
        return missing("No episode has settled yet.")
    kinds = list(dict.fromkeys(str(e.outcome) for e in run.episodes))
    groups: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for episode in run.episodes:
        groups.setdefault((episode.split, episode.harness), []).append(episode)
    order = {h: i for i, h in enumerate(run.harnesses)}
    splits = list(dict.fromkeys(split for split, _ in groups))
    by_split = sorted(groups, key=lambda key: (splits.index(key[0]), order[key[1]]))
    rows = [_outcome_row(*key, groups[key], kinds) for key in by_split]
    head = ["episodes", "harness", "all", *kinds, "ungraded", "mean score", "calls"]
    ungraded = Counter(_why(e) for e in run.episodes if e.grade.score is None)
    return join(
        table(head, rows, "outcomes of episodes"),
        el("div",
           _reasons("Episodes without a score", "every episode was graded", ungraded),
           _reasons("Rollouts", "no training step is done yet", _summed(run.train, "rollouts/")),
           _reasons("Sampled tokens that were not trained", "none was dropped",
                    _summed(run.train, "dropped_tok/")),
           _reasons("Groups", "no training step is done yet", _summed(run.train, "groups/")),
           class_="charts"),
    )  # fmt: skip


def _outcome_row(
    split: str, harness: str, own: Sequence[EpisodeRecord], kinds: Iterable[str]
) -> list[Any]:
    ended = Counter(str(e.outcome) for e in own)
    scores = [e.grade.score for e in own if e.grade.score is not None]
    return [
        split, harness, len(own), *(ended[kind] for kind in kinds), len(own) - len(scores),
        f"{_mean(scores):.3f}" if scores else "–",
        f"{_mean([len(e.call_ids) for e in own]):.2f}",
    ]  # fmt: skip


def _reasons(title: str, none: str, counts: Counter[str]) -> Html:
    """The most frequent reasons; the rest in one row."""
    if not counts:
        return el("div", el("h3", title), el("p", f"{none}.".capitalize(), class_="soft"))
    common = counts.most_common(_MOST_REASONS)
    rest = sum(counts.values()) - sum(n for _, n in common)
    rows = [[short(reason, 120), shown(n)] for reason, n in common]
    rows += [["other reasons", shown(rest)]] if rest else []
    return el("div", el("h3", title), table(["reason", "number"], rows, label=title))


def _why(episode: EpisodeRecord) -> str:
    return f"{episode.outcome}: {episode.detail or episode.grade.reason or 'no reason given'}"


def _summed(lines: Sequence[Line], prefix: str) -> Counter[str]:
    out: Counter[str] = Counter()
    for line in lines:
        for key, value in line.items():
            if key.startswith(prefix):
                out[key.removeprefix(prefix)] += int(value or 0)
    return +out


def _value(line: Line, key: str) -> float | None:
    value = line.get(key)
    return None if value is None else float(value)


def _some(line: Line, key: str) -> float:
    return _value(line, key) or 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


SECTIONS: dict[str, Callable[[RunData], Html]] = {
    "Results": headline,
    "Curves": curves,
    "Seconds": seconds,
    "Tokens": tokens,
    "Outcomes": outcomes,
}
