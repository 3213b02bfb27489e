"""The shipped base model: files, tokenizer properties, chat template and measured skills.

Skills have floors a little below what the model card reports, on the same fixed seeds: a
change of the model code or of the weights that costs a skill fails here.
"""

import functools
import json
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import jinja2.sandbox
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import clawgym_jax
from clawgym_jax.core import names
from clawgym_jax.model import config as model_config
from clawgym_jax.model import hf_weights
from experiments.base_model import skills, training
from experiments.base_model import tokenizer as tokenizer_recipe

FOLDER = pathlib.Path(clawgym_jax.__file__).parent / "data" / "tiny_base"
FLOORS = {
    "copy_32": 0.99,
    "copy_128": 0.98,
    "copy_220": 0.68,
    "lookup": 0.98,
    "path": 0.94,
    "ends": 0.98,
    "count": 0.93,
    "escape": 0.92,
    "shell": 0.97,
    "json": 0.94,
    "csv": 0.74,
    "answer": 0.88,
    "episode": 0.83,
}


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def _ids(text: str) -> list[int]:
    ids: list[int] = _tokenizer().encode(text).ids
    return ids


def test_weights_and_configuration_are_the_tiny_preset() -> None:
    config, _, params = hf_weights.read(FOLDER)
    assert config == model_config.TINY.replace(
        dtype=jnp.dtype("float32"), param_dtype=jnp.dtype("float32")
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 577_600
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10 << 20


def test_tokenizer_is_the_recipes(tmp_path: pathlib.Path) -> None:
    tokenizer_recipe.save(tokenizer_recipe.build(), tmp_path, 1024)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / file).read_bytes(), file


@given(text=st.text(max_size=60))
def test_any_text_round_trips(text: str) -> None:
    assert _tokenizer().decode(_ids(text), skip_special_tokens=False) == text


BEFORE = ("", " ", "/", '"', "=", "\n", ": ", ', "', '": "', "\\n", "in/", "> ", ",", "\t", "(")
AFTER = ("", " ", "/", '"', "=", "\n", ".txt", ".csv", ".", ",", "\\n", " > out/", '"}', "|")


@given(
    seed=st.integers(0, 2**32),
    split=st.sampled_from(["pretrain", "cold", "train", "heldout"]),
    before=st.sampled_from(BEFORE),
    after=st.sampled_from(AFTER),
)
def test_a_name_has_the_same_two_tokens_anywhere(
    seed: int, split: names.Split, before: str, after: str
) -> None:
    name = names.draw_name(random.Random(seed), split)
    assert len(_ids(name)) == 2
    assert _ids(before + name + after) == _ids(before) + _ids(name) + _ids(after)


@pytest.mark.parametrize(
    "token", [*tokenizer_recipe.SPECIAL_TOKENS, *tokenizer_recipe.ADDED_TOKENS]
)
def test_added_tokens_are_single_ids(token: str) -> None:
    assert len(_ids(token)) == 1 and len(_ids(f"a{token}\n")) == 3


def _render(messages: list[dict[str, Any]], **options: Any) -> str:
    """Renders as transformers does: the same jinja settings, `tojson` as plain json.dumps."""
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    template = environment.from_string(config["chat_template"])
    return template.render(messages=messages, **options)


CALL = {"function": {"name": "read_file", "arguments": {"path": "in/banor.txt"}}}


def test_template_renders_a_conversation_with_tools() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done", "reasoning_content": "R"},
    ]
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "in/banor.txt"}}\n</tool_call>'
    assert _render(messages, tools=[{"name": "x"}], add_generation_prompt=True) == (
        '<|im_start|>system\nS\n\n# Tools\n<tools>\n{"name": "x"}\n</tools>\n'
        "Calls are written as <tool_call>\n"
        '{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nU<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\ndone<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_without_system_or_tools_adds_nothing() -> None:
    assert _render([{"role": "user", "content": "U"}]) == "<|im_start|>user\nU<|im_end|>\n"
    only_tools = _render([{"role": "user", "content": "U"}], tools=[{"name": "x"}])
    assert only_tools.startswith("<|im_start|>system\n# Tools\n")


def test_template_takes_arguments_as_text() -> None:
    call = {"name": "f", "arguments": '{"a":1}'}
    text = _render([{"role": "assistant", "content": "hi", "tool_calls": [call]}])
    assert text == (
        '<|im_start|>assistant\nhi\n<tool_call>\n{"name": "f", "arguments": {"a":1}}\n'
        "</tool_call><|im_end|>\n"
    )


def test_harness_texts_are_cheap() -> None:
    sentences = {
        "You are an agent that works with files in a workspace. Use the tools to do the task.": 20,
        "Write the value of banor in in/ketu to the note liso.": 21,
        "Write how many lines in/ketu has to the note liso.": 18,
        '{"path": "out/banor.txt", "content": "ketu\\nfima"}': 18,
    }
    for text, most in sentences.items():
        assert len(_ids(text)) <= most, text


def test_skills_are_above_their_floors() -> None:
    _, graphdef, params = hf_weights.read(FOLDER)
    predict = training.make_predict(graphdef)
    wanted = tuple(skill for skill in skills.SKILLS if skill.name in FLOORS)
    found = skills.measure(lambda tokens: predict(params, tokens), _tokenizer(), 64, wanted)
    below = {name: rate for name, rate in found.items() if rate < FLOORS[name]}
    assert not below, f"expected at least {FLOORS}, got {below}"
