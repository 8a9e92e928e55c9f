"""Print the size of the code; with --check fail if it exceeds the limits.

A function counts from its `def` to its last line, without decorators and docstring.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "openapi_tool"
AIMS = {
    "function lines, median": 7,
    "function lines, 90th percentile": 25,
    "function lines, longest": 60,
    "file lines, longest": 400,
    "functions without full annotations": 0,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Measured:
    """One function."""

    where: str
    lines: int
    annotated: bool


def measure(path: Path) -> Iterator[Measured]:
    """Yield every function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            where = f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"
            yield Measured(where, _lines(node), _annotated(node))


def _lines(node: Function) -> int:
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    inside = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - inside


def _annotated(node: Function) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    rest = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
    named = [argument for argument in (*arguments, *rest) if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(argument.annotation is not None for argument in named)


def figures(functions: list[Measured], files: dict[str, int]) -> dict[str, int]:
    """Return the figures that have an aim."""
    lengths = sorted(function.lines for function in functions)
    return {
        "function lines, median": round(statistics.median(lengths)),
        "function lines, 90th percentile": lengths[int(len(lengths) * 0.9)],
        "function lines, longest": lengths[-1],
        "file lines, longest": max(files.values()),
        "functions without full annotations": sum(not function.annotated for function in functions),
    }


def main() -> int:
    """Print the table; with --check return 1 if an aim is missed."""
    paths = sorted(PACKAGE.rglob("*.py"))
    functions = [function for path in paths for function in measure(path)]
    files = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    totals = figures(functions, files)
    out = sys.stdout.write
    out(f"{len(paths)} files, {sum(files.values())} lines, {len(functions)} functions\n")
    for name, aim in AIMS.items():
        out(f"{name:38} {totals[name]:5}   aim: at most {aim}\n")
    longest = max(functions, key=lambda function: function.lines)
    out(f"longest function: {longest.where} ({longest.lines})\n")
    out(f"longest file: {max(files, key=lambda name: files[name])}\n")
    return int("--check" in sys.argv and any(totals[name] > aim for name, aim in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
