"""The error for invalid settings; apart from the package `settings`, whose import takes a third of a second."""

from __future__ import annotations

from openapi_tool.protocol.abridging import abridged

_MAX_PROBLEM_CHARS = 1_800


class SettingsError(Exception):
    """The settings are invalid; `problems` has one line for each mistake, without values."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [abridged(problem, _MAX_PROBLEM_CHARS) for problem in problems]
        super().__init__("\n".join(self.problems))
