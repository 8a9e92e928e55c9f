"""`openapi-tool config`: the settings in effect, and where each was set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli.dev_choice import named_dev, names_of_dev, servers_of, settings_name_servers
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.output import print_json, print_status
from openapi_tool.cli.tables import Rows, output
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.sources import files, origin, settings_file

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

_DEFAULT = "default"


def show(config: Path | None, *, everything: bool, as_json: bool) -> None:
    """Print the settings that a source sets, or all of them, with masked credentials."""
    dev = named_dev()
    with settings_file(config):
        rows = _rows(dev)
        if dev is None:
            _say_how_to_show_dev()
    shown = rows if everything else [row for row in rows if row["from"] != _DEFAULT]
    if as_json:
        print_json({"settings": shown})
        return
    table = Rows("setting", "value", "from")
    for row in shown:
        table.add(row["setting"], json.dumps(row["value"], ensure_ascii=False), row["from"])
    if shown:
        output().print(table)
    if not everything:
        print_status(f"{len(rows) - len(shown)} settings have their defaults; --all shows them")


def _say_how_to_show_dev() -> None:
    """Say that running dev stacks are not shown, if other commands would use one of them."""
    stacks = names_of_dev()
    if stacks and not settings_name_servers():
        print_status(f"for the settings with a running dev stack ({stacks}): openapi-tool --dev NAME config show")


def _rows(dev: StackAddress | None) -> list[dict[str, Any]]:
    """Return a row for each setting: its name, its value, and the variable, file or `--dev NAME` that sets it."""
    of_dev = servers_of(dev)
    load_settings({**NO_DATABASE, **of_dev})  # reports mistakes; a database is not needed to show the other settings
    has_database = dev is not None or "dsn" in given_values().get("postgres", {})
    settings = load_settings(of_dev if has_database else NO_DATABASE)
    mask = build_bootstrap(settings, os.environ).redactor.text
    from_files = files()
    rows = []
    for path, value in _settings_in(settings.shown(), ()):
        if path[-1] == "dsn" and not has_database:
            continue
        source = origin(path, of_dev, from_files).removeprefix("in ")  # a variable, or a file with the place in it
        if dev is not None and path[-1] in of_dev.get(path[0], {}):
            source = f"--dev {dev.name}"
        masked_value = json.loads(mask(json.dumps(value)))
        rows.append({"setting": ".".join(path), "value": masked_value, "from": source or _DEFAULT})
    return rows


def _settings_in(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield `("nats", "servers"), value` of `{"nats": {"servers": value}}`."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _settings_in(value, (*path, name))
        else:
            yield (*path, name), value
