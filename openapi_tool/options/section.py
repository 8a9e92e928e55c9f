"""Base class and types of settings sections, and checks of their values.

`Options` is the base class. `Seconds`, `CallSeconds`, `File` and `HostNames` are types of values. Errors name no value,
as it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from openapi_tool.files import MAX_CERTIFICATES_BYTES, check_regular_file

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name of an environment variable."""

TERABYTE = 1_000_000_000_000
"""Upper bound of sizes and counts that need one, but no particular one."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""Time limit or interval of at most one day."""

CallSeconds = Annotated[float, Field(ge=1, le=86_400)]
"""Time limit of a call: in less than one second, hardly any call could get a response."""

_UNUSABLE_CHAR = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and halves of UTF-16 pairs
_MAX_CHARS = 16_000  # of a text; no setting needs more
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")  # a name, an IPv4 address, or an IPv6 address in brackets


def _check_file(path: Path) -> Path:
    try:
        check_regular_file(path, MAX_CERTIFICATES_BYTES)
    except OSError:
        raise ValueError("names no file that can be read; correct the path, or mount the file") from None
    return path


File = Annotated[Path, AfterValidator(_check_file)]
"""Regular file of at most `MAX_CERTIFICATES_BYTES`: it contains certificates, a key or credentials."""


def check_one_line(value: Any) -> Any:
    """Return a value; a text is returned without blanks at its ends.

    Raises ValueError if a text in it has more than 16,000 characters, a control character or invalid UTF-8: drivers
    would send such texts, or show them in an error.
    """
    if isinstance(value, str):
        value = value.strip()
    if any(len(text) > _MAX_CHARS for text in _texts(value)):
        raise ValueError(f"is longer than {_MAX_CHARS} characters")
    if any(map(_UNUSABLE_CHAR.search, _texts(value))):
        raise ValueError("contains a line break, another control character or invalid UTF-8; remove it")
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, also the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, Mapping):
        # Values may be deeply nested: a generator within this call would take a second stack frame at each level.
        for item in (*value, *value.values()):
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def split(value: object) -> object:
    """Split a comma-separated text; return any other value unchanged. Raises ValueError for a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(('["', "['")):
        raise ValueError("must be comma-separated in the environment, such as A,B; it is JSON")
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_HOST.fullmatch, hosts)):
        raise ValueError("must be host names without scheme, port and path, such as tools.example.org")
    return tuple(host.lower() for host in hosts)


HostNames = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split), AfterValidator(_check_hosts)]
"""Host names in lower case; comma-separated in the environment."""


class Options:
    """Base class of the sections: refuses unknown keys, and texts that `check_one_line` refuses."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", hide_input_in_errors=True)

    _is_one_line = field_validator("*", mode="before")(check_one_line)
