"""Secrets by declared name: read from the environment, never from anywhere else (protocol section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import SecretStr

from openapi_tool.protocol.errors import ToolMisconfigured


class MissingVariable(ToolMisconfigured):
    """An allowed variable is not set in the executor's environment."""


class Secrets:
    """The variables that tool definitions may name, and their values."""

    def __init__(self, environment: Mapping[str, str], allowed: Iterable[str]) -> None:
        self._environment = environment
        self.allowed = frozenset(allowed)

    def __call__(self, variable: str) -> SecretStr:
        """The value of a variable.

        Raises ToolMisconfigured when the operator has not allowed its name, MissingVariable when it
        is not set.
        """
        if variable not in self.allowed:
            raise ToolMisconfigured(
                f"The tool's definition names the environment variable {variable[:80]!r}, which this executor does "
                "not hand to tools; an operator must add it to secrets.allowed_env or correct the definition."
            )
        value = self._environment.get(variable, "").strip()
        if not value:
            raise MissingVariable(
                f"The environment variable {variable!r} that holds this tool's key is not set in the executor; "
                "an operator must set it."
            )
        return SecretStr(value)

    def missing(self) -> list[str]:
        """The names of allowed variables that are not set."""
        return sorted(name for name in self.allowed if not self._environment.get(name, "").strip())

    def values(self) -> list[str]:
        """Every value in use, for the redactor."""
        return [value for name in self.allowed if (value := self._environment.get(name, "").strip())]
