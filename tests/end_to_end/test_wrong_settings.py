"""Real commands with settings that no driver can use: exit 2, the setting named, nothing of its value in any output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import requirement

CANARY = "zq7canary"
TOOL = str(Path(__file__).parents[2] / "config" / "tools" / "jina_search.yaml")
COMMANDS = {
    "serve": ["serve"],
    "deadletters": ["deadletters", "list"],
    "tools list": ["tools", "list", "--project", "p", "--db"],
    "tools apply": ["tools", "apply", TOOL, "--project", "p", "--db", "--yes"],
    "call": ["call", "jina_search", "--project", "p", "--agent", "a"],
}
DSN, SERVERS = "postgresql://127.0.0.1:1/db", "nats://127.0.0.1:1"
AMBIGUOUS_DSN = f"postgresql://openapi:{CANARY}1/{CANARY}2@127.0.0.1:1/db"


def run(command: str, **variables: str) -> str:
    """Return the whole output of a command, which must exit with 2."""
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-m", "openapi_tool", *COMMANDS[command]],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", "PG_DSN": DSN, "NATS_SERVERS": SERVERS, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
@requirement("settings.errors")
def test_an_ambiguous_connection_string_is_shown_nowhere(command: str) -> None:
    output = run(command, PG_DSN=AMBIGUOUS_DSN)
    assert "postgres.dsn" in output
    assert "%2F" in output
    assert CANARY not in output


# fmt: off
WRONG = [
    ("serve", "postgres.dsn", {"PG_DSN": f"postgresql://{CANARY}:5432#{CANARY}@127.0.0.1:1/db"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://u:{CANARY}/x@127.0.0.1:4222"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://u:5?{CANARY}@127.0.0.1:4222"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://{CANARY}@::1:4222"}),
    ("serve", "egress.proxy", {"OPENAPI_TOOL__EGRESS__PROXY": f"http://u:{CANARY}/x@proxy:3128"}),
    ("serve", "telemetry.otlp_endpoint", {"OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT": f"http://u:5/{CANARY}@collector:1"}),
    ("serve", "OPENAPI_TOOL__NATS", {"OPENAPI_TOOL__NATS": f'{{"token": "{CANARY}'}),
    ("serve", "PGPORT", {"PGPORT": CANARY}),
    ("serve", "PGSSLMODE", {"PGSSLMODE": CANARY}),
    ("tools list", "PGPORT", {"PGPORT": CANARY}),
    ("tools list", "PGSSLMODE", {"PGSSLMODE": CANARY}),
    ("serve", "nats.nkey_seed_file", {"OPENAPI_TOOL__NATS__NKEY_SEED_FILE": "FILE"}),
    ("serve", "nats.credentials_file", {"OPENAPI_TOOL__NATS__CREDENTIALS_FILE": "FILE"}),
    ("serve", "health.host", {"OPENAPI_TOOL__HEALTH__HOST": f"{CANARY}..x", "OPENAPI_TOOL__HEALTH__PORT": "1"}),
]
# fmt: on


@pytest.mark.parametrize(("command", "setting", "variables"), WRONG)
@requirement("settings.errors")
def test_an_unusable_value_is_reported_and_shown_nowhere(
    command: str, setting: str, variables: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text(CANARY)
    output = run(command, **{name: str(file) if value == "FILE" else value for name, value in variables.items()})
    assert setting in output
    assert CANARY not in output
