"""The command line: `commands/` declares each command with its options, and imports the module that does the work.

That is mostly the module with the name of the command or of its group (`tools_apply` for `tools apply`). Some modules
serve several commands: `selection` finds what a command is about (with `dev_choice`), `kernel`, `gateway_state` and
`nats_connection` reach it, `output` and `tables` print.
"""

from __future__ import annotations

import os
import sys

from openapi_tool.cli.commands import app
from openapi_tool.cli.streams import guard_output
from openapi_tool.environment import likely_secrets
from openapi_tool.telemetry.logs import configure_logging, guard_crashes, log_crash
from openapi_tool.telemetry.redact import Redactor

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; mask secrets in logs, tracebacks and warnings, also in a crash.

    Characters that the terminal's encoding lacks are escaped.
    """
    configure_logging("warning", "console", Redactor(likely_secrets(os.environ)))
    guard_crashes()
    guard_output()
    try:
        app()
    except Exception as error:  # noqa: BLE001 - typer would print it unredacted
        log_crash(error)
        sys.exit(1)
    finally:
        sys.stdout.flush()
