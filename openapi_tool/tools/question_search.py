"""Search for the passages of a stored text that fit a question best.

Passages are ranked by BM25, the usual formula of search engines: a passage scores for each *term* of the question that
it contains; more for a term that few passages contain, and less if the passage is long. A term is a word, or two
adjacent letters in scripts that put no blanks between words. Words are compared by their stems (`stems.py`).

Lengths and positions are in characters. Imports pure code only: searches run in a worker process.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import NamedTuple

from openapi_tool.tools.boundaries import boundary
from openapi_tool.tools.stems import stem_of
from openapi_tool.tools.text_folding import folded
from openapi_tool.tools.text_search import MAX_SHOWN, Span

_PASSAGE_CHARS = 600

# Combining marks, which \w does not match, and scripts that put no blanks between words.
_MARKS = "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0dff"
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
# A run of letters of unspaced scripts, or a word of any other: letters, digits and marks.
_WORD = re.compile(rf"[{_UNSPACED}]++|(?:[^\W_{_UNSPACED}]|[{_MARKS}])++")
_IS_UNSPACED = re.compile(rf"[{_UNSPACED}]")

_MAX_TERMS = 64
_MAX_COUNT = 255  # of a term in a passage; higher counts hardly change a score
_MIN_SCORE_SHARE = 0.25  # of the best score; passages below it contain only frequent words of the question
_K1, _B = 1.2, 0.75  # the usual parameters of BM25

_PREFIX_CHARS = 3
"""Words with a common stem begin alike; only these are stemmed."""
_MAX_STEMMED = 5_000
"""Different words of a text that are stemmed, at up to 100 µs each."""
_MAX_SEEN, _MAX_WORD_CHARS = 100_000, 60
"""Different words of a text that are looked at, and the longest that is stemmed."""


class _Counted(NamedTuple):
    """Passage that contains a term.

    `counts` has the count of each term in one byte. As tuples of terms and counts those of a page of 10 MB took 80 MB.
    """

    start: int
    chars: int
    counts: bytes


class Question:
    """Search for the passages that fit a question best.

    `sample` is the beginning of the text, which tells its language, and so how words are stemmed.
    """

    def __init__(self, question: str, sample: str = "") -> None:
        unique = list(dict.fromkeys(terms(question)))[:_MAX_TERMS]
        # The counts of a passage have these two kinds of terms in this order.
        self._unspaced_terms = [term for term in unique if _IS_UNSPACED.match(term)]
        words = [term for term in unique if not _IS_UNSPACED.match(term)]
        self._word_count = len(words)

        self._stem = stem_of(f"{question}\n{sample}")
        # The index among `words` of each form of a word that is known so far: at first of the words and their stems,
        # later also of the text's words with these stems.
        self._word_index: dict[str, int] = {}
        for index, word in enumerate(words):
            self._word_index.setdefault(word, index)
            self._word_index.setdefault(self._stem(word[:_MAX_WORD_CHARS]), index)
        self._prefixes = frozenset(form[:_PREFIX_CHARS] for form in self._word_index)
        self._seen = set(self._word_index)
        self._left_to_stem = _MAX_STEMMED

        self._found: list[_Counted] = []
        self._passages_with = [0] * len(unique)  # number of passages, by term
        self._passages = self._total_chars = 0

    def scan(self, text: str, start: int, end: int) -> None:
        """Search an item of a stored text, from `start` to `end`."""
        while start < end:
            passage_and_next = text[start : min(end, start + _PASSAGE_CHARS + 1)]
            passage = passage_and_next[: boundary(passage_and_next, _PASSAGE_CHARS)]
            self._add(passage, start)
            start += len(passage)

    def _add(self, passage: str, start: int) -> None:
        """Count the terms in a passage."""
        folded_passage = folded(passage)
        counts = [folded_passage.count(term) for term in self._unspaced_terms]
        counts += self._counts_of_words(folded_passage)
        self._passages += 1
        self._total_chars += len(passage)
        if any(counts):
            for index, count in enumerate(counts):
                self._passages_with[index] += count > 0
            limited = bytes(min(count, _MAX_COUNT) for count in counts)
            self._found.append(_Counted(start, len(passage), limited))

    def _counts_of_words(self, folded_passage: str) -> list[int]:
        counts = [0] * self._word_count
        if not any(map(folded_passage.__contains__, self._prefixes)):
            return counts  # most passages: saves the time to find their words
        words = Counter(_WORD.findall(folded_passage))
        new_words = words.keys() - self._seen
        if new_words:
            self._learn(new_words)
        for word in words.keys() & self._word_index.keys():
            counts[self._word_index[word]] += words[word]
        return counts

    def _learn(self, words: AbstractSet[str]) -> None:
        """Find out which of the text's words have the stem of one of the question."""
        if len(self._seen) > _MAX_SEEN:
            return
        self._seen |= words
        alike = [word for word in words if word[:_PREFIX_CHARS] in self._prefixes and len(word) <= _MAX_WORD_CHARS]
        for word in alike[: self._left_to_stem]:
            index = self._word_index.get(self._stem(word))
            if index is not None:
                self._word_index[word] = index
        self._left_to_stem -= min(len(alike), self._left_to_stem)

    def spans(self) -> list[Span]:
        """Return the passages, best first; those of equal score in the order of the text."""
        best = heapq.nlargest(MAX_SHOWN, self._scored())
        if not best:
            return []
        best_score, _, _ = best[0]
        return [Span(-at, chars) for score, at, chars in best if score >= _MIN_SCORE_SHARE * best_score]

    def _scored(self) -> Iterator[tuple[float, int, int]]:
        """Yield score, minus position, and length of each passage with a term.

        The position is negated so that of passages with equal scores the first one is the largest.
        """
        rarities = [self._rarity(passages) for passages in self._passages_with]
        for passage in self._found:
            norm = _K1 * (1 - _B + _B * passage.chars * self._passages / self._total_chars)
            score = sum(
                rarity * count * (_K1 + 1) / (count + norm)
                for rarity, count in zip(rarities, passage.counts, strict=True)
                if count
            )
            yield score, -passage.start, passage.chars

    def _rarity(self, passages_with: int) -> float:
        """Return the weight of a term that so many passages contain: its inverse document frequency."""
        return math.log(1 + (self._passages - passages_with + 0.5) / (passages_with + 0.5))


def terms(text: str) -> Iterator[str]:
    """Yield the terms of a text, folded: its words.

    In scripts without blanks between words, yield pairs of adjacent letters, or a letter that stands alone.
    """
    for word in _WORD.findall(folded(text)):
        if not _IS_UNSPACED.match(word) or len(word) == 1:
            yield word
        else:
            yield from map("".join, pairwise(word))
