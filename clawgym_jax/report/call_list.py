"""The calls of a run for the terminal: who asked, what was sent, what came of it.

Reads the log as a stream, also while it is written. Control characters in what a model wrote are
shown, not sent to the terminal. Invariant: every call that is asked for is named.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.log import read_log
from clawgym_jax.core.types import CallRecord, EpisodeRecord
from clawgym_jax.proxy.call_log import read_episodes
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.report.episode_view import EpisodeView, view
from clawgym_jax.report.markup import cut, visible
from clawgym_jax.report.run_data import read_calls_of
from clawgym_jax.report.token_text import versions
from clawgym_jax.rollout.store import CALLS, EPISODES
from clawgym_jax.tree.explain import Explanation, explain_chains

_MOST_CHARS = 2000


def print_calls(
    console: Console,
    folder: Path,
    codec: ChatCodec | None,
    episode_id: str | None = None,
    full: bool = False,
) -> dict[str, int]:
    """Prints all calls, or one episode's with their texts; full: all texts, uncut. -> counts"""
    records = {r.episode_id: r for r in read_log(folder / EPISODES) if isinstance(r, EpisodeRecord)}
    texts = full or episode_id is not None
    limit = None if full else _MOST_CHARS
    episodes = calls = 0
    for name, found in _chosen(folder / CALLS, episode_id):
        _print_heading(console, name, records.get(name))
        seen = view(found, {}) if texts else None
        why = explain_chains(found, codec.decode, codec.turn_start_id) if codec else {}
        for number, call in enumerate(found):
            _print_call(console, call)
            _print_break(console, why.get(call.call_id))
            if seen is not None:
                _print_texts(console, seen, number, codec, limit)
        episodes, calls = episodes + 1, calls + len(found)
    return {"episodes": episodes, "calls": calls}


def _chosen(path: Path, episode_id: str | None) -> Iterable[tuple[str, tuple[CallRecord, ...]]]:
    if episode_id is None:
        return read_episodes(path)
    found = read_calls_of(path, episode_id)
    if not found:
        names = sorted({r.episode_id for r in read_log(path) if isinstance(r, CallRecord)})
        near = difflib.get_close_matches(episode_id, names, n=1, cutoff=0.0)
        hint = f"; nearest: {near[0]}" if near else ": no call is logged yet"
        raise ConfigError(f"--episode: no calls of {episode_id!r} in {path}{hint}")
    return [(episode_id, found)]


def _print_heading(console: Console, name: str, record: EpisodeRecord | None) -> None:
    line = Text(visible(name), style="bold")
    if record is None:
        line.append("  not settled yet", style="yellow")
    else:
        score = record.grade.score
        line.append(
            visible(
                f"  {record.harness}  {record.task_id}  {record.split} step {record.step}  "
                f"{record.outcome}  " + ("no score" if score is None else f"score {score:.2f}")
            ),
            style="not bold",
        )
        why = record.detail or record.grade.reason
        line.append(f"  {visible(why)}" if why else "", style="yellow")
    console.print(line)


def _print_call(console: Console, call: CallRecord) -> None:
    """Two lines: what it was, and its tokens."""
    first = (
        f"  {call.call_id}  {call.role}  chain {call.chain}  {call.protocol}  {call.delivery}  "
        f"{call.completion.finish}" + (f"  attempt {call.attempt}" if call.attempt else "")
    )
    second = (
        f"    prompt {call.prompt_tok} = shared {call.shared_tok} + spliced {call.spliced_tok} + "
        f"encoded {call.encoded_tok}  sampled {call.completion_tok}  "
        f"versions {versions(call.completion)}"
    )
    console.print(Text(visible(first)))
    line = Text(second, style="dim")
    if call.breaks:
        line.append(visible(f"  breaks: {', '.join(call.breaks)}"), style="yellow")
    console.print(line)


def _print_break(console: Console, why: Explanation | None) -> None:
    """Where and why the prompt leaves its chain; nothing where it appends."""
    if why is not None and not why.appends:
        console.print(Text(f"    {visible(why.sentence())}", style="yellow"))


def _print_texts(
    console: Console, seen: EpisodeView, number: int, codec: ChatCodec | None, limit: int | None
) -> None:
    """The environment's new text and the sampled text."""
    call = seen.tree.calls[number]
    new = seen.environment_ids(number)
    if codec is None:
        _print_block(console, f"new, {len(new)} tokens (no tokenizer)", "", "cyan", limit)
        _print_block(console, "sampled", call.text, "green", limit)
        return
    _print_block(console, f"new, {len(new)} tokens", codec.decode(new), "cyan", limit)
    _print_block(console, "sampled", codec.decode(call.completion.ids), "green", limit)


def _print_block(console: Console, title: str, text: str, style: str, limit: int | None) -> None:
    shown = visible(text if limit is None else cut(text, limit))
    console.print(Text(f"    --- {title}", style=style))
    for line in shown.split("\n") if shown else ():
        console.print(Text(f"    {line}"))
