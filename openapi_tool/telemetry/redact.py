"""No secret in any output: values in use in their common spellings, and whatever looks like a key of Jina's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import orjson

from openapi_tool.steps import Steps, at_once
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.spellings import REACH_CHARS, Spelling, spellings

MASK = "[redacted]"
MIN_SECRET_CHARS = 6
"""Shorter values are in too many innocent words to be masked; whoever sets one is warned at the start."""

_SLICE_CHARS = 64 * 1024
"""Looked through in one step: 0.1 ms where nothing is found, up to 10 ms where patterns have to run."""

# No name of a tool or a durable. The reader writes `jina\_…`, since `_` would be emphasis in markdown.
_JINA_KEY = Spelling(
    ("jina",),
    r"(?<![A-Za-z0-9])(?-i:jina)(?:\\{0,4}_|%5F|&#95;)[A-Za-z0-9]{20,200}(?:\\{0,4}[_-]|[A-Za-z0-9]){0,200}",
)
_JINA_KEY_REACH = 1_500
_SIGNS = "%\\&"  # with one of them each character begins that is escaped; few short texts hold any

Span = tuple[int, int]


class Redactor:
    """Replaces every known secret and every Jina-shaped key in texts, at any depth.

    Secrets of less than MIN_SECRET_CHARS are left alone. `where` is the label of the metric that counts what was
    masked.
    """

    def __init__(self, secrets: Iterable[str] = (), where: str = "log") -> None:
        self._secrets = frozenset(secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS)
        self._spellings = (_JINA_KEY, *(form for secret in sorted(self._secrets) for form in spellings(secret)))
        marks = [mark for form in self._spellings for mark in form.marks]
        self._marks = tuple(mark for mark in marks if mark[0] not in _SIGNS)
        self._escaped_marks = {sign: tuple(mark for mark in marks if mark[0] == sign) for sign in _SIGNS}
        self._has_unmarked = any(not form.marks for form in self._spellings)
        self._reach = max(
            [_JINA_KEY_REACH, *(REACH_CHARS * len(secret.encode("utf-8", "surrogatepass")) for secret in self._secrets)]
        )
        self._where = where

    def at(self, where: str) -> Redactor:
        """The same, counted under another label."""
        return _redactor(self._secrets, where)

    def text(self, text: str) -> str:
        """`text` without secrets."""
        return at_once(self.steps(text))

    def head(self, text: str, chars: int) -> str:
        """The first `chars` characters of `text` without secrets, those included that the cut would halve."""
        if len(text) <= chars:
            return self.text(text)
        found = self._found(text[: chars + self._reach])
        spans = [span for part in found for span in part if span[0] < chars]
        masked, done = self._piece(text, 0, spans)
        return masked + text[done:chars]

    def steps(self, text: str) -> Steps[str]:
        """`text` without secrets, looked through in steps of a few milliseconds."""
        pieces: list[str] = []
        done = 0
        for spans in self._found(text):
            if spans:
                piece, done = self._piece(text, done, spans)
                pieces.append(piece)
            yield
        return "".join([*pieces, text[done:]]) if pieces else text

    def finds_in(self, text: str) -> bool:
        """Whether `text` has anything to mask."""
        return any(self._found(text))

    def value(self, value: Any) -> Any:
        """A JSON-like value without secrets, keys included; what JSON has no form for becomes its text."""
        return value if isinstance(value, dict | list) and self._is_clean(value) else self._masked(value)

    def _found(self, text: str) -> Iterator[list[Span]]:
        """Where secrets stand, slice by slice; one that begins in a slice may end behind it."""
        if len(text) <= _SLICE_CHARS and not self._is_suspect(text):
            return
        for start in range(0, len(text), _SLICE_CHARS):
            end = start + _SLICE_CHARS
            yield [span for span in self._spans(text, start, end + self._reach) if span[0] < end]

    def _is_suspect(self, text: str) -> bool:
        """Whether a short text has a mark of any spelling."""
        for mark in self._marks:  # no `any`: its generator would take longer than the search
            if mark in text:
                return True
        escaped = (mark for sign, marks in self._escaped_marks.items() if sign in text for mark in marks)
        return self._has_unmarked or any(mark in text for mark in escaped)

    def _spans(self, text: str, start: int, end: int) -> Iterator[Span]:
        for spelling in self._spellings:
            if spelling.stands_in(text, start, end):
                yield from (match.span() for match in spelling.pattern.finditer(text, start, end))

    def _piece(self, text: str, done: int, spans: list[Span]) -> tuple[str, int]:
        """The text from `done` to the end of the last span, each of them masked, and where that is."""
        pieces = []
        for start, end in sorted(spans):
            if start >= done:
                pieces += [text[done:start], MASK]
            done = max(done, end)
        metrics.MASKED.labels(self._where).inc(len(pieces) // 2)
        return "".join(pieces), done

    def _is_clean(self, value: Any) -> bool:
        """Whether a value has nothing to mask anywhere; its JSON as one text is looked through much faster than it."""
        try:
            text = orjson.dumps(value).decode()
        except (TypeError, ValueError):
            return False
        return not self.finds_in(text)

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self._masked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._masked(item) for item in value]
        text = str(value)
        masked = self.text(text)
        return value if masked == text and (value is None or isinstance(value, int | float)) else masked


@lru_cache(maxsize=256)
def _redactor(secrets: frozenset[str], where: str) -> Redactor:
    return Redactor(secrets, where)


def of_call(secrets: Iterable[str]) -> Redactor:
    """The redactor for the answer of a call, which knows what was sent with it and nothing else.

    A page that lists candidates would learn another secret of the process from its gap. Redactors are kept, because to
    make one takes a millisecond.
    """
    return _redactor(frozenset(secrets), "answer")
