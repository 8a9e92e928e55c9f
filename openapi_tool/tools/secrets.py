"""Secrets by declared name: read from the environment or from mounted files, never from anywhere else (section 5)."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import SecretStr

from openapi_tool.protocol.errors import ToolMisconfigured

FILE_SUFFIX = "_FILE"
"""`NAME_FILE` names a file that holds the value of `NAME`."""

_MAX_FILE_BYTES = 64 * 1024
# PG*: whatever libpq or asyncpg reads. The rest configures NATS, this service, its collector, its proxy and its CAs.
_OWN_PREFIXES = ("PG", "NATS_", "OPENAPI_TOOL", "OTEL_")
_OWN_NAMES = frozenset(
    {
        "CG_CONFIG_TOML",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    }
)


def is_executors_own(variable: str) -> bool:
    """Return whether a variable, in any case, or the file that it names configures the executor itself.

    Such a variable is never a tool's, even if an operator lists it: `envs: {api_key: PG_DSN}` would send the
    database's password to the upstream as a bearer key.
    """
    name = variable.upper()
    return name.startswith(_OWN_PREFIXES) or name in _OWN_NAMES or name.removesuffix(FILE_SUFFIX) in _OWN_NAMES


class Secret(SecretStr):
    """A text that only `get_secret_value` shows: `repr`, `str`, format and JSON mask it, pickling is refused."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


class MissingVariable(ToolMisconfigured):
    """An allowed variable is not set in the executor's environment."""


class _Unusable(Exception):
    """A value that is set cannot be used; the message names its variable and the remedy, never the value."""


class Secrets:
    """The variables that tool definitions may name, and their values, as they are when this is made.

    `problems` says of every value that is set and cannot be used why.
    """

    def __init__(self, environment: Mapping[str, str], allowed: Iterable[str]) -> None:
        self.allowed = frozenset(name for name in allowed if not is_executors_own(name))
        self.problems: list[str] = []
        self._values: dict[str, Secret] = {}
        for name in sorted(self.allowed):
            try:
                value = _read(environment, name)
            except _Unusable as problem:
                self.problems.append(str(problem))
            else:
                self._values |= {name: Secret(value)} if value else {}

    def __call__(self, variable: str) -> Secret:
        """The value of a variable.

        Raises ToolMisconfigured when it is the executor's own or the operator has not allowed its name,
        MissingVariable when it is not set.
        """
        if is_executors_own(variable):
            raise ToolMisconfigured(
                f"The tool's definition names the environment variable {variable[:80]!r}, which is one of the "
                "executor's own settings and never given to tools; an operator must correct the definition."
            )
        if variable not in self.allowed:
            raise ToolMisconfigured(
                f"The tool's definition names the environment variable {variable[:80]!r}, which this executor does "
                "not hand to tools; an operator must add it to secrets.allowed_env or correct the definition."
            )
        value = self._values.get(variable)
        if value is None:
            raise MissingVariable(
                f"The environment variable {variable!r} that holds this tool's key is not set in the executor; "
                "an operator must set it."
            )
        return value

    def missing(self) -> list[str]:
        """The names of allowed variables that are not set."""
        return sorted(self.allowed - self._values.keys())

    def values(self) -> dict[str, str]:
        """Every value in use by the name of its variable, for the redactor."""
        return {name: value.get_secret_value() for name, value in self._values.items()}


def _read(environment: Mapping[str, str], name: str) -> str:
    """A variable's value or its file's, without the white space around it; empty where neither is set."""
    value, path = environment.get(name, "").strip(), environment.get(name + FILE_SUFFIX, "").strip()
    if value and path:
        raise _Unusable(f"{name} and {name}{FILE_SUFFIX} are both set; unset one of them")
    if path:
        value = _content(path, f"{name}{FILE_SUFFIX}")
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise _Unusable(f"{name}: holds a line break or another control character; give the bare value")
    return value


def _content(path: str, variable: str) -> str:
    """What a mounted file holds. The path is not told: it may be a key that was put there by mistake."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        text = content.decode().strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise _Unusable(f"{variable}: the file that it names cannot be read: {why}") from None
    if not text or len(content) > _MAX_FILE_BYTES:
        raise _Unusable(f"{variable}: the file that it names must hold one value, of at most {_MAX_FILE_BYTES} bytes")
    return text
