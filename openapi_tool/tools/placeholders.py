"""Templates and secrets (protocol section 5), and keys pasted into a definition."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import NoReturn, Self

from pydantic import SecretStr

from openapi_tool.files import MAX_SECRET_BYTES, read_regular_file
from openapi_tool.protocol.cards import MAX_ARGUMENT_DEPTH, ToolCall
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.problems import Path, short

PREFIXED_KEY = re.compile(r"(?:\b(?:jina|sk|pk|ghp|gho|xox[abp]|glpat|hf)[_-][A-Za-z0-9_-]{16,}|(?i:bearer)\s+\S{12,})")
"""A key with a known prefix (`jina_…`, `sk-…`), or a bearer token."""

# A digit and a letter at least: names of variables have long parts without digits, and numbers have no letters.
_KEY_CHUNK = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
_MAX_SHOWN_DEPTH = 100  # above the limit of definitions, below Python's


def looks_like_a_key(text: str) -> bool:
    """Return whether a text is more likely a key than the name of a variable."""
    return bool(
        PREFIXED_KEY.search(text) or any(_KEY_CHUNK.fullmatch(chunk) for chunk in re.split(r"[^A-Za-z0-9]", text))
    )


def without_keys(value: JsonValue, mask: str, path: Path = ()) -> JsonValue:
    """Return a stored definition with likely keys masked."""
    if len(path) > _MAX_SHOWN_DEPTH:
        return mask
    if isinstance(value, dict):
        return {
            PREFIXED_KEY.sub(mask, str(name)): without_keys(item, mask, (*path, str(name)))
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [without_keys(item, mask, (*path, place)) for place, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    # `looks_like_a_key` would also match ids and parts of URLs, so use it only where a variable's name belongs.
    return mask if names_a_variable(path) and looks_like_a_key(value) else PREFIXED_KEY.sub(mask, value)


def names_a_variable(path: Path) -> bool:
    """Return whether the value at this path of a definition names an environment variable."""
    return path[:2] == ("options", "envs") or (bool(path) and path[-1] in ("auth_env", "env"))


FILE_SUFFIX = "_FILE"
"""`NAME_FILE` names a file that holds the value of `NAME`."""

_NO_POOLS: Mapping[str, Sequence[str]] = MappingProxyType({})
# PG*: every variable of libpq and asyncpg. CG_CONFIG_TOML: path of the kernel's configuration file. The others
# configure NATS, this service, trace export, proxies and CAs.
_OWN_PREFIXES = ("PG", "NATS_", "OPENAPI_TOOL", "OTEL_")
_OWN_NAMES = frozenset(
    ("CG_CONFIG_TOML", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
)


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
    """A value cannot be used; the message names its variable and the remedy, never the value."""


class Secrets:
    """Variables that tool definitions may name, with their values at construction.

    `pools` maps the name of a pool, in upper case, to the variables with its keys. A name without a value of its own
    gets the first key of its pool that is set. `problems` has a line for each unusable value.
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
                if value := _read(environment, name):
                    self._values[name] = Secret(value)
            except _Unusable as problem:
                self.problems.append(str(problem))

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
                f"The environment variable {variable!r} that holds this tool's key is not set in the executor; "
                "an operator must set it."
            )
        return value

    def get(self, variable: str) -> Secret | None:
        """Return the value of an allowed variable itself, None without one."""
        return self._values.get(variable)

    def _first_of_pool(self, variable: str) -> Secret | None:
        keys = self._pools.get(variable.upper(), ())
        return next((value for key in keys if (value := self._values.get(key))), None)

    def missing(self) -> list[str]:
        """Return the allowed variables without a value; the name of a pool needs none of its own."""
        # A pool may list its own name as a key: that variable must be set.
        return sorted(
            name
            for name in self.allowed - self._values.keys()
            if name in self._pools.get(name.upper(), ()) or not self._first_of_pool(name)
        )

    def values(self) -> dict[str, str]:
        """Return every value by the name of its variable, for the redactor."""
        return {name: value.get_secret_value() for name, value in self._values.items()}


