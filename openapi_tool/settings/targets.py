"""Settings of which pages may be read."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from openapi_tool.settings.section import Section, split

_LABELS = re.compile(r"\.?[^\s.:/?#@*%\[\]\\]+(?:\.[^\s.:/?#@*%\[\]\\]+)*\.?")


def _name(entry: str) -> str:
    if not _LABELS.fullmatch(entry):
        raise ValueError("must be names such as wiki.lan, or suffixes such as .lan, without scheme, port and wildcard")
    return entry


def _name_or_address(entry: str) -> str:
    try:
        return str(ip_address(entry.strip("[]")))
    except ValueError:
        return _name(entry)


Name = Annotated[str, AfterValidator(_name)]
NameOrAddress = Annotated[str, AfterValidator(_name_or_address)]


class TargetsSettings(Section):
    """Which pages may be read; judged by their address alone, nothing is looked up."""

    internal_suffixes: Annotated[tuple[Name, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Suffixes of host names that are not public, beside the built-in ones (`.local`, `.internal`, …); "
        "comma-separated in the environment.",
    )
    allow: Annotated[tuple[NameOrAddress, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Host names, addresses, or suffixes with a leading dot (`.lan`) that may be read although they "
        "look internal.",
    )
