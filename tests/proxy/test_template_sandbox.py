"""The short way to the fields of messages against Jinja's own sandbox."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_jax.proxy.template_form import compile_template

NAMES = ("role", "content", "items", "keys", "get", "format", "startswith", "strip", "__class__")
values: st.SearchStrategy[Any] = st.recursive(
    st.text(max_size=5) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)
FORMS = (
    "{{ v.NAME }}",
    "{{ v.NAME is defined }}",
    "{{ v.NAME.role is defined }}",
    "{% if v.NAME %}yes{% endif %}",
    "{{ v.NAME('a') }}",
    "{{ v['NAME'] }}",
)


def rendered(template: jinja2.Template, value: Any) -> str:
    """What comes out, or the kind of error."""
    try:
        return template.render(v=value)
    except Exception as error:
        return type(error).__name__


@given(values, st.sampled_from(FORMS), st.sampled_from(NAMES))
def test_attributes_are_those_of_jinja(value: Any, form: str, name: str) -> None:
    source = form.replace("NAME", name)
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    ours, theirs = rendered(compile_template(source), value), rendered(plain, value)
    assert ours.split(" at 0x")[0] == theirs.split(" at 0x")[0]  # addresses of bound methods


@pytest.mark.parametrize(
    "source",
    [
        "{{ v.content.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ v.__init__.__globals__ }}",
        "{{ v.update({'a': 1}) }}",
        "{{ v.items.append(1) }}",
        "{{ '{0.__class__}'.format(v) }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    value = {"content": "text", "items": [1]}
    before = repr(value)
    out = rendered(compile_template(source), value)
    assert out == "SecurityError" or "class" not in out
    assert repr(value) == before
