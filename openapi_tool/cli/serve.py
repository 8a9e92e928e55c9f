"""`openapi-tool serve`: the executor, which runs the tool calls of a kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from openapi_tool.service.process import run
from openapi_tool.settings import load_settings
from openapi_tool.settings.sources import use_settings_file


def serve(config: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Run tool calls until SIGTERM; `flags` are the settings by section, None for those that were not given."""
    use_settings_file(config)
    run(partial(load_settings, _given(flags)), os.environ)


def _given(flags: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return only what was given: a None would override the environment and the file."""
    given = {}
    for section, values in flags.items():
        given_values = {key: value for key, value in values.items() if value is not None}
        if given_values:
            given[section] = given_values
    return given
