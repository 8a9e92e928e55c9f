"""`openapi-tool check` where something is missing; with real servers it is tried in end_to_end/test_deployment.py."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app
from tests.requirements import requirement

NOBODY = {"PG_DSN": "postgresql://user:the-word@127.0.0.1:1/kernel", "NATS_SERVERS": "nats://127.0.0.1:1"}


@requirement("cli.check")
def test_every_part_that_is_missing_is_named_at_once() -> None:
    result = CliRunner().invoke(app, ["check"], env={**NOBODY, "JINA_API_KEY": None})
    assert result.exit_code == 1
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert list(lines) == ["settings", "postgres", "nats", "JINA_API_KEY"]
    assert lines["settings"] == "ok"
    assert lines["postgres"] == (
        "PostgreSQL at 127.0.0.1:1 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
    )
    assert lines["nats"] == (
        "cannot connect to NATS at 127.0.0.1:1: connection refused; check nats.servers (NATS_SERVERS)"
    )
    assert lines["JINA_API_KEY"] == "is not set"
    assert "the-word" not in result.output


@requirement("cli.check")
def test_the_same_as_json() -> None:
    result = CliRunner().invoke(app, ["check", "--json"], env={**NOBODY, "JINA_API_KEY": None})
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["remarks"]) == (1, False, [])
    assert [name for name, problem in found["checks"].items() if problem] == ["postgres", "nats", "JINA_API_KEY"]


@pytest.mark.parametrize(("variable", "value"), [("PG_DSN", ""), ("OPENAPI_TOOL__EXECUTOR__CONCURENCY", "8")])
@requirement("cli.check")
def test_a_wrong_configuration_is_not_tried(variable: str, value: str) -> None:
    result = CliRunner().invoke(app, ["check"], env={**NOBODY, variable: value})
    assert (result.exit_code, result.stdout) == (2, "")
