"""The class of all commands, which refuses an empty path before typer takes it for the current folder."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from openapi_tool.cli.output import fail

Function = TypeVar("Function", bound=Callable[..., Any])


class ProgramCommand(TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line; exit with 2 if a path among them is empty."""
        if not ctx.resilient_parsing and any(not word or word.endswith("=") for word in args):
            self._refuse_empty_paths(ctx, args)
        return super().parse_args(ctx, args)

    def _refuse_empty_paths(self, ctx: Any, args: list[str]) -> None:
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        types = get_type_hints(unwrap(self.callback or fail))
        for parameter in self.params:
            value = given.get(parameter.name)
            texts = value if isinstance(value, list | tuple) else [value]
            if "" in texts and _is_path(types.get(str(parameter.name))):
                option = parameter.opts[0]
                name = option if option.startswith("-") else option.upper()
                fail(f"{name}: is empty; give the path")


def _is_path(annotation: Any) -> bool:
    """Return whether the type of a parameter is Path, or one that contains it, such as a list of paths."""
    return annotation is Path or any(map(_is_path, get_args(annotation)))


class Commands(typer.Typer):
    """Commands of one subject, all of the class `ProgramCommand`."""

    def command(self, *args: Any, **options: Any) -> Callable[[Function], Function]:
        """Return a decorator for the function of a command."""
        return super().command(*args, cls=ProgramCommand, **options)
