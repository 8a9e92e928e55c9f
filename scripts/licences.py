"""Generate docs/licences.md for `make docs`; `python -m scripts.licences` fails if a licence is not allowed."""

from __future__ import annotations

import sys

from scripts.locked import ROOT, acceptable, packages

PAGE = ROOT / "docs" / "licences.md"
_HEAD = """# Licences

What `requirements.lock` installs beside openapi-tool, which is Apache-2.0: all of the image's Python packages. Written
by `make docs` from the packages' own metadata. A test fails where a licence is unknown or is none of those that may be
shipped beside Apache-2.0 code (`scripts/locked.py`); GPL, LGPL and AGPL are not among them. MPL-2.0 binds changes of
its own files only, and none is changed here.

| package | version | licence |
| --- | --- | --- |
"""


def licences_page() -> str:
    """The page."""
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
