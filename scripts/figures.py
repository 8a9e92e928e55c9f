"""Print the size of the code; with --check fail if it exceeds AIMS; with --against REV also print that revision.

A function counts from its `def` to its last line, without decorators and docstring. Its nesting is the number of
compound statements around its innermost statement.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "openapi_tool"
AIMS = {"functions without full annotations": 0}
"""Sizes have no aim: a module is as long as its subject."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Compound = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match


@dataclass(frozen=True)
class Measured:
    """One function."""

    where: str
    lines: int
    nesting: int
    annotated: bool


def measure(path: Path, root: Path) -> Iterator[Measured]:
    """Yield every function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
            yield Measured(where, _lines(node), _nesting(node), _annotated(node))


def _lines(node: Function) -> int:
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    inside = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - inside


def _nesting(node: ast.AST) -> int:
    """Return the depth of compound statements; `elif` adds none, a function within starts again."""
    depth = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        depth = max(depth, _nesting(child) + (isinstance(child, Compound) and not is_elif))
    return depth


def _annotated(node: Function) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    rest = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
    named = [argument for argument in (*arguments, *rest) if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(argument.annotation is not None for argument in named)


@dataclass(frozen=True)
class Figures:
    """Figures of one tree by name; `longest` locates its longest function and file."""

    values: dict[str, float]
    longest: str


def figures(root: Path, tracked: int) -> Figures:
    """Return the figures of the tree below `root`."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
    functions = [function for path in paths for function in measure(path, root)]
    lengths = sorted(function.lines for function in functions)
    lines = sum(map(len, texts.values()))
    comments = sum(map(_comments, paths))
    longest = max(functions, key=lambda function: function.lines)
    longest_file = max(paths, key=lambda path: len(texts[path]))
    values = {
        "function lines, median": round(statistics.median(lengths)),
        "function lines, 90th percentile": lengths[int(len(lengths) * 0.9)],
        "function lines, longest": lengths[-1],
        "file lines, longest": max(map(len, texts.values())),
        "functions without full annotations": sum(not function.annotated for function in functions),
        "nesting, 90th percentile": sorted(function.nesting for function in functions)[int(len(functions) * 0.9)],
        "nesting, deepest": max(function.nesting for function in functions),
        "tracked files": tracked,
        f"modules in {PACKAGE}": len(paths),
        f"lines in {PACKAGE}": lines,
        f"functions in {PACKAGE}": len(functions),
        "lines with a comment, %": round(100 * comments / lines, 1),
        "uses of Any in tools and protocol": sum(map(_uses_of_any, paths)),
    }
    return Figures(values, f"{longest.where} ({longest.lines}), {longest_file.relative_to(root)}")


def _comments(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))


def _uses_of_any(path: Path) -> int:
    if path.parent.name not in ("tools", "protocol"):
        return 0
    names = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in names)


def _git(*arguments: str) -> bytes:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True).stdout  # noqa: S603, S607


def of_revision(revision: str) -> Figures:
    """Return the figures of a commit."""
    archive = _git("archive", revision)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(("tar", "-x", "-C", folder), input=archive, check=True)  # noqa: S603, S607
        return figures(Path(folder), len(_git("ls-tree", "-r", "--name-only", revision).splitlines()))


def _tracked() -> int:
    """Return the number of tracked files; 0 outside of a git checkout."""
    try:
        return len(_git("ls-files").splitlines())
    except (OSError, subprocess.CalledProcessError):
        return 0


def main() -> int:
    """Print the table; with --check return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure exceeds its aim")
    parser.add_argument("--against", metavar="REV", help="a git revision to print beside")
    options = parser.parse_args()
    now, before = figures(ROOT, _tracked()), of_revision(options.against) if options.against else None
    out = sys.stdout.write
    for name, value in now.values.items():
        aim = f"   aim: at most {AIMS[name]}" if name in AIMS else ""
        earlier = f"{before.values[name]:8g}" if before else ""
        out(f"{name:38}{earlier}{value:8g}{aim}\n")
    seconds = ROOT / ".pytest_cache/v/suite/seconds"  # written by tests/conftest.py
    taken = seconds.read_text(encoding="utf-8") if seconds.is_file() else "-"
    width = 8 if before is None else 16
    out(f"{'seconds of the last whole `make test`':38}{taken:>{width}}   aim: less than 240 on two cores\n")
    out(f"longest function and file: {now.longest}\n")
    return int(options.check and any(now.values[name] > aim for name, aim in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
