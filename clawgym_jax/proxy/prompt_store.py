"""The prompts of one episode, each stretch of tokens that they share held once.

A radix tree over token ids. Prompts of an agent repeat their history again and again: 200 calls of
64K tokens would take 50 MB as arrays of their own.
Not here: who sampled what (tree.PrefixTree), which tokens count as what (ledger.py).
Invariant: `get` returns exactly what was added, and `add` returns the longest prefix in common
with any prompt that is in the store (its slow twin: ledger.longest_shared).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clawgym_jax.core.ids import common_prefix


@dataclass(slots=True, eq=False)
class _Node:
    tokens: np.ndarray  # i32[n], n > 0 but for the root
    parent: _Node | None
    prompts: int = 0  # how many prompts run through here
    children: dict[int, _Node] = field(default_factory=dict)  # by first token


class PromptStore:
    """Prompts by number."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int32), None)
        self._ends: dict[int, _Node] = {}

    def add(self, number: int, ids: np.ndarray) -> int:
        """Stores i32[P] under a new number; returns how many of its first tokens were there."""
        node, position = self._root, 0
        while position < ids.size:
            child = node.children.get(int(ids[position]))
            if child is None:
                break
            common = common_prefix(child.tokens, ids[position : position + child.tokens.size])
            position += common
            node = child if common == child.tokens.size else _split(child, common)
        shared = position
        if position < ids.size:
            tail = _Node(ids[position:].copy(), node)  # a view would keep the whole prompt alive
            node.children[int(ids[position])] = tail
            node = tail
        self._ends[number] = node
        for step in _upwards(node):
            step.prompts += 1
        return shared

    def get(self, number: int) -> np.ndarray:
        """i32[P]"""
        parts = [node.tokens for node in _upwards(self._ends[number])]
        return np.concatenate(parts[::-1])

    def remove(self, number: int) -> None:
        """Forgets a prompt and what only it held."""
        for node in _upwards(self._ends.pop(number)):
            node.prompts -= 1
            if not node.prompts and node.parent is not None:
                del node.parent.children[int(node.tokens[0])]

    @property
    def held_tok(self) -> int:
        """Tokens in memory."""
        total, open_nodes = 0, [self._root]
        while open_nodes:
            node = open_nodes.pop()
            total += int(node.tokens.size)
            open_nodes += node.children.values()
        return total


def _split(node: _Node, at: int) -> _Node:
    """Cuts a node after `at` tokens; returns the upper part."""
    assert node.parent is not None
    upper = _Node(node.tokens[:at].copy(), node.parent, node.prompts)
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens, node.parent = node.tokens[at:].copy(), upper
    upper.children[int(node.tokens[0])] = node
    return upper


def _upwards(node: _Node) -> list[_Node]:
    path: list[_Node] = []
    at: _Node | None = node
    while at is not None:
        path.append(at)
        at = at.parent
    return path
