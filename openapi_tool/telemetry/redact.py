"""No secret in any output: values in use, and whatever looks like a key of Jina's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MASK = "[redacted]"
_JINA_KEY = re.compile(r"(?<![A-Za-z0-9])jina_[A-Za-z0-9]{20,}[A-Za-z0-9_-]*")  # no name of a tool or a durable
_MIN_SECRET_CHARS = 6


class Redactor:
    """Replaces every known secret and every Jina-shaped key in texts, at any depth."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """`text` without secrets."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        return _JINA_KEY.sub(MASK, text) if "jina_" in text else text

    def value(self, value: Any) -> Any:
        """A JSON-like value without secrets, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
