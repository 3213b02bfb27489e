"""What a harness gets to see of a completion.

Not here: wire forms (protocol files), records (session.py). What is hidden from the harness, such
as text past a stop string, is in the record.
Invariant: an answer depends on nothing but its arguments, so a repeated request gets the same one.
"""

from __future__ import annotations

import numpy as np

from clawgym_jax.core.errors import ConfigError
from clawgym_jax.core.types import Completion, Finish
from clawgym_jax.proxy.call_forms import Tools
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.splice import Prompt
from clawgym_jax.proxy.tool_calls import CompletionParser, parse_completion, raw_calls_as_text
from clawgym_jax.proxy.turns import Answer, FinishKind


def visible_text(codec: ChatCodec, completion: Completion) -> str:
    """The text without what ended it."""
    ids = completion.ids
    while ids.size and int(ids[-1]) in codec.stop_ids:
        ids = ids[:-1]
    text = codec.decode(ids)
    return text.partition(completion.stop_string)[0] if completion.stop_string else text


def answer_of(
    codec: ChatCodec,
    run_id: str,
    call_id: str,
    prompt: Prompt,
    completion: Completion,
    text: str,
    received_at_s: float,
    parse: CompletionParser = parse_completion,
    tools: Tools = (),
    carries_raw_calls: bool = True,
) -> Answer:
    """text: the visible part of the completion. carries_raw_calls: see Request."""
    cut = completion.finish is not Finish.STOP
    parsed = parse(text, f"{run_id}/{call_id}", cut, codec.opens_thinking, tools)
    turn = parsed.turn if carries_raw_calls else raw_calls_as_text(parsed.turn)
    return Answer(
        call_id=call_id,
        turn=turn,
        finish=_finish_kind(cut, bool(turn.calls), completion.stop_string),
        stop_string=completion.stop_string,
        prompt_tok=int(prompt.ids.size),
        completion_tok=int(completion.ids.size),
        cached_tok=completion.cached_tok,
        reasoning_tok=_reasoning_tok(codec, completion.ids, turn.thinking),
        malformed_calls=parsed.malformed,
        created_s=int(received_at_s),
    )


def _finish_kind(cut: bool, calls: bool, stop_string: str | None) -> FinishKind:
    """An abort looks like a length stop: the harness knows no better word for it."""
    if cut:
        return "length"
    if calls:
        return "tool"
    return "stop_string" if stop_string else "stop"


def _reasoning_tok(codec: ChatCodec, ids: np.ndarray, thinking: str) -> int:
    """How many of the sampled ids are reasoning, with what closes it."""
    if not thinking:
        return 0
    try:
        closes = np.flatnonzero(ids == codec.token_id("</think>"))
    except ConfigError:  # the tokenizer writes the tag in several tokens
        return min(int(ids.size), int(codec.encode_text(thinking).size))
    return int(closes[0]) + 1 if closes.size else int(ids.size)
