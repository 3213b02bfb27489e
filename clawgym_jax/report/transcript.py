"""One episode, call by call: the environment's new text, what was sampled, what became of it.

Not here: choosing the episode. Invariant: nothing that a model or an environment wrote is markup.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.core.types import CallRecord
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.report.episode_view import EpisodeView, describe
from clawgym_jax.report.markup import Html, cut, el, join, short
from clawgym_jax.report.token_text import LEVELS, Piece, pieces, versions

MOST_CALLS = 12
_MOST_CHARS = 4000
_MOST_PIECES = 1500


def shading_key() -> Html:
    """What the colours behind tokens mean."""
    shades = (el("span", name, class_=f"t{i}") for i, name in enumerate(LEVELS))
    lead = "Shading: the policy's probability of the token it sampled. "
    return el("p", lead, ([shade, " "] for shade in shades), class_="key")


def transcript(view: EpisodeView, codec: ChatCodec | None) -> Html:
    """The first MOST_CALLS calls."""
    calls = view.tree.calls
    left = len(calls) - MOST_CALLS
    more = f"{left} more calls are left out; launch/report.py --calls --episode=ID prints them."
    return join(
        (_call(view, i, codec) for i in range(min(len(calls), MOST_CALLS))),
        el("p", more, class_="soft") if left > 0 else None,
    )


def _call(view: EpisodeView, index: int, codec: ChatCodec | None) -> Html:
    call = view.tree.calls[index]
    facts = (
        f"{describe(call)} · {call.protocol} · {call.delivery} · finish: {call.completion.finish} "
        f"· {view.verdict(index)} · weights {versions(call.completion)}"
    )
    prompt = (
        f"prompt {call.prompt_tok} = {call.shared_tok} shared + {call.spliced_tok} spliced + "
        f"{call.encoded_tok} newly encoded tokens; sampled {call.completion_tok}"
    )
    return el(
        "section",
        el("h3", f"call {call.ordinal}: {call.call_id}"),
        el("p", facts),
        el("p", prompt, class_="soft"),
        el("p", f"prefix breaks: {', '.join(call.breaks)}") if call.breaks else None,
        _environment(view.environment_ids(index), codec, index),
        _sampled(call, codec),
        class_="call",
    )


def _environment(ids: np.ndarray, codec: ChatCodec | None, index: int) -> Html:
    if not len(ids):
        return el("p", "Nothing new from the environment: the same prompt again.")
    if codec is None:
        return el("p", f"{len(ids)} new tokens from the environment.")
    title = f"New from the environment, {len(ids)} tokens"
    return join(el("p", title), _box(f"call {index}: {title}", cut(codec.decode(ids), _MOST_CHARS)))


def _sampled(call: CallRecord, codec: ChatCodec | None) -> Html:
    if not call.completion_tok:
        return el("p", "Sampled nothing.")
    if codec is None:
        return join(el("p", "Sampled"), _box("sampled", cut(call.text, _MOST_CHARS)))
    parts = pieces(codec, call.completion)
    shaded: list[Html | str] = [_shade(piece) for piece in parts[:_MOST_PIECES]]
    if len(parts) > _MOST_PIECES:
        shaded.append(f"\n[... {len(parts) - _MOST_PIECES} tokens left out ...]")
    return join(el("p", "Sampled"), _box("sampled", shaded), el("p", _surprises(call, parts)))


def _box(label: str, content: str | list[Html | str]) -> Html:
    return el("pre", content, tabindex=0, role="region", aria_label=label)


def _shade(piece: Piece) -> Html:
    tip = f"log-prob {piece.logprob:.3f}, weights {piece.version}"
    return el("span", piece.text, class_=f"t{piece.level}", title=tip)


def _surprises(call: CallRecord, parts: list[Piece]) -> str:
    """The shading in words."""
    mean = float(np.mean(call.completion.logprobs, dtype=np.float64))
    least = sorted(parts, key=lambda p: p.logprob)[:3]
    named = ", ".join(f"“{short(p.text, 20)}” {p.logprob:.2f}" for p in least)
    return f"Mean log-prob {mean:.3f}; least likely: {named}."
