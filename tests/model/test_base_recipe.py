"""The recipe of the base model: its text, its loss weights, its steps and its checkpoints."""

import json
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.core import names
from clawgym_jax.model import config as model_config
from experiments.base_model import (
    documents,
    initialise,
    loop,
    markup,
    optimizer,
    skills,
    stream,
    tokenizer,
    training,
)

TEXT = tokenizer.build()


@pytest.mark.parametrize("kind", list(stream.KINDS), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", [30, 480])
def test_documents_hold_only_pretraining_names(kind: documents.Kind, size: int) -> None:
    for seed in range(20):
        text = kind(markup.Writer(random.Random(seed), size))
        assert markup.OPEN in text, "expected something to predict in every document"
        for word in re.findall("[A-Za-z]+", markup.plain(text)):
            if names.NAME_PATTERN.fullmatch(word) and word not in names.RESERVED:
                assert names.name_split(word) == "pretrain", word


def test_weights_follow_the_marks() -> None:
    ids, weights = stream.encode(TEXT, "banor=" + markup.known("ketu\n") + "x")
    assert [TEXT.decode([i]) for i in ids] == ["ba", "nor", "=", "ke", "tu", "\n", "x"]
    np.testing.assert_allclose(weights, [0.1, 0.1, 0.1, 1.0, 1.0, 1.0, 0.1])


def test_rows_are_full_reproducible_and_start_at_a_document() -> None:
    tokens, weights = stream.row(TEXT, "0/1/2/3", 64, 0.5)
    again, _ = stream.row(TEXT, "0/1/2/3", 64, 0.5)
    other, _ = stream.row(TEXT, "0/1/2/4", 64, 0.5)
    assert tokens.shape == weights.shape == (65,)
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != other).any()


def test_answers_are_found_by_their_tokens() -> None:
    marked = "a\n" + markup.known("banor\n") + "b" + markup.known("ketu")
    ids, spans = skills.spans_of(TEXT, marked)
    assert [TEXT.decode(ids[a:b]) for a, b in spans] == ["banor\n", "ketu"]


def test_a_perfect_and_a_mute_model_get_all_and_nothing() -> None:
    chosen = tuple(s for s in skills.SKILLS if s.name in ("lookup", "copy_32"))

    def perfect(tokens: np.ndarray) -> np.ndarray:
        return np.roll(tokens, -1, axis=1)

    def mute(tokens: np.ndarray) -> np.ndarray:
        return np.zeros_like(tokens)

    assert set(skills.measure(perfect, TEXT, 32, chosen).values()) == {1.0}
    assert set(skills.measure(mute, TEXT, 32, chosen).values()) == {0.0}


def test_the_start_has_one_shared_direction_that_the_router_ignores() -> None:
    _, params = initialise.initialise(model_config.TINY, 0)
    embed = np.asarray(params["embed"][...])
    shared = embed.mean(0) / np.linalg.norm(embed.mean(0))
    assert np.mean(embed @ shared) > 0.9
    router = np.asarray(params["segments"][0]["router"][...])
    assert np.abs(np.einsum("nde,d->ne", router, shared)).max() < 0.02


def test_decay_is_flat_then_linear_to_zero() -> None:
    assert [optimizer.decay(x) for x in (0.0, 0.6, 0.8, 1.0)] == pytest.approx([1, 1, 0.5, 0])


@pytest.mark.slow
def test_a_run_learns_stops_and_goes_on(tmp_path: pathlib.Path) -> None:
    """A resumed run equals one that went on, bit for bit, and the loss falls."""

    def start(resume: bool) -> loop.Run:
        settings = loop.Settings(tmp_path, 0.0, 4, 0, resume, check_every=1000)
        run = loop.Run(settings, TEXT)
        run.skills = lambda *_: {}  # type: ignore[method-assign]  # measured elsewhere
        return run

    run = start(False)
    rows = run._rows()
    first = [float(run._one(*next(rows))["loss"]) for _ in range(2)]
    run.save()
    resumed = start(True)
    assert resumed.progress == run.progress and run.progress.step == 2
    for _ in range(2):
        run._one(*next(rows))
    resumed.train()
    for a, b in zip(jax.tree.leaves(run.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first[1] < first[0]
    steps = [json.loads(x)["step"] for x in (tmp_path / "skills.jsonl").read_text().splitlines()]
    assert steps == [2, 4]


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: pathlib.Path) -> None:
    training.save(tmp_path / "state.npz", {"a": jnp.ones(3)}, {"step": 1})
    with pytest.raises(ValueError, match="expected a leaf of shape"):
        training.load(tmp_path / "state.npz", {"a": jnp.ones(4)})
