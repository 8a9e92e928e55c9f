"""The option `--protocol`: which kernel a command is for, where an executor may serve one of each version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.cli.tools_files import settings_failed
from openapi_tool.settings import SettingsError, load_settings


class ProtocolVersion(StrEnum):
    """Protocol version of a kernel."""

    V1R4 = "v1r4"
    V1R3 = "v1r3"


ProtocolOption = Annotated[
    ProtocolVersion | None,
    typer.Option(
        "--protocol", help="Protocol version of the kernel; by default that of the main one.", show_default=False
    ),
]


def kernel_bootstrap(protocol: ProtocolVersion | None, flags: Mapping[str, Any] | None = None) -> Bootstrap:
    """Return what connects to the kernel of a version, from all sources and `flags`. Exits with 2 on a mistake."""
    try:
        return build_bootstrap(load_settings(flags or {}).of_version(protocol), os.environ)
    except SettingsError as error:
        settings_failed(error)
