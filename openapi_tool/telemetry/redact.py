"""Redactor: masks known secrets in their common encodings, and anything that looks like a Jina API key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from openapi_tool.telemetry.secret_encodings import Encoding, encodings_of

MASK = "[redacted]"
MIN_SECRET_CHARS = 6
"""Shorter values occur in too many ordinary words to be masked."""

_COMMON_WORDS = frozenset({"postgres", "postgresql", "password", "secret", "kernel", "executor", "openapi-tool"})
"""Passwords of samples; masking these words in log messages would reveal them."""

# Matches `jina_` and at least 20 letters and digits: long enough not to match names of tools or durables. The reader
# escapes `_` in markdown, hence `jina\_…`. The text `jina` is first, and a lookbehind after it checks that no letter
# precedes: a pattern that begins with a text, in the case given, is searched for ten times as fast.
_JINA_KEY = Encoding(
    ("jina",),
    r"jina(?<![A-Za-z0-9]jina)(?:\\{0,4}_|%5[Ff]|&#95;)[A-Za-z0-9]{20,200}(?:\\{0,4}[_-]|[A-Za-z0-9]){0,200}",
    re.NOFLAG,
)
_ESCAPES = "%\\&"  # first characters of escapes; few short texts have one, so marks with them are searched only then

# How many characters behind a cut are searched, too, for a secret that the cut halves.
_JINA_KEY_REACH = 1_500
_REACH_PER_BYTE = 40  # of the longest secret; longer encodings may be missed

on_masked: Callable[[str, int], object] = lambda where, number: None  # noqa: ARG005, E731 - `metrics` replaces it
"""Called with a redactor's label and the number of texts that it masked.

`telemetry.metrics` replaces it by its counter. Worker processes replace it, too, as they do not import that module.
"""


def is_maskable(secret: str) -> bool:
    """Return whether a secret is long enough, and not a common word."""
    return len(secret) >= MIN_SECRET_CHARS and secret.lower() not in _COMMON_WORDS


class _Span(NamedTuple):
    """Part of a text that is a secret."""

    start: int
    end: int


class Redactor:
    """Replaces every `known` secret and every Jina-shaped key; `where` is the label of the metric, such as "log"."""

    def __init__(self, secrets: Iterable[str] = (), where: str = "log") -> None:
        self._where = where
        self._by_label: dict[str, Redactor] = {}
        self._set_secrets(frozenset(secret for secret in secrets if is_maskable(secret)))

    def _set_secrets(self, secrets: frozenset[str]) -> None:
        """Use these secrets, and prepare the search for them."""
        self.known = secrets
        self._encodings = (_JINA_KEY, *(encoding for secret in sorted(secrets) for encoding in encodings_of(secret)))
        marks = [mark for encoding in self._encodings[1:] for mark in encoding.marks]  # _JINA_KEY: see is_suspect
        self._marks = tuple(mark for mark in marks if mark[0] not in _ESCAPES)
        self._escaped_marks = {sign: tuple(mark for mark in marks if mark[0] == sign) for sign in _ESCAPES}
        self._has_unmarked = any(not encoding.marks for encoding in self._encodings)
        longest_bytes = max((len(secret.encode("utf-8", "surrogatepass")) for secret in secrets), default=0)
        self._reach = max(_JINA_KEY_REACH, _REACH_PER_BYTE * longest_bytes)

    def with_label(self, label: str) -> Redactor:
        """Return a redactor for the same secrets, also later ones, that counts under another label."""
        return self._by_label.setdefault(label, Redactor(self.known, label))

    def add(self, secrets: Iterable[str]) -> None:
        """Mask these secrets, too, from now on."""
        known = self.known | Redactor(secrets).known
        if known == self.known:
            return
        for redactor in (self, *self._by_label.values()):
            redactor._set_secrets(known)  # noqa: SLF001 - of the same class

    def text(self, text: str) -> str:
        """Return `text` with secrets masked."""
        return self._masked_text(text, self._spans(text), len(text))

    def head(self, text: str, chars: int) -> str:
        """Return the first `chars` characters with secrets masked, also one that the cut would halve."""
        if len(text) <= chars:
            return self.text(text)
        spans = [span for span in self._spans(text[: chars + self._reach]) if span.start < chars]
        return self._masked_text(text, spans, chars)

    def is_suspect(self, text: str) -> bool:
        """Return whether `text` may hold a secret. Takes a small part of the time of `text`, which then decides."""
        # Names of tools contain `jina`, too, so a search for this mark decides nothing: run the pattern.
        if "jina" in text and _JINA_KEY.pattern.search(text):
            return True
        holds = text.__contains__  # for `map`: a generator expression would take longer than the search
        if self._has_unmarked or any(map(holds, self._marks)):
            return True
        return any(sign in text and any(map(holds, marks)) for sign, marks in self._escaped_marks.items())

    def finds_in(self, text: str) -> bool:
        """Return whether `text` holds a secret."""
        return bool(self._spans(text))

    def value(self, value: Any) -> Any:
        """Return a JSON-like value with secrets masked, also in keys; other objects become their text."""
        if isinstance(value, dict | list):
            with suppress(TypeError, ValueError):  # a value that is no JSON is traversed
                if not self.finds_in(orjson.dumps(value).decode()):  # much faster than a traversal
                    return value
        return self._masked_value(value)

    def _masked_value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.text(str(key)): self._masked_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return list(map(self._masked_value, value))
        text = value if isinstance(value, str) else str(value)
        clean = self.text(text)
        if clean == text and (value is None or isinstance(value, str | int | float)):
            return value
        return clean

    def _spans(self, text: str) -> list[_Span]:
        """Return where secrets are in a text; their order is arbitrary, and they may overlap."""
        if not self.is_suspect(text):
            return []
        holds = text.__contains__
        patterns = (each.pattern for each in self._encodings if not each.marks or any(map(holds, each.marks)))
        return [_Span(*found.span()) for pattern in patterns for found in pattern.finditer(text)]

    def _masked_text(self, text: str, spans: list[_Span], end: int) -> str:
        """Return the text up to `end`, or to the end of the last span if that is later, with the spans masked."""
        if not spans:
            return text[:end]
        pieces = []
        done = 0  # where the unmasked rest of the text begins
        masked = 0
        for span in sorted(spans):
            if span.start >= done:  # else it overlaps the one before, and they get one mask
                pieces += [text[done : span.start], MASK]
                masked += 1
            done = max(done, span.end)
        on_masked(self._where, masked)
        return "".join([*pieces, text[done:end]])


def of_call(secrets: Iterable[str]) -> Redactor:
    """Return a (cached) redactor for the response of one call, which masks only the secrets sent with it.

    Otherwise a page could list guesses of another secret, and its author would learn which guess is masked.
    """
    return _of_call(frozenset(secrets))


@lru_cache(maxsize=256)
def _of_call(secrets: frozenset[str]) -> Redactor:
    return Redactor(secrets, "answer")
