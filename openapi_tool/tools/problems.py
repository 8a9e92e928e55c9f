"""Problems of definitions and arguments, with their paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]

MAX_PROBLEMS = 20
"""Maximum problems in one error: a model corrects no more at once, and a card with 1,000 of them had 87 MB."""

_PROBLEM_CHARS = 200
_SHORT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a definition at `path` from its root; for something missing, the path that it would have.

    A definition with warnings only can be registered.
    """

    path: Path
    message: str
    warning: bool = False

    @property
    def where(self) -> str:
        """Return the path for people: `options.args.defaults.site[0]`."""
        return shown_path(self.path)

    def __str__(self) -> str:
        return f"{short(self.where)}: {self.message}"


def shown_path(path: Path) -> str:
    """Return a path as text, such as `options.args.defaults.site[0]`; `definition` for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".") or "definition"


def argument_path(path: Path) -> str:
    """Return the path in a call's arguments for a model: `queries item 2`, counted as in the results."""
    text = "".join(f" item {part + 1}" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".").strip() or "arguments"


def short(text: str, max_chars: int = _SHORT_CHARS) -> str:
    """Return a text for a message, truncated to `max_chars`; names in a definition or call may have 256 kB."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def listed(problems: Sequence[str]) -> list[str]:
    """Return the first problems for an error, each truncated to 200 characters, and the number of the others."""
    shown = [short(problem, _PROBLEM_CHARS) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {left:,} more"] if left else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close, else an empty text."""
    return next((f"; did you mean {close!r}?" for close in close_to(name, known)), "")


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is closest to a misspelt one; empty if none is close."""
    return difflib.get_close_matches(name, list(known), n=1)


def counted(number: int, noun: str, left: str = "") -> str:
    """Return `1 item` or `2,000 items`; with `left`, such as `left out`, also the verb: `1 item is left out`."""
    one = number == 1
    verb = f" {'is' if one else 'are'} {left}" if left else ""
    return f"{number:,} {noun if one else f'{noun}s'}{verb}"


def any_of(words: Iterable[str]) -> str:
    """Return the words as `'a', 'b' or 'c'`."""
    *most, last = (repr(word) for word in words)
    return f"{', '.join(most)} or {last}" if most else last
