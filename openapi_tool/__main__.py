"""Entry point of the command line; imports the rest later, because that takes a second."""

from __future__ import annotations

import signal
import sys

from openapi_tool.signals import guard_command, guard_service


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also during the import, and so does SIGTERM."""
    if sys.argv[1:2] == ["serve"]:
        guard_service()
    else:
        guard_command()
    try:
        from openapi_tool.cli import main as run  # noqa: PLC0415 - takes a second, during which signals may come

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # `INTERRUPTED` of `cli.common`, which may not be imported yet


if __name__ == "__main__":
    main()
