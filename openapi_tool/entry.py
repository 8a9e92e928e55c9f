"""Entry point of the command line; imports the rest later, because that takes a second."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of SIGINT."""


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also during the import."""
    try:
        from openapi_tool.cli import main as run  # noqa: PLC0415 - takes a second, during which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
