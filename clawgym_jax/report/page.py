"""`report.html`: everything about a run on one page that needs nothing but itself.

Works on a run that is still going, one without held-out evaluation, and an empty folder: what is
missing is said. Not here: the parts (`sections`, `tree_drawing`, `transcript`).
Invariant: the same folder gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym_jax.core.types import Episode
from clawgym_jax.report import sections
from clawgym_jax.report.episode_view import EpisodeView, view
from clawgym_jax.report.markup import Html, el, join, missing
from clawgym_jax.report.run_data import RunData, load_run
from clawgym_jax.report.scales import shown
from clawgym_jax.report.style import CSS
from clawgym_jax.report.token_text import load_codec
from clawgym_jax.report.transcript import shading_key, transcript
from clawgym_jax.report.tree_drawing import MOST_ROWS, draw_tree

REPORT = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_folder: Path, codec_folder: Path | None) -> Path:
    """Writes the page into the run's folder. codec_folder: the tokenizer, None = ids stay ids."""
    return write_page(load_run(run_folder), run_folder, codec_folder)


def write_page(run: RunData, run_folder: Path, codec_folder: Path | None) -> Path:
    """The same for a run that was loaded already. The page is replaced whole."""
    target = Path(run_folder) / REPORT
    fresh = target.with_suffix(".new")
    fresh.write_text(render(run, codec_folder), encoding="utf-8")
    os.replace(fresh, target)
    return target


def render(run: RunData, codec_folder: Path | None) -> str:
    """The whole page, well-formed as HTML and as XML."""
    title = str(run.config.get("name") or run.name)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"Run {title}"),
        el("style", Html(CSS)),
    )
    numbers = (
        el("section", el("h2", name), section(run)) for name, section in sections.SECTIONS.items()
    )
    body = el("main", _top(title, run), numbers, _example(run, codec_folder))
    return "<!DOCTYPE html>\n" + el("html", head, el("body", body), lang="en") + "\n"


def _top(title: str, run: RunData) -> Html:
    facts = [
        f"seed {run.config['seed']}" if "seed" in run.config else None,
        f"harnesses: {', '.join(run.harnesses)}" if run.harnesses else None,
        f"{shown(len(run.episodes))} episodes, {shown(run.calls)} calls",
        f"{run.progress['seconds'] / 60:.1f} minutes" if "seconds" in run.progress else None,
    ]
    return el(
        "header",
        el("h1", f"Run {title}"),
        el("p", f"{_status(run)}; {'; '.join(f for f in facts if f)}.", class_="soft"),
    )


def _status(run: RunData) -> str:
    steps = run.progress.get("steps", run.config.get("loop", {}).get("steps"))
    done = run.train[-1]["step"] if run.train else 0
    of = f" of {steps}" if steps is not None else ""
    if run.progress.get("done"):
        return f"Finished: {done}{of} training steps"
    if run.train:
        return f"Not finished: {done}{of} training steps so far"
    if run.cold:
        return f"Not finished: {run.cold[-1]['step']} updates of the cold start so far"
    return "Nothing recorded yet" if not run.episodes else "Not finished: no update yet"


def _example(run: RunData, codec_folder: Path | None) -> Html:
    """One episode as a tree and as a transcript."""
    if run.example is None:
        nothing = missing("No episode with calls has settled yet: no tree, no transcript.")
        return el("section", el("h2", "One episode"), nothing)
    seen = view(run.example.calls, _filters(run.config))
    codec, why = load_codec(codec_folder)
    shading = shading_key() if codec else missing(f"Token by token is not possible: {why}.")
    drawing = join(_about(run.example, seen), _tree_key(), draw_tree(seen), _hidden_rows(seen))
    return join(
        el("section", el("h2", "One prefix tree"), drawing),
        el("section", el("h2", "One transcript"), el("p", "The same episode, call by call."),
           shading, transcript(seen, codec)),
    )  # fmt: skip


def _about(episode: Episode, seen: EpisodeView) -> Html:
    record, reward = episode.record, episode.reward
    linear = sum(c.prompt_tok + c.completion_tok for c in seen.tree.calls)
    return join(
        el("p", f"Episode {record.episode_id}: {record.harness} on {record.task_id}, {record.split}"
           f" step {record.step}, {record.outcome}, "
           + ("no reward, so not trained" if reward is None else f"reward {reward:.2f}") + "."),
        el("p", f"calls: {len(seen.tree.calls)}; open main leaves: {seen.selection.leaves}; "
           f"{shown(seen.tree.total_tok)} tokens in the tree, {shown(linear)} in one row per call. "
           "Depth in tokens runs to the right (compressed); each row holds what its call added.",
           class_="soft"),
    )  # fmt: skip


def _tree_key() -> Html:
    kinds = {"context": "context", "sampled": "sampled, trained", "dropped": "sampled, dropped"}
    block = {"x": 2, "y": 1, "width": 24, "height": 10}
    items = (
        el("li", el("svg", el("rect", class_=kind, **block), viewBox="0 0 28 12",
                    aria_hidden="true"), text)
        for kind, text in kinds.items()
    )  # fmt: skip
    return el("ul", items, class_="legend")


def _hidden_rows(seen: EpisodeView) -> Html | None:
    left = len(seen.tree.calls) - MOST_ROWS
    return el("p", f"{left} later calls are not drawn.", class_="soft") if left > 0 else None


def _filters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("batch", {}).get("filters", {})
    return found if isinstance(found, Mapping) else {}
