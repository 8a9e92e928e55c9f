"""Search for the places of a phrase in a stored text.

Text and phrase are compared in their folded form (`text_folding.py`), so that `naive` finds `Naïve`. Lengths and
positions are in characters of the original text, unless a name says `folded`. Imports pure code only: searches run in a
worker process.
"""

from __future__ import annotations

from collections.abc import Iterator

from openapi_tool.tools.text_folding import MAX_FOLDED_FROM, Folded, folded
from openapi_tool.tools.text_search import MAX_SHOWN, Span

_BEFORE_CHARS, _AFTER_CHARS = 120, 400  # maximum of a passage before its match, and from the match's start on
_MIN_DISTANCE_CHARS = 240  # a match nearer to the one before is not counted, as that one's passage shows it
_SLICE_CHARS = 32 * 1024  # folded at once, to limit the memory for the folded text


class Phrase:
    """Search for a phrase. Matches from `start` on are preferred to those before it.

    `before` and `after` count both; matches near each other count once.
    """

    def __init__(self, phrase: str, start: int) -> None:
        self._folded_phrase = " ".join(folded(phrase).split())
        self._overlap = MAX_FOLDED_FROM * len(self._folded_phrase)  # a match may begin in one slice and end in the next
        self._start = start
        self._min_next = 0  # where the next match that counts may begin
        # The first matches, one more than can be shown.
        self._matches_before: list[int] = []
        self._matches_after: list[int] = []
        self.before = self.after = 0

    def scan(self, text: str, start: int, end: int) -> None:
        """Search an item of a stored text, from `start` to `end`."""
        self._min_next = start  # a match counts again if the one before is in another item
        for slice_start in range(start, end, _SLICE_CHARS):
            slice_end = min(end, slice_start + _SLICE_CHARS + self._overlap)
            # Matches in the overlap that were found in the slice before are earlier than `_min_next`.
            min_start = max(0, self._min_next - slice_start)
            for match in self._matches(Folded(text[slice_start:slice_end]), min_start):
                self._add(slice_start + match)

    def _matches(self, text: Folded, min_start: int) -> Iterator[int]:
        """Yield where the phrase begins, from `min_start` on, and not too near to the match before."""
        if not self._folded_phrase:
            return
        folded_match = text.folded.find(self._folded_phrase, text.folded_position(min_start))
        while folded_match >= 0:
            match = text.original_position(folded_match)
            if match >= min_start:
                yield match
                min_start = match + _MIN_DISTANCE_CHARS
            search_from = max(folded_match + 1, text.folded_position(min_start))
            folded_match = text.folded.find(self._folded_phrase, search_from)

    def _add(self, match: int) -> None:
        self._min_next = match + _MIN_DISTANCE_CHARS
        if match >= self._start:
            self.after += 1
            matches = self._matches_after
        else:
            self.before += 1
            matches = self._matches_before
        if len(matches) <= MAX_SHOWN:
            matches.append(match)

    def spans(self) -> list[Span]:
        """Return the first passages, one more than can be shown, in the order of the text."""
        matches = self._matches_after or self._matches_before
        spans: list[Span] = []
        for number, match in enumerate(matches, start=1):
            chars = _AFTER_CHARS
            if number < len(matches):
                chars = min(chars, matches[number] - match)  # up to the next match
            spans.append(Span(match, chars, _BEFORE_CHARS))
        return spans
