"""Packages in requirements.lock with their licences, read from installed metadata.

`make docs` writes docs/licences.md from them; `python -m scripts.licences` fails if a licence is not allowed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"

ELSEWHERE = {"colorama": "BSD-3-Clause"}
"""Packages of the lock that only other platforms install, with the licence from their metadata."""

_PINNED = re.compile(
    r"^(?P<name>[a-z0-9][\w.-]*)(?:\[[^\]]*\])?==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\\n]+?))? *"
    r"(?P<hashes>(?:\\\n\s+--hash=sha256:[0-9a-f]{64} *)+)",
    re.MULTILINE,
)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_SPDX = re.compile(r"[A-Za-z0-9.+() -]+")
_TEXTS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2 License": "Apache-2.0",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
_CLASSIFIER = "License :: OSI Approved :: "
_CLASSIFIERS = {"MIT License": "MIT", "Apache Software License": "Apache-2.0", "BSD License": "BSD-3-Clause"}
_KNOWN = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
    }
)
"""Licences that may be run with and shipped beside Apache-2.0 code; MPL-2.0 binds its own files only."""


@dataclass(frozen=True, slots=True)
class Package:
    """Package of the lock; `hashes` are SHA-256 of its files, `marker` is the condition of its installation."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    licence: str


def packages() -> Iterator[Package]:
    """Yield every package of the lock, by name."""
    for match in _PINNED.finditer(LOCK.read_text(encoding="utf-8")):
        name = match["name"]
        hashes = tuple(sorted(_HASH.findall(match["hashes"])))
        yield Package(name, match["version"], match["marker"] or "", hashes, ELSEWHERE.get(name) or licence(name))


def licence(name: str) -> str:
    """Return the normalised SPDX expression from an installed package's metadata; empty if unknown."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return ""
    expression = _first(about, "License-Expression")
    text = _first(about, "License").strip()
    if not expression and text and "\n" not in text:
        expression = _TEXTS.get(text, text)
    classifiers = [entry.removeprefix(_CLASSIFIER) for entry in about.get_all("Classifier", [])]
    return expression or next((_CLASSIFIERS[entry] for entry in classifiers if entry in _CLASSIFIERS), "")


def _first(about: PackageMetadata, field: str) -> str:
    return next(iter(about.get_all(field, [])), "")


def acceptable(expression: str) -> bool:
    """Return whether all licences of an SPDX expression are allowed; for alternatives, whether one is."""
    if not expression or not _SPDX.fullmatch(expression):
        return False
    plain = expression
    while (inner := re.search(r"\(([^()]*)\)", plain)) is not None:
        plain = plain[: inner.start()] + ("MIT" if acceptable(inner[1]) else "no") + plain[inner.end() :]
    return any(all(part.strip() in _KNOWN for part in choice.split(" AND ")) for choice in plain.split(" OR "))


PAGE = ROOT / "docs" / "licences.md"
_HEAD = """# Licences

What `requirements.lock` installs beside openapi-tool, which is Apache-2.0: all of the image's Python packages. Written
by `make docs` from the packages' own metadata. A test fails if a licence is unknown or not among those that may be
shipped beside Apache-2.0 code (`scripts/licences.py`); GPL, LGPL and AGPL are not among them. MPL-2.0 binds changes of
its own files only, and none is changed here.

| package | version | licence |
| --- | --- | --- |
"""


def licences_page() -> str:
    """Return docs/licences.md."""
    rows = (f"| `{package.name}` | {package.version} | {package.licence or 'unknown'} |" for package in packages())
    return _HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Print each licence that is not allowed; return 1 if there is one."""
    refused = [package for package in packages() if not acceptable(package.licence)]
    for package in refused:
        sys.stdout.write(f"{package.name} {package.version}: {package.licence or 'unknown'} may not be used\n")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
