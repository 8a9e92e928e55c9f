"""`openapi-tool` with one command that crashes: it runs the code in the variable CRASH, which can use SECRET."""

from __future__ import annotations

import os

import typer

from openapi_tool import cli

if __name__ == "__main__":
    cli.app = typer.Typer(pretty_exceptions_enable=False)

    @cli.app.command()
    def crash() -> None:
        exec(os.environ["CRASH"], {"SECRET": os.environ["JINA_API_KEY"]})  # noqa: S102 - the test's own code

    cli.main()
