"""How much a model is shown at once, and how much of that is for frames and notes.

A limit is in characters and in tokens. The text of a result is web content, and around it what this service adds:
frames (`frames.py`), captions, and a note about what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from openapi_tool.tools.frames import CAPTION_CHARS, CUT_CHARS, MARK_CHARS
from openapi_tool.tools.tokens import estimate_tokens

NOTE_CHARS = 500
"""Reserved for the introduction of frames and the note about what is missing."""

FRAME_CHARS = MARK_CHARS + CAPTION_CHARS + CUT_CHARS
"""Maximum of frame lines around a part."""

FRAME_CHARS_PER_TOKEN = 3
"""Estimate for frame lines and notes."""

_ENGLISH_CHARS_PER_TOKEN = 4

MIN_TEXT_CHARS = 150
"""Minimum space for the text of an item, enough for title and address. With less it is left out."""


@dataclass(frozen=True, slots=True)
class ResultLimit:
    """Maximum of what a model is shown at once; tokens by estimate."""

    chars: int
    tokens: int

    def minus(self, chars: int) -> ResultLimit:
        """Return what a note of `chars` characters leaves."""
        return ResultLimit(self.chars - chars, self.tokens - chars // _ENGLISH_CHARS_PER_TOKEN)

    def space(self, reserved_chars: int) -> Space:
        """Return the space that is left beside `reserved_chars` of frames and notes."""
        return Space(self.chars - reserved_chars, self.tokens - reserved_chars // FRAME_CHARS_PER_TOKEN)


@dataclass(slots=True)
class Space:
    """What is left of a limit while a result is put together; below zero if too much was taken."""

    chars: int
    tokens: int

    @property
    def is_full(self) -> bool:
        """Whether there is no space for the text of one more item."""
        return self.chars < MIN_TEXT_CHARS or self.tokens < MIN_TEXT_CHARS // FRAME_CHARS_PER_TOKEN

    def take_frame(self, chars: int) -> None:
        """Take the space of frame lines and captions."""
        self.chars -= chars
        self.tokens -= chars // FRAME_CHARS_PER_TOKEN

    def take_text(self, text: str) -> None:
        """Take the space of a text."""
        self.chars -= len(text)
        self.tokens -= estimate_tokens(text)
