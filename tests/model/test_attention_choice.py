"""The names of the attentions, and that each is the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clawgym_jax.model import attention_choice
from clawgym_jax.model.attention import dense_tree_attention
from clawgym_jax.model.tree_attention import tree_attention
from clawgym_jax.model.tree_attention_tpu import Tiling
from tests.model import forests


@pytest.mark.parametrize("name", [n for n in attention_choice.NAMES if n != "pallas"])
def test_every_name_is_the_same_function(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 40, h, 32)), jnp.float32) for h in (4, 2, 2))
    end = jnp.asarray(forests.end_of(forests.grow(rng, 40, 4, 0.1))[None])
    attend = attention_choice.choose_attention(name, Tiling(16, 16))
    got, expected = (jax.jit(f)(q, k, v, end) for f in (attend, dense_tree_attention))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_default_is_blocked_where_there_is_no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_choice.choose_attention(attention_choice.AUTO) is tree_attention
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    chosen = attention_choice.choose_attention(attention_choice.AUTO)
    kernel = attention_choice.choose_attention("pallas")
    assert (chosen.func, chosen.keywords) == (kernel.func, kernel.keywords)  # type: ignore[attr-defined]
    assert not chosen.keywords["interpret"]  # type: ignore[attr-defined]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of auto, dense, blocked"):
        attention_choice.choose_attention("flash")
