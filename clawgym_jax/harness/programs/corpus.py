"""Search and fetch over a folder of texts: ranked passages in, pages of a document out.

Lies beside the programs that use it in the sandbox; standard library only. Texts are cut into
passages of a few paragraphs and ranked by BM25 (k1 1.2, b 0.75); no stemming, no embeddings.
Invariant: the same folder and query give the same answer, and no file outside the folder is read.
Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), for the formula.
"""

from __future__ import annotations

import math
import os
import re

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator

K1, B = 1.2, 0.75
PASSAGE = 1200  # characters, about; a passage ends at the end of a line
PAGE = 6000  # characters of a document that one fetch returns
SNIPPET = 300
SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".csv", ".tsv", ".json", ".html", ".htm", ".xml")
WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Corpus:
    """The texts below one folder; indexed when first searched."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self._passages: list[tuple[str, int, int, int]] = []  # name, start, end, words
        self._postings: dict[str, list[tuple[int, int]]] = {}  # word -> (passage, occurrences)
        self._mean_words = 0.0

    def names(self) -> Iterator[str]:
        """Paths of the texts, relative to the folder, in a fixed order."""
        for folder, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                path = os.path.join(folder, name)
                if name.lower().endswith(SUFFIXES) and self._inside(path):
                    yield os.path.relpath(path, self.folder)

    def search(self, query: str, limit: int = 5) -> str:
        """The best passages: where they are and how they begin."""
        if not self._passages:
            self._index()
        scores = self._scores(query)
        best = sorted(scores, key=lambda passage: (-scores[passage], passage))[: max(1, limit)]
        if not best:
            return f"nothing found for {query!r}"
        found = []
        for rank, passage in enumerate(best, 1):
            name, start, end, _ = self._passages[passage]
            text = " ".join(self._read(name)[start:end].split())
            shown = text if len(text) <= SNIPPET else text[:SNIPPET] + "..."
            found.append(f"{rank}. {name} (offset {start})\n{shown}")
        return "\n\n".join(found)

    def fetch(self, name: str, offset: int = 0) -> str:
        """A page of a document; says where the next one begins."""
        path = os.path.join(self.folder, name)
        if not self._inside(path) or not os.path.isfile(path):
            raise OSError(f"no document {name}; search names the documents")
        text = self._read(name)
        start = min(max(0, offset), len(text))
        end = min(len(text), start + PAGE)
        note = f"\n[characters {start}-{end} of {len(text)}; go on with offset={end}]"
        return text[start:end] + (note if end < len(text) else "")

    def _scores(self, query: str) -> dict[int, float]:
        scores: dict[int, float] = {}
        for word in sorted(set(words(query))):
            postings = self._postings.get(word, ())
            count = len(postings)
            weight = math.log(1 + (len(self._passages) - count + 0.5) / (count + 0.5))
            for passage, occurrences in postings:
                length = self._passages[passage][3] / self._mean_words
                damped = occurrences + K1 * (1 - B + B * length)
                gain = weight * occurrences * (K1 + 1) / damped
                scores[passage] = scores.get(passage, 0.0) + gain
        return scores

    def _index(self) -> None:
        total = 0
        for name in self.names():
            for start, end, text in passages(self._read(name)):
                found = words(name) + words(text)
                for word in found:
                    postings = self._postings.setdefault(word, [])
                    if postings and postings[-1][0] == len(self._passages):
                        postings[-1] = (postings[-1][0], postings[-1][1] + 1)
                    else:
                        postings.append((len(self._passages), 1))
                self._passages.append((name, start, end, len(found)))
                total += len(found)
        self._mean_words = total / max(1, len(self._passages)) or 1.0

    def _inside(self, path: str) -> bool:
        return os.path.realpath(path).startswith(self.folder + os.sep)

    def _read(self, name: str) -> str:
        with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()


def passages(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) of stretches of whole lines, PASSAGE characters or a little more."""
    start = end = 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        if end - start >= PASSAGE:
            yield start, end, text[start:end]
            start = end
    if text[start:end].strip():
        yield start, end, text[start:end]
