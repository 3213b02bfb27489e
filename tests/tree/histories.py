"""Random call histories as harnesses make them: chains, retries, forks, moved turns, sub-agents."""

from __future__ import annotations

import random

import numpy as np

from clawgym_jax.core.types import (
    CallRecord,
    Completion,
    Finish,
    Role,
    SamplingParams,
    Span,
)


def make_call(
    ordinal: int,
    prompt: list[int],
    ids: list[int],
    spans: tuple[Span, ...] = (),
    *,
    episode: str = "e",
    role: Role = Role.MAIN,
    chain: str = "main",
    continues: tuple[str, ...] = (),
    logprob: float = -1.0,
    version: int = 1,
    temperature: float = 1.0,
) -> CallRecord:
    n = len(ids)
    completion = Completion(
        ids=np.array(ids, np.int32),
        logprobs=np.full(n, logprob, np.float32),
        raw_logprobs=np.full(n, logprob, np.float32),
        versions=np.full(n, version, np.uint32),
        finish=Finish.STOP,
    )
    return CallRecord(
        run_id="r",
        episode_id=episode,
        call_id=f"{episode}.{ordinal}",
        ordinal=ordinal,
        attempt=0,
        chain=chain,
        role=role,
        protocol="openai-chat",
        prompt_ids=np.array(prompt, np.int32),
        completion=completion,
        spans=spans,
        continues=continues,
        breaks=(),
        shared_tok=0,
        spliced_tok=0,
        encoded_tok=len(prompt),
        requested={},
        effective=SamplingParams(temperature=temperature),
        model="m",
    )


def random_rollout(
    seed: int,
    episode: str = "e",
    root: tuple[int, ...] = (1, 2, 3),
    vocab: int = 5,
    calls: int | None = None,
    max_prompt: int = 60,
) -> list[CallRecord]:
    """Calls of one rollout over a tiny vocabulary, so that equal text by chance is common."""
    rng = random.Random(seed)
    made: list[CallRecord] = []
    for ordinal in range(calls if calls is not None else rng.randint(1, 7)):
        prompt, spans, continues = list(root), (), ()
        if made and rng.random() < 0.8:
            source = rng.choice(made[-3:])
            prompt, spans, continues = _present(source, made, rng)
        prompt += [rng.randrange(vocab) for _ in range(rng.randint(1, 4))]
        if len(prompt) > max_prompt:
            prompt, spans, continues = [*root, rng.randrange(vocab)], (), ()
        role = rng.choice([Role.MAIN, Role.MAIN, Role.MAIN, Role.SUBAGENT])
        ids = [rng.randrange(vocab) for _ in range(rng.randint(1, 5))]
        made.append(
            make_call(
                ordinal, prompt, ids, spans, episode=episode, role=role, continues=continues,
                chain="main" if role is Role.MAIN else "sub", logprob=-rng.random() * 3,
            )
        )  # fmt: skip
    return made


def _present(
    source: CallRecord, made: list[CallRecord], rng: random.Random
) -> tuple[list[int], tuple[Span, ...], tuple[str, ...]]:
    """The next history after `source`: retried, extended, or extended behind changed context."""
    prompt, ids = source.prompt_ids.tolist(), source.completion.ids.tolist()
    kind = rng.random()
    if kind < 0.2:  # a retry: the same prompt again
        return prompt, source.spans, ()
    span = Span(len(prompt), len(ids), source.call_id)
    if kind < 0.8:  # a plain extension, sometimes without a declared splice
        spans = (*source.spans, span) if rng.random() < 0.7 else ()
        return prompt + ids, spans, (*source.continues, source.call_id)
    changed = [*prompt[:-1], 9]  # a moving tail: the turn re-appears behind other context
    return changed + ids, (Span(len(changed), len(ids), source.call_id),), (source.call_id,)