def _read(environment: Mapping[str, str], name: str) -> str:
    """Return the stripped value of a variable or of its file; empty if neither is set."""
    value, path = environment.get(name, "").strip(), environment.get(name + FILE_SUFFIX, "").strip()
    if value and path:
        raise _Unusable(f"{name} and {name}{FILE_SUFFIX} are both set; unset one of them")
    if path:
        value = _content(path, f"{name}{FILE_SUFFIX}")
    if any(unicodedata.category(char) == "Cc" for char in value):
        raise _Unusable(f"{name}: contains a line break or another control character; give the bare value")
    if not value.isascii():  # an HTTP header cannot contain it, so every call would fail
        raise _Unusable(f"{name}: contains a non-ASCII character, which no key does; give the bare value")
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


PLACEHOLDERS = (
    "project_id",
    "channel_id",
    "agent_id",
    "agent_turn_id",
    "step_id",
    "tool_call_id",
    "parent_step_id",
    "trace_id",
    "turn_epoch",
    "context_box_id",  # the kernel's box with the agent's context
)
_placeholders_of = attrgetter(*PLACEHOLDERS)
_MAX_ID_CHARS = 1_000  # a tool call id may have any length, and a value of 256 kB may contain it 29,000 times
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def texts_in(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and text of every string in a value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(item, (*path, name))


def is_template(value: object) -> bool:
    """Return whether a text in a value contains a placeholder, known or not."""
    return any(PLACEHOLDER.search(text) for _, text in texts_in(value, ()))


class MissingValue(ToolMisconfigured):
    """A placeholder has no value in this call."""


def placeholder_values(identity: CallIdentity) -> dict[str, str | None]:
    """Return the values of PLACEHOLDERS, None for an id that the call does not have."""
    values = dict(zip(PLACEHOLDERS, _placeholders_of(identity), strict=True))
    values["turn_epoch"] = str(identity.turn_epoch)
    return values


def render(value: JsonValue, values: Mapping[str, str | None], where: str, depth: int = 0) -> JsonValue:
    """Replace the placeholders in every string of `value`; rendered text is not searched again.

    `where` is the path that errors name, `depth` the level of `value` in the option. Raises MissingValue for an id that
    the call does not have, else ToolMisconfigured.
    """
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: _value(match[1], values, where), value)
    if isinstance(value, dict | list) and depth >= MAX_ARGUMENT_DEPTH:
        raise ToolMisconfigured(
            f"The tool's definition is nested deeper than {MAX_ARGUMENT_DEPTH} levels in {short(where)}; "
            "an operator must flatten it."
        )
    if isinstance(value, dict):
        return {key: render(item, values, f"{where}.{short(key)}", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [render(item, values, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    return value


def _value(name: str, values: Mapping[str, str | None], where: str) -> str:
    if name not in values:
        raise ToolMisconfigured(
            f"The tool's definition uses the unknown placeholder {{{short(name, 40)}}} in {short(where)}; "
            f"an operator must correct it (known: {', '.join(PLACEHOLDERS)})."
        )
    value = values[name]
    if value and len(value) > _MAX_ID_CHARS:
        raise ToolMisconfigured(
            f"{{{name}}} has more than {_MAX_ID_CHARS:,} characters in this call, too many for {short(where)}; "
            "an operator must remove it from the definition."
        )
    if not value:
        raise MissingValue(
            f"The tool's definition needs {{{name}}} in {short(where)}, which this call does not have; "
            "an operator must correct the definition."
        )
    return value


def render_fixed(name: str, template: JsonValue, call: ToolCall, values: Mapping[str, str | None]) -> JsonValue:
    """Return a rendered fixed value: the definition's, or the card's if a placeholder has no value here.

    The kernel's worker, which wrote the card, may know ids that the command does not carry. Render its value
    again: the worker leaves unknown placeholders and those below the top level as they are.
    """
    where = f"options.args.fixed.{short(name)}"
    try:
        return render(template, values, where)
    except MissingValue:
        if name not in call.fixed_applied or name not in call.arguments:
            raise
        return render(call.arguments[name], values, where)
