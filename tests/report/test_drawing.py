"""Axes, token pieces, and the tree's drawing against the tree itself."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core.types import Completion, Finish
from clawgym_jax.evaluate.passk import wilson
from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.report.episode_view import view
from clawgym_jax.report.markup import cut, el, visible
from clawgym_jax.report.results import newcombe
from clawgym_jax.report.scales import Axis, round_ticks, shown, value_axis
from clawgym_jax.report.token_text import Piece, pieces
from clawgym_jax.report.tree_drawing import DepthScale, draw_tree
from tests.report.runs import HOSTILE, TOKENIZER
from tests.tree.histories import random_rollout

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(NUMBERS, max_size=8))
def test_an_axis_holds_its_values_and_ticks(values: list[float]) -> None:
    axis = value_axis(values, 100.0, 0.0)
    assert all(axis.low <= v <= axis.high for v in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(-1e-6 <= axis(t) <= 100 + 1e-6 for t in ticks)


@given(st.lists(st.floats(0, 1e6), max_size=8))
def test_a_logarithmic_axis_takes_zeros(values: list[float]) -> None:
    axis = value_axis(values, 100.0, 0.0, log=True)
    assert all(0 <= axis(v) <= 100 for v in values)
    assert all(math.log10(t) == pytest.approx(round(math.log10(t))) for t in axis.ticks())


def test_ticks_are_round_and_steps_are_whole() -> None:
    assert round_ticks(0, 1) == [0, 0.5, 1] or len(round_ticks(0, 1)) == 6
    assert round_ticks(1, 3, whole=True) == [1, 2, 3]
    assert round_ticks(1, 1, whole=True) == [1]
    assert Axis(1, 1, 0, 10)(1) == 5
    assert [shown(v) for v in (None, 0.0, 1234567.0, 0.12345, 1234.5, 2e-5)] == [
        "–", "0", "1,234,567", "0.123", "1,234.5", "2e-05",
    ]  # fmt: skip


@given(st.text(st.characters(), max_size=30))
def test_any_text_is_well_formed_in_elements_and_attributes(text: str) -> None:
    parsed = ET.fromstring(el("p", text, title=text))
    assert (parsed.text or "") == visible(text)
    assert len(parsed) == 0


def test_children_that_are_markup_stay_markup() -> None:
    assert el("p", el("b", "<"), ["&", None, 3]) == "<p><b>&lt;</b>&amp;3</p>"
    assert el("rect", class_="a", stroke_width=1.25) == '<rect class="a" stroke-width="1.2"></rect>'
    assert cut("abcdef", 6) == "abcdef"
    assert cut("a" * 10 + "b" * 10, 4) == "aa\n[... 16 characters left out ...]\nbb"


def test_a_drawing_holds_every_segment_once_at_its_depth() -> None:
    for seed in range(30):
        calls = random_rollout(seed)
        seen = view(calls, {})
        added = [s for own in seen.added for s in own]
        assert sorted(added) == list(range(1, len(seen.tree.segments)))
        svg = ET.fromstring(draw_tree(seen)).find("svg")
        assert svg is not None
        bars = [r for r in svg.findall("rect")]
        assert len(bars) == len(added)
        x = DepthScale([seen.tree.segments[s].end_depth for s in added])
        for bar, index in zip(bars, added, strict=True):
            segment = seen.tree.segments[index]
            assert float(bar.get("x", "nan")) == pytest.approx(x(segment.depth) + 0.5, abs=0.06)
        labels = [t.text or "" for t in svg.findall("text") if t.get("class") == "ink"]
        assert len(labels) == len(calls)
        for number, label in enumerate(labels):
            assert label.endswith(seen.verdict(number))


def test_depth_grows_and_short_answers_stay_visible() -> None:
    x = DepthScale([20_000, 20_020, 20_500])
    assert 0 < x(0) < x(20_000) < x(20_020) < x(20_500) <= 720
    assert x(20_020) - x(20_000) >= 8


def test_environment_text_is_what_no_earlier_call_brought() -> None:
    for seed in range(20):
        seen = view(random_rollout(seed), {})
        new = sum(len(seen.environment_ids(i)) for i in range(len(seen.tree.calls)))
        sampled = sum(c.completion_tok for c in seen.tree.calls)
        assert new + sampled == seen.tree.total_tok


def completion_of(ids: np.ndarray) -> Completion:
    n = len(ids)
    logprobs = -np.arange(n, dtype=np.float32)
    return Completion(ids, logprobs, logprobs, np.full(n, 3, np.uint32), Finish.STOP)


@pytest.mark.parametrize("text", ["", "naïve ✓ 日本 🎉", HOSTILE, "plain", "\ufffd"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    codec = ChatCodec.from_folder(TOKENIZER)
    ids = codec.encode_text(text)
    found = pieces(codec, completion_of(ids))
    assert "".join(p.text for p in found) == codec.decode(ids) == text
    assert sum(p.logprob for p in found) == pytest.approx(-sum(range(len(ids))))


def test_shading_follows_the_probability() -> None:
    levels = [Piece("", math.log(p), 1).level for p in (1.0, 0.95, 0.6, 0.2, 0.05, 0.001)]
    assert levels == [0, 0, 1, 2, 3, 4]


def test_the_interval_of_a_change_is_newcombes() -> None:
    """The example of R. G. Newcombe (1998): 56/70 against 48/80, 0.0524 to 0.3339."""
    a, b = ((n / of, *wilson(n, of)) for n, of in ((48, 80), (56, 70)))
    before, after = (dict(zip(("full", "low", "high"), s, strict=True)) for s in (a, b))
    assert newcombe(before, after) == pytest.approx((0.0524, 0.3339), abs=1e-4)
