"""Problems of definitions and arguments, each at its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openapi_tool.protocol.printable import printable_line
from openapi_tool.tools.wording import short

Path = tuple[str | int, ...]
"""Keys and indexes that lead to a value, such as `("options", "args", "defaults", "site", 0)`."""

MAX_PROBLEMS = 20
"""Problems in one error: a model corrects no more at once, and a card with 1,000 of them had 87 MB."""

_PROBLEM_CHARS = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem at a path of a definition or of arguments. A definition that has only warnings can be registered."""

    path: Path
    message: str
    warning: bool = False

    @property
    def where(self) -> str:
        """Return the path as text."""
        return shown_path(self.path)

    def __str__(self) -> str:
        return f"{short(self.where)}: {self.message}"


def shown_path(path: Path) -> str:
    """Return a path as text, such as `options.args.defaults.site[0]`; `definition` for the root."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{printable_line(short(part))}" for part in path)
    return text.removeprefix(".") or "definition"


def argument_path(path: Path) -> str:
    """Return a path in a call's arguments for a model, such as `queries item 2`, counted from 1 as in results."""
    text = "".join(f" item {part + 1}" if isinstance(part, int) else f".{printable_line(short(part))}" for part in path)
    return text.removeprefix(".").strip() or "arguments"


def listed(problems: Sequence[str]) -> list[str]:
    """Return the first problems for an error, each truncated, and the number of the others."""
    shown = [short(problem, _PROBLEM_CHARS) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {left:,} more"] if left else shown
