"""The slow twin of trees, forests and packed rows: lists of labelled tokens, and sets of prefixes.

A label is (token, None) for context, (token, call id) for what a call sampled. The tokens of a tree
are the different non-empty prefixes of its calls' label lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clawgym_jax.core.types import CallRecord

Label = tuple[int, str | None]


def labels_of(calls: Sequence[CallRecord]) -> list[list[Label]]:
    """For each call of one rollout: what each token of its prompt and completion is."""
    done: list[list[Label]] = []
    for call in calls:
        prompt = call.prompt_ids.tolist()
        out: list[Label] = []
        while len(out) < len(prompt):
            source = _sampled_next(calls[: len(done)], done, call, out)
            if source is None:
                out.append((prompt[len(out)], None))
            else:
                out += [(t, source.call_id) for t in source.completion.ids.tolist()]
        done.append(out + [(t, call.call_id) for t in call.completion.ids.tolist()])
    return done


def _sampled_next(
    calls: Sequence[CallRecord], done: list[list[Label]], call: CallRecord, out: list[Label]
) -> CallRecord | None:
    """The earlier call whose prompt is `out` and whose completion comes next."""
    rest = call.prompt_ids.tolist()[len(out) :]
    fits = [
        other
        for other, labels in zip(calls, done, strict=True)
        if other.completion_tok
        and labels[: other.prompt_tok] == out
        and other.completion.ids.tolist() == rest[: other.completion_tok]
    ]
    for span in call.spans:
        if span.offset == 0 and span.start == len(out):
            return next((other for other in fits if other.call_id == span.call_id), None)
    return fits[-1] if fits else None


def prefixes(paths: Iterable[Sequence[Label]]) -> set[tuple[Label, ...]]:
    return {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
