"""Names: splits are disjoint, stable and large, and no ordinary word is one."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.core import names


@given(seed=st.integers(0, 2**32), split=st.sampled_from(get_args(names.Split)))
def test_a_drawn_name_belongs_to_its_split(seed: int, split: names.Split) -> None:
    name = names.draw_name(random.Random(seed), split)
    assert names.name_split(name) == split
    assert names.NAME_PATTERN.fullmatch(name) and 4 <= len(name) <= 6
    assert name not in names.RESERVED


def test_the_rule_is_stable() -> None:
    """Shipped weights were trained on names chosen by this rule: it can never change."""
    expected = {"gisdu": "pretrain", "duno": "cold", "perdas": "train", "lusa": "heldout"}
    assert {name: names.name_split(name) for name in expected} == expected


@pytest.mark.parametrize("split", get_args(names.Split))
def test_every_split_has_thousands(split: names.Split) -> None:
    rng = random.Random(0)
    assert len({names.draw_name(rng, split) for _ in range(3000)}) > 2500


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        names.draw_name(random.Random(0), "test")  # type: ignore[arg-type]
