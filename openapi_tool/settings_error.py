"""The error for invalid settings; apart from the package `settings`, whose import takes a third of a second."""

from __future__ import annotations


class SettingsError(Exception):
    """The settings are invalid; `problems` has one line for each mistake, without values."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
