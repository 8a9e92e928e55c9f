"""The compose file: its schema, and whether its commands, variables, ports and volumes are those of the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
import yaml

import openapi_tool
from openapi_tool.cli import app
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.local.servers import _binary as nats_server
from openapi_tool.settings import given_values, load_settings
from openapi_tool.settings.variables import ignored_variables
from tests.requirements import requirement

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "tests" / "data" / "compose-spec.json"
"""Schema of the Compose Specification (Apache-2.0), as the package check-jsonschema 0.39.0 ships it."""

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SHELL = {"JINA_API_KEY": "made-up", "POSTGRES_PASSWORD": "made-up-word", "GATEWAY_NATS": ""}


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a container: those of the image, and the service's with the values of `SHELL`."""
    image = dict(re.findall(r"(\b(?:OPENAPI_TOOL__\w+|XDG_STATE_HOME|SQLITE_TMPDIR))=(\S+)", DOCKERFILE))
    given = {
        name: SHELL[name] if value is None else re.sub(r"\$\{(\w+)-\}", lambda found: SHELL[found[1]], value)
        for name, value in service["environment"].items()
    }
    return image | given


@requirement("compose.runs")
def test_the_compose_file_is_valid() -> None:
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert [str(problem) for problem in validator.iter_errors(COMPOSE)] == []


@requirement("compose.runs")
def test_only_the_gateway_starts_without_a_profile() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["gateway"]
    assert {name for name, service in SERVICES.items() if service.get("profiles") == ["kernel"]} == {
        "serve",
        "nats",
        "postgres",
    }


@requirement("compose.runs")
@pytest.mark.parametrize("name", OWN)
def test_every_command_and_variable_is_one_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service, command = OWN[name], typer.main.get_command(app)
    command.make_context("openapi-tool", list(service["command"]))  # raises UsageError
    subcommand, *options = service["command"]
    command.commands[subcommand].make_context(subcommand, options)  # type: ignore[attr-defined]
    for variable in os.environ:
        if variable.startswith(("OPENAPI_TOOL", "PG", "NATS_")):
            monkeypatch.delenv(variable)
    environment = environment_of(service)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings(NO_DATABASE if name == "gateway" else None)  # refuses a variable that is no setting
    assert ignored_variables(os.environ) == []
    assert environment.keys() <= {*KNOWN, *(known for known in environment if known.startswith("OPENAPI_TOOL__"))}
    assert service["image"] == f"openapi-tool:{openapi_tool.__version__}"
    assert f"http://127.0.0.1:{settings.health.port}/readyz" in service["healthcheck"]["test"][-1]
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.executor.drain_timeout_s + 5
    if name == "gateway":
        assert service["ports"] == [f"127.0.0.1:{settings.gateway.port}:{settings.gateway.port}"]
        assert service["volumes"] == [f"state:{environment['XDG_STATE_HOME']}"]
        assert "nats" not in given_values(), "else its state would not be a file"
    else:
        assert settings.postgres.parsed.hosts[0][0] == "postgres"
        assert settings.nats.parsed[0].where == "nats:4222"


KNOWN = ("JINA_API_KEY", "NATS_SERVERS", "PG_DSN", "PGPASSWORD", "XDG_STATE_HOME", "SQLITE_TMPDIR")


@requirement("compose.runs")
def test_ports_are_open_to_this_machine_only_and_volumes_exist() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
    for service in OWN.values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        for needed, how in service.get("depends_on", {}).items():
            assert SERVICES[needed]["profiles"] == service["profiles"]
            assert "healthcheck" in SERVICES[needed]
            assert how == {"condition": "service_healthy"}


@requirement("compose.runs")
def test_nats_knows_its_options() -> None:
    done = subprocess.run([nats_server(), "--help"], capture_output=True, text=True, check=False)  # noqa: S603 - ours
    for option in SERVICES["nats"]["command"]:
        assert option.partition("=")[0] in done.stdout + done.stderr


@requirement("compose.runs")
def test_every_variable_of_the_shell_is_documented() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gateway.md", "serving.md"))
    variables = [entry for service in SERVICES.values() for entry in service.get("environment", {}).items()]
    empty = {name for name, value in variables if value is None}
    for variable in {*re.findall(r"\$\{(\w+)", text), *empty}:
        assert f"{variable}=" in pages, variable
