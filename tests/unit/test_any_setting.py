"""Invalid values of every setting: the error names the setting, not the value, and nothing crashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from openapi_tool import bootstrap
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.settings import CONFIG_VARIABLE, PREFIX, Settings, SettingsError, load_settings
from openapi_tool.settings.sections import fields_of
from tests.requirements import requirement

CANARY = "zq7canary"
WRONG = [
    CANARY,
    f"-{CANARY}",
    f"{{{CANARY}",
    f'["{CANARY}',
    f'{{"a": "{CANARY}"}}',
    f'[{{"a": ["{CANARY}"]}}]',
    f"{CANARY}\udcff",
    f"{CANARY}\n{CANARY}\x1b[31m",
    f"http://u:{CANARY}/x@h:1",
    f"nats://u:{CANARY}?x@h:1",
    f"nats://{CANARY}@::1:4222",
    f"https://[{CANARY}",
    f"{CANARY},,{CANARY},",
    f"/nowhere/{CANARY}",
    f"%{CANARY}%00",
    "9" * 400,
    "9" * 5_000,
    "-1e999",
    "nan",
    "null",
    "[]",
    "\u0665",
]
ODD = [
    3,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    True,
    [],
    [CANARY],
    [1, "x"],
    {},
    {"a": CANARY},
    [[CANARY]],
    CANARY,
]


def paths(section: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all sections and settings."""
    for name, field in fields_of(section).items():
        yield (*above, name)
        if fields_of(field.annotation):
            yield from paths(field.annotation, (*above, name))


PATHS = list(paths(Settings))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OPENAPI_TOOL", "CG_", "NATS_", "PG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PG_DSN", "postgresql://db/kernel")
    for slow in ("tls_context", "entry_points"):  # the same for every value but of one setting
        monkeypatch.setattr(bootstrap, slow, cache(getattr(bootstrap, slow)))


def problems() -> str:
    """Return the error of the settings, empty for valid ones. Any exception but SettingsError is a failure."""
    try:
        build_bootstrap(load_settings(), os.environ)
    except SettingsError as error:
        assert error.problems
        assert all(problem.isprintable() for problem in error.problems)
        return str(error)
    return ""


@pytest.mark.parametrize("path", PATHS, ids=".".join)
@requirement("settings.errors")
def test_a_wrong_value_in_the_environment_is_named_and_not_shown(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in WRONG:
        monkeypatch.setenv(PREFIX + "__".join(path).upper(), value)
        assert CANARY not in problems().replace(f"/nowhere/{CANARY}", "")


@pytest.mark.parametrize("path", PATHS, ids=".".join)
@requirement("settings.errors")
def test_a_wrong_value_in_a_file_is_named_and_not_shown(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    if path[0] == "postgres":
        monkeypatch.delenv("PG_DSN")
    for value in (*ODD, f"{CANARY}\x00", f"{CANARY}\n"):
        file.write_text(".".join(path) + " = " + toml(value))
        assert CANARY not in problems()


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else str(value)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\tb", "a\x1b[1mb", "a\x7fb", "a\x85b", "a\udcffb", "\x00"])
@pytest.mark.parametrize("path", [("nats", "password"), ("session", "key"), ("policy", "hooks"), ("tools", "jina")])
@requirement("settings.errors")
def test_a_value_with_control_characters_or_invalid_utf8_is_refused(path: tuple[str, str], text: str) -> None:
    section, name = path
    value: Any = {"hooks": [text], "jina": {"services": {"x": {"envs": {text: "A"}}}}}.get(name, f"{text} of 16 bytes")
    with pytest.raises(SettingsError, match=rf"{section}\.{name}: contains a line break"):
        load_settings({section: {name: value}})


@requirement("settings.errors")
def test_white_space_around_a_value_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted file that becomes a variable often ends with a line break."""
    monkeypatch.setenv("PG_DSN", " postgresql://u:of-file@db/kernel\n")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__TOKEN", "of-file\r\n")
    settings = load_settings()
    assert settings.postgres.parsed.password == "of-file"
    assert settings.nats.token
    assert settings.nats.token.get_secret_value() == "of-file"


@requirement("settings.errors")
def test_a_value_over_16000_characters_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"nats\.user: is longer than 16000 characters"):
        load_settings({"nats": {"user": "x" * 16_001, "password": "y"}})
