"""Which pages of the cache pool hold the keys and values of which tokens: a radix tree of pages.

Slots keep what they computed until they are needed for something else; then it moves here, so that
a finished turn serves the next one, and siblings and other episodes share a system prompt. A node
is a page of tokens below its parent's; a prompt may use the first part of a page, so prefixes are
found token by token. The least recently used leaf makes room; the budget is the pool's size.
Not here: arrays (`engine`), slots (`slots`). Single-threaded.
Invariant: an entry dies with its weight version, and a page is in one place of the tree or free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.core.ids import common_prefix


@dataclass(slots=True, eq=False)
class _Node:
    page: int
    tokens: np.ndarray  # i32[n], n <= page_tok; less only in leaves
    parent: _Node | None
    children: dict[int, list[_Node]] = field(default_factory=dict)  # by first token


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix of a prompt."""

    prefix_tok: int
    pages: tuple[int, ...]  # the last one may be used in part


@dataclass(frozen=True, slots=True)
class Keep:
    """Where to put what is not in the pool yet: page after page from `first_page` on."""

    first_page: int  # number of the first page to copy, counted from the sequence's start
    pages: tuple[int, ...]


class PrefixCache:
    """Tokens to pages."""

    def __init__(self, pages: int, page_tok: int) -> None:
        self.page_tok = page_tok
        self._root = _Node(-1, np.zeros(0, np.int32), None)
        self._free = list(range(pages))
        # Oldest first. A path is touched from its end to its start, so that the oldest is a leaf.
        self._by_age: OrderedDict[int, _Node] = OrderedDict()
        self.pages = pages
        self.evicted = 0

    @property
    def used_pages(self) -> int:
        return self.pages - len(self._free)

    def find(self, prompt: np.ndarray) -> Hit:
        """The pages that hold the longest known prefix of i32[P]."""
        node, at, pages = self._root, 0, []
        while at < prompt.size:
            child, common = _closest(node, prompt[at : at + self.page_tok])
            if child is None or not common:
                break
            pages.append(child.page)
            at += common
            node = child
            if common < self.page_tok:
                break
        self._touch(node)
        return Hit(at, tuple(pages))

    def keep(self, tokens: np.ndarray, spare: Collection[int] = ()) -> Keep:
        """Makes entries for i32[n]; says which pages the caller has to fill, right now.

        Where the pool is too small for all of it, its beginning is kept. spare: pages that are
        about to be read and must not be taken.
        """
        node, at = self._root, 0
        while at < tokens.size:
            child, common = _closest(node, tokens[at : at + self.page_tok])
            if child is None or common < self.page_tok:
                break
            node, at = child, at + common
        self._touch(node)
        rest, first = tokens[at:], at // self.page_tok
        known = _closest(node, rest[: self.page_tok])
        if known[0] is not None and known[1] == rest.size:
            return Keep(first, ())  # a page that is there already begins with all that is left
        pages: list[int] = []
        for start in range(0, rest.size, self.page_tok):
            page = self._take(node, spare)
            if page is None:
                break
            child = _Node(page, rest[start : start + self.page_tok].copy(), node)
            node.children.setdefault(int(child.tokens[0]), []).append(child)
            pages.append(page)
            node = child
            self._by_age[page] = child
        self._touch(node)
        return Keep(first, tuple(pages))

    def forget(self) -> None:
        """The weights changed: nothing cached is worth anything."""
        self._root.children.clear()
        self._by_age.clear()
        self._free = list(range(self.pages))

    def _take(self, holder: _Node, spare: Collection[int]) -> int | None:
        """A free page, if need be that of the oldest leaf; `holder`, just touched, stays."""
        if not self._free:
            _, oldest = next(iter(self._by_age.items()), (0, holder))
            if oldest is holder or oldest.children or oldest.page in spare:
                return None  # nothing but holder's own path, or what was just found, is left
            assert oldest.parent is not None
            siblings = oldest.parent.children[int(oldest.tokens[0])]
            siblings.remove(oldest)
            if not siblings:
                del oldest.parent.children[int(oldest.tokens[0])]
            del self._by_age[oldest.page]
            self._free.append(oldest.page)
            self.evicted += 1
        return self._free.pop()

    def _touch(self, node: _Node) -> None:
        """`node` and what it stands on were used."""
        at = node
        while at.parent is not None:
            self._by_age[at.page] = at
            self._by_age.move_to_end(at.page)
            at = at.parent


def _closest(node: _Node, tokens: np.ndarray) -> tuple[_Node | None, int]:
    """The child with the longest common beginning, and its length."""
    best: tuple[_Node | None, int] = (None, 0)
    for child in node.children.get(int(tokens[0]), ()) if tokens.size else ():
        common = common_prefix(child.tokens, tokens)
        if common > best[1]:
            best = (child, common)
    return best
