"""HTML and SVG from Python calls, escaped unless it was built here.

What a page shows was written by a model: it may hold tags, control characters and marks that turn
the reading direction. `visible` makes such characters seen instead of obeyed, here and in the
terminal. Not here: what the page says.
Invariant: a plain `str` never becomes markup; what `el` returns is well-formed XML and HTML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_VOID = ("meta",)
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class Html(str):
    """Markup, safe to put into a page as it is."""

    __slots__ = ()


Child = str | int | float | None
Children: TypeAlias = "Child | Iterable[Children]"


def visible(text: str) -> str:
    """Control characters, direction marks and lone surrogates as something to look at."""
    return _CONTROL.sub(_picture, text)


def el(name: str, /, *children: Children, **attributes: Child) -> Html:
    """An element. Attribute names: `class_` is class, other underscores are hyphens."""
    attrs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(number(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attrs}/>")
    return Html(f"<{name}{attrs}>{join(*children)}</{name}>")


def join(*children: Children) -> Html:
    """Children one after the other, plain text escaped, None left out."""
    out: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            out.append(child)
        elif isinstance(child, (str, int, float)):
            out.append(html.escape(visible(number(child)), quote=False))
        else:
            out.append(join(*child))
    return Html("".join(out))


def number(value: Child) -> str:
    """Floats (coordinates) with at most one decimal, so that a page is the same everywhere."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


def table(
    head: Sequence[Child],
    rows: Iterable[Sequence[Child]],
    caption: str | None = None,
    label: str | None = None,
) -> Html:
    """A table whose first column names the row. label: its name where it has no caption."""
    top = el("tr", (el("th", cell, scope="col") for cell in head))
    body = (
        el("tr", el("th", row[0], scope="row"), (el("td", cell) for cell in row[1:]))
        for row in rows
    )
    shown = el(
        "table",
        el("caption", caption) if caption else None,
        el("thead", top),
        el("tbody", body),
    )
    return el("div", shown, class_="scroll", tabindex=0, role="region", aria_label=caption or label)


def fold(summary: str, *children: Child) -> Html:
    """Something to open."""
    return el("details", el("summary", summary), *children)


def missing(text: str) -> Html:
    """What is not there, and why that may be."""
    return el("p", text, class_="missing")


def cut(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end, and how much is left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def short(text: str, limit: int) -> str:
    """One line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
