"""What a harness gets to see of a completion.

Not here: wire forms (protocol files), records (session.py). What is hidden from the harness, such
as text past a stop string, is in the record.
Invariant: an answer depends on nothing but its arguments, so a repeated request gets the same one.
"""

from __future__ import annotations

from clawgym_jax.core.types import Completion, Finish
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.splice import Prompt
from clawgym_jax.proxy.tool_calls import parse_completion
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
) -> Answer:
    """text: the visible part of the completion."""
    cut = completion.finish is not Finish.STOP
    parsed = parse_completion(text, f"{run_id}/{call_id}", cut, codec.opens_thinking)
    return Answer(
        call_id=call_id,
        turn=parsed.turn,
        finish=_finish_kind(cut, bool(parsed.turn.calls), completion.stop_string),
        stop_string=completion.stop_string,
        prompt_tok=int(prompt.ids.size),
        completion_tok=int(completion.ids.size),
        cached_tok=completion.cached_tok,
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
