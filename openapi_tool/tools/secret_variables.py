"""Secrets: environment variables that tools may read (protocol section 5).

A definition names a variable, never a key. The operator allows variables (`secrets.allowed_env`), and may list several
keys under one name, a *pool* (`limits.pools`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, Self

from pydantic import SecretStr

from openapi_tool.files import MAX_SECRET_BYTES, read_regular_file
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.key_shapes import looks_like_a_key

FILE_SUFFIX = "_FILE"
"""`NAME_FILE` names a file that holds the value of `NAME`."""

_NO_POOLS: Mapping[str, Sequence[str]] = MappingProxyType({})

# Variables of the executor itself. PG*: every variable of libpq and asyncpg. CG_CONFIG_TOML: path of the kernel's
# configuration file. The others configure NATS, this service, trace export, proxies and CAs.
_OWN_PREFIXES = ("PG", "NATS_", "OPENAPI_TOOL", "OTEL_")
_OWN_NAMES = frozenset(
    ("CG_CONFIG_TOML", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
)

# `"key"`, `'key'`, `Bearer key`
_QUOTED_OR_BEARER = re.compile(r"""(["']).*\1$|bearer\s""", re.IGNORECASE)


def is_executors_own(variable: str) -> bool:
    """Return whether a variable or `NAME_FILE`, in upper or lower case, configures the executor itself.

    No tool may get it, even if an operator lists it: `envs: {api_key: PG_DSN}` would send the database's password to
    the upstream.
    """
    name = variable.upper()
    return name.startswith(_OWN_PREFIXES) or name in _OWN_NAMES or name.removesuffix(FILE_SUFFIX) in _OWN_NAMES


class Secret(SecretStr):
    """Text that only `get_secret_value` returns; pickling raises TypeError."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled")


class MissingVariable(ToolMisconfigured):
    """An allowed variable is not set."""


class VariableNotAllowed(ToolMisconfigured):
    """The operator has not allowed tools to read a variable."""


class _Unusable(Exception):
    """The value of a variable cannot be used; the message names the variable and the remedy, never the value."""


class Secrets:
    """Variables that tool definitions may name, with their values at construction.

    `pools` maps the name of a pool, in upper case, to the variables with its keys. A variable without a value of its
    own that is the name of a pool gets the first key of the pool that is set. `problems` has a line for each unusable
    value.
    """

    def __init__(
        self, environment: Mapping[str, str], allowed: Iterable[str], pools: Mapping[str, Sequence[str]] = _NO_POOLS
    ) -> None:
        self._pools = pools
        self.allowed = frozenset(name for name in allowed if not is_executors_own(name))
        self.problems: list[str] = []
        self._values: dict[str, Secret] = {}
        for name in sorted(self.allowed):
            try:
                value = _read(environment, name)
            except _Unusable as problem:
                self.problems.append(str(problem))
                continue
            if value:
                self._values[name] = Secret(value)

    def __call__(self, variable: str) -> Secret:
        """Return the value of a variable. Raises MissingVariable if unset, VariableNotAllowed, ToolMisconfigured."""
        if is_executors_own(variable):
            raise ToolMisconfigured(
                f"The tool's definition names the environment variable {variable[:80]!r}, which is one of the "
                "executor's own settings and never given to tools; an operator must correct the definition."
            )
        if variable not in self.allowed:
            if looks_like_a_key(variable[:1_000]):  # it may have 256 kB
                raise ToolMisconfigured(
                    "The tool's definition has what looks like a key where the name of an environment variable "
                    "belongs; an operator must put the key into the executor's environment and name its variable."
                )
            raise VariableNotAllowed(
                f"The tool's definition names the environment variable {variable[:80]!r}, which this executor does "
                "not pass to tools; an operator must add it to secrets.allowed_env or correct the definition."
            )
        value = self._values.get(variable) or self._first_of_pool(variable)
        if value is None:
            raise MissingVariable(
                f"The environment variable {variable!r} that holds this tool's key is not set for this service; "
                "an operator must set it."
            )
        return value

    def get(self, variable: str) -> Secret | None:
        """Return the value of an allowed variable itself, None without one."""
        return self._values.get(variable)

    def _first_of_pool(self, variable: str) -> Secret | None:
        for key_variable in self._pools.get(variable.upper(), ()):
            if key_variable in self._values:
                return self._values[key_variable]
        return None

    def missing(self) -> list[str]:
        """Return the allowed variables without a value; the name of a pool needs none of its own."""
        missing = []
        for name in sorted(self.allowed - self._values.keys()):
            is_key_of_its_pool = name in self._pools.get(name.upper(), ())  # then it must be set
            if is_key_of_its_pool or self._first_of_pool(name) is None:
                missing.append(name)
        return missing

    def values(self) -> dict[str, str]:
        """Return every value by the name of its variable, for the redactor."""
        return {name: value.get_secret_value() for name, value in self._values.items()}


def _read(environment: Mapping[str, str], name: str) -> str:
    """Return the stripped value of a variable or of its file; empty if neither is set."""
    value = environment.get(name, "").strip()
    path = environment.get(name + FILE_SUFFIX, "").strip()
    if value and path:
        raise _Unusable(f"{name} and {name}{FILE_SUFFIX} are both set; unset one of them")
    if path:
        value = _content(path, f"{name}{FILE_SUFFIX}")
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise _Unusable(f"{name}: contains a line break or another control character; give the bare value")
    if not value.isascii():  # an HTTP header cannot contain it, so every call would fail
        raise _Unusable(f"{name}: contains a non-ASCII character, which no key does; give the bare value")
    if _QUOTED_OR_BEARER.match(value):  # as in an env file of Docker, which keeps quotes
        raise _Unusable(f"{name}: has quotes around it, or Bearer before it; give the bare value")
    return value


def _content(path: str, variable: str) -> str:
    """Return the content of a mounted file without a byte order mark.

    Errors do not show the path: the variable may contain a key by mistake.
    """
    try:
        text = read_regular_file(path, MAX_SECRET_BYTES).decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise _Unusable(
            f"{variable}: the file that it names cannot be read: {why}; mount it, or correct the path"
        ) from None
    if not text:
        raise _Unusable(f"{variable}: the file that it names must hold one value")
    return text
