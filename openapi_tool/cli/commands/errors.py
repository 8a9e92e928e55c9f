"""What the program prints for invalid settings and options."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from openapi_tool.cli.output import MAX_ERROR_CHARS, USAGE, print_status
from openapi_tool.protocol.abridging import abridged
from openapi_tool.settings_error import SettingsError


class ProgramGroup(TyperGroup):
    """The group of all commands."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the options of the program itself; reword typer's errors."""
        try:
            return super().make_context(*args, **options)
        except Exception as error:
            _reword(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print the mistakes of invalid settings, reword typer's errors."""
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            for problem in error.problems:
                print_status(f"openapi-tool: {problem}")
            raise typer.Exit(USAGE) from None
        except Exception as error:  # typer exports no class of all its errors; others are raised as they are
            _reword(error)
            raise


def _reword(error: Any) -> None:
    """Replace the message of an error of typer, which quotes pydantic, and for `--version` suggests other options."""
    if isinstance(error, typer.BadParameter):
        # "Value error, Input should be a valid integer, unable to parse …" becomes "must be a valid integer"
        words = error.message.removeprefix("Value error, ").partition(", unable to parse")[0]
        error.message = words.replace("Input should be", "must be")
    elif getattr(error, "option_name", None) == "--version":  # typer does not export this exception class
        error.message = "put --version before the command: openapi-tool --version"
        error.possibilities = None
    if isinstance(error, typer.TyperException) and isinstance(getattr(error, "message", None), str):
        error.message = abridged(error.message, MAX_ERROR_CHARS)  # it quotes the option or its value
