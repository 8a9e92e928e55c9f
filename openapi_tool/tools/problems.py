"""What is wrong with a definition, and where."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]

MAX_PROBLEMS = 20
"""Problems that one error names; a model corrects no more at once, and a card with 1,000 arguments' was 87 MB."""

_PROBLEM_CHARS = 200
_SHORT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One defect. `path` leads to it from the root of the definition, or to where something is missing.

    A `warning` does not keep a definition from being registered.
    """

    path: Path
    message: str
    warning: bool = False

    @property
    def where(self) -> str:
        """The path for people: `options.args.defaults.site[0]`."""
        return shown_path(self.path)


def shown_path(path: Path) -> str:
    """`options.args.defaults.site[0]`; `definition` for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".") or "definition"


def short(text: str, most: int = _SHORT_CHARS) -> str:
    """A text for a message, cut to `most` characters; a definition or a model may give one of 256 kB."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def listed(problems: Sequence[str]) -> list[str]:
    """The first problems for an error's message and detail, each cut to 200 characters, and how many more there are."""
    shown = [short(problem, _PROBLEM_CHARS) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {left:,} more"] if left else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def any_of(words: Iterable[str]) -> str:
    """`'a', 'b' or 'c'`."""
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last
