"""Private names of dependencies that the package uses, found in its syntax trees."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit"}  # of named tuples, and `os._exit`
_OWN = "openapi_tool"


def private_names(package: Path) -> dict[str, set[str]]:
    """Return the private names of dependencies that each module imports, uses or overrides."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = str(path.relative_to(package))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {*_attributes(tree)} - _defined(tree)
        names |= {*_imported(tree), *_inherited(tree, f"{_OWN}.{module.removesuffix('.py').replace('/', '.')}")}
        if names:
            found[module] = names
    return found


def _defined(tree: ast.Module) -> set[str]:
    """Return the functions and attributes that a module defines."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(_OWN):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from filter(_is_private, names)


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes of anything but `self`, also in patterns and in `getattr`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if _is_private(name):
                yield name
            case ast.MatchClass(kwd_attrs=names):
                yield from filter(_is_private, names)
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if _is_private(name):
                    yield name


def _inherited(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield each private attribute of a base class in a dependency that a class uses or overrides."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not node.bases:
            continue
        own = getattr(importlib.import_module(module), node.name, None)
        if own is None:  # local to a function
            continue
        named = {use.attr for use in ast.walk(node) if isinstance(use, ast.Attribute) and _is_of_instance(use)}
        named |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        for base in own.__mro__[1:]:
            dependency = base.__module__.partition(".")[0]
            if dependency != _OWN and dependency not in sys.stdlib_module_names:
                yield from filter(_is_private, named & _names_of(base))


def _is_of_instance(node: ast.Attribute) -> bool:
    match node.value:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def _names_of(base: type) -> set[str]:
    """Return the attributes of a class, those included that only its methods set."""
    names = set(vars(base))
    try:
        return names | set(re.findall(r"\bself\.(_\w+)", inspect.getsource(base)))
    except (OSError, TypeError):  # compiled
        return names
