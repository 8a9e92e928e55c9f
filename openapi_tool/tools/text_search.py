"""Search in a stored text for a phrase, or for the passages that fit a question best (tool-design section 3).

Lengths are in characters. Imports pure code only: searches run in a worker process.
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
from openapi_tool.tools.text_folding import MAX_FOLDED_FROM, Folded, folded

MAX_SHOWN = 8
"""Passages in a result."""

_PASSAGE_CHARS = 600
_BEFORE_CHARS, _AFTER_CHARS = 120, 400  # maximum of a passage before its match, and from the match's start on
_MIN_DISTANCE_CHARS = 240  # a match nearer to the one before is not counted, as that one's passage shows it
_SLICE_CHARS = 32 * 1024
# Combining marks, which \w does not match, and scripts that put no blanks between words.
_MARKS = "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0dff"
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]++|(?:[^\W_{_UNSPACED}]|[{_MARKS}])++")
_IS_UNSPACED = re.compile(rf"[{_UNSPACED}]")
_MAX_TERMS = 64
_MIN_SCORE_SHARE = 0.25  # of the best score; passages below it contain only frequent words of the question
_K1, _B = 1.2, 0.75  # the usual parameters of BM25
_PREFIX_CHARS = 3
"""Words with a common stem begin alike; only these are stemmed."""
_MAX_STEMMED = 5_000
"""Different words of a text that are stemmed, at up to 100 µs each."""
_MAX_SEEN, _MAX_WORD_CHARS = 100_000, 60
"""Different words of a text that are looked at, and the longest that is stemmed."""
_MAX_COUNT = 255  # of a term in a passage; higher counts hardly change a score


class SearchRequest(NamedTuple):
    """Search in a stored text for a phrase or question; `name` is `find` or `question`."""

    name: str
    text: str


class Span(NamedTuple):
    """Passage: at most `chars` characters from `at` on, and `before` before it."""

    at: int
    chars: int
    before: int = 0


class Phrase:
    """Search for a phrase. Matches from `start` on are preferred to those before it.

    `before` and `after` count both; matches near each other count once.
    """

    def __init__(self, phrase: str, start: int) -> None:
        self._phrase = " ".join(folded(phrase).split())
        self._overlap = MAX_FOLDED_FROM * len(self._phrase)  # a match may begin in one slice and end in the next
        self._start = start
        self._min_next = 0
        self._found_before: list[int] = []
        self._found_after: list[int] = []
        self.before = self.after = 0

    def scan(self, text: str, start: int, end: int) -> None:
        """Search an item of a stored text, from `start` to `end`."""
        self._min_next = start  # a match counts again if the one before is in another item
        for begin in range(start, end, _SLICE_CHARS):  # slices bound the memory for the folded text
            part = Folded(text[begin : min(end, begin + _SLICE_CHARS + self._overlap)])
            # `_min_next` skips matches in the overlap that were found in the slice before.
            for found in self._matches(part, max(0, self._min_next - begin)):
                self._add(begin + found)

    def _matches(self, part: Folded, start: int) -> Iterator[int]:
        at = part.place(start)
        while self._phrase and (at := part.text.find(self._phrase, at)) >= 0:
            origin = part.origin(at)
            if origin >= start:
                yield origin
                start = origin + _MIN_DISTANCE_CHARS
            at = max(at + 1, part.place(start))

    def _add(self, at: int) -> None:
        self._min_next = at + _MIN_DISTANCE_CHARS
        if at >= self._start:
            self.after, found = self.after + 1, self._found_after
        else:
            self.before, found = self.before + 1, self._found_before
        if len(found) <= MAX_SHOWN:
            found.append(at)

    def spans(self) -> list[Span]:
        """Return the first passages, one more than can be shown, in the order of the text."""
        found = self._found_after or self._found_before
        nexts = [*found[1:], math.inf]
        return [
            Span(at, int(min(_AFTER_CHARS, following - at)), _BEFORE_CHARS)
            for at, following in zip(found, nexts, strict=False)
        ]


class Question:
    """Search for the passages that fit a question best by BM25; `sample` is the beginning of the text."""

    def __init__(self, question: str, sample: str = "") -> None:
        unique = list(dict.fromkeys(terms(question)))[:_MAX_TERMS]
        self._unspaced = [term for term in unique if _IS_UNSPACED.match(term)]
        words = [term for term in unique if not _IS_UNSPACED.match(term)]
        self._stem = stem_of(f"{question}\n{sample}")
        self._word_count = len(words)
        self._place_of: dict[str, int] = {}  # place among `words` of each form of one that is known so far
        for place, word in enumerate(words):
            for form in (word, self._stem(word[:_MAX_WORD_CHARS])):
                self._place_of.setdefault(form, place)
        self._prefixes = frozenset(form[:_PREFIX_CHARS] for form in self._place_of)
        self._seen = set(self._place_of)
        self._left_to_stem = _MAX_STEMMED
        # Passages with a term: position, length, and the count of each term in one byte. As tuples of terms and counts
        # those of a page of 10 MB took 80 MB.
        self._found: list[tuple[int, int, bytes]] = []
        self._passages_with = [0] * len(unique)
        self._passages = self._total_chars = 0

    def scan(self, text: str, start: int, end: int) -> None:
        """See `Phrase`."""
        while start < end:
            size = boundary(text[start : min(end, start + _PASSAGE_CHARS + 1)], _PASSAGE_CHARS)
            self._count(text[start : start + size], start)
            start += size

    def _count(self, passage: str, at: int) -> None:
        text = folded(passage)
        counts = [text.count(term) for term in self._unspaced]
        of_words = [0] * self._word_count
        if any(map(text.__contains__, self._prefixes)):
            found = Counter(_WORD.findall(text))
            if new := found.keys() - self._seen:
                self._learn(new)
            for word in found.keys() & self._place_of.keys():
                of_words[self._place_of[word]] += found[word]
        counts += of_words
        self._passages += 1
        self._total_chars += len(passage)
        if any(counts):
            for place, count in enumerate(counts):
                self._passages_with[place] += count > 0
            self._found.append((at, len(passage), bytes(min(count, _MAX_COUNT) for count in counts)))

    def _learn(self, words: AbstractSet[str]) -> None:
        """Find out which of the text's words have the stem of one of the question."""
        if len(self._seen) > _MAX_SEEN:
            return
        self._seen |= words
        alike = [word for word in words if word[:_PREFIX_CHARS] in self._prefixes and len(word) <= _MAX_WORD_CHARS]
        for word in alike[: self._left_to_stem]:
            if (place := self._place_of.get(self._stem(word))) is not None:
                self._place_of[word] = place
        self._left_to_stem -= min(len(alike), self._left_to_stem)

    def spans(self) -> list[Span]:
        """Return the passages, best first; those of equal score in the order of the text."""
        idf = list(map(self._idf, self._passages_with))
        best: list[tuple[float, int, int]] = []  # heap of score, minus position, length
        for at, chars, counts in self._found:
            norm = _K1 * (1 - _B + _B * chars * self._passages / self._total_chars)
            score = sum(idf[term] * count * (_K1 + 1) / (count + norm) for term, count in enumerate(counts) if count)
            heapq.heappush(best, (score, -at, chars))
            if len(best) > MAX_SHOWN:
                heapq.heappop(best)
        best.sort(reverse=True)
        return [Span(-at, chars) for score, at, chars in best if score >= _MIN_SCORE_SHARE * best[0][0]]

    def _idf(self, having: int) -> float:
        return math.log(1 + (self._passages - having + 0.5) / (having + 0.5))


Search = Phrase | Question


def terms(text: str) -> Iterator[str]:
    """Yield the words of a text, folded.

    In scripts without blanks between words, yield pairs of adjacent letters, or a letter that stands alone.
    """
    for word in _WORD.findall(folded(text)):
        if not _IS_UNSPACED.match(word) or len(word) == 1:
            yield word
        else:
            yield from map("".join, pairwise(word))
