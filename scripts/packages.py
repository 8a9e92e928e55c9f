"""Packages in requirements.lock: licences (`make docs`), list in CycloneDX (`sbom`), known vulnerabilities (`audit`).

`make sbom` writes dist/openapi-tool.cdx.json. It is reproducible: the same lock gives the same bytes. It contains no
time; the serial number is derived from the content.

`audit PIP_AUDIT` exits with 0 if every package was looked up and none is known to be vulnerable, with 1 if one is, and
with 3 if the data of some package could not be reached.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import openapi_tool

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"

ELSEWHERE = {"colorama": "BSD-3-Clause", "httpx2-jsfetch": "BSD-3-Clause", "pywin32": "PSF-2.0"}
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
"""Allowed licences: their code may be shipped beside Apache-2.0 code. MPL-2.0 binds only its own files."""


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
    plain = expression  # each expression in parentheses becomes a licence with the same verdict
    while (inner := re.search(r"\(([^()]*)\)", plain)) is not None:
        plain = plain[: inner.start()] + ("MIT" if acceptable(inner[1]) else "no") + plain[inner.end() :]
    return any(all(part.strip() in _KNOWN for part in choice.split(" AND ")) for choice in plain.split(" OR "))


PAGE = ROOT / "docs" / "internal" / "dependencies.md"
_TABLE = re.compile(r"(<!-- make docs: licences -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| package | version | licence |\n| --- | --- | --- |\n"


def dependencies_page() -> str:
    """Return docs/internal/dependencies.md with its table of licences updated."""
    rows = (f"| `{package.name}` | {package.version} | {package.licence or 'unknown'} |" for package in packages())
    table = _HEAD + "\n".join(rows)
    return _TABLE.sub(lambda part: f"{part[1]}\n{table}\n\n{part[2]}", PAGE.read_text(encoding="utf-8"))


TARGET = ROOT / "dist" / "openapi-tool.cdx.json"


def sbom() -> dict[str, Any]:
    """Return the list of packages as a CycloneDX document."""
    itself = f"pkg:pypi/openapi-tool@{openapi_tool.__version__}"
    components = [_component(package) for package in packages()]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, itself + LOCK.read_text(encoding='utf-8'))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": itself,
                "name": "openapi-tool",
                "version": openapi_tool.__version__,
                "purl": itself,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": components,
        "dependencies": [{"ref": itself, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _component(package: Package) -> dict[str, Any]:
    """Return a package with the hashes of all its files; an installation uses one of them."""
    purl = f"pkg:pypi/{package.name}@{package.version}"
    hashes = [{"alg": "SHA-256", "content": digest} for digest in package.hashes]
    marker = [{"name": "openapi-tool:marker", "value": package.marker}] if package.marker else []
    return {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        "licenses": [{"expression": package.licence}] if package.licence else [],
        "externalReferences": [{"type": "distribution", "url": purl, "hashes": hashes}],
        **({"properties": marker} if marker else {}),
    }


def write_sbom() -> None:
    """Write the CycloneDX document and print its path."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(sbom(), indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{TARGET.relative_to(ROOT)}: {sum(1 for _ in packages())} packages\n")


CLEAN, VULNERABLE, NOT_CHECKED = 0, 1, 3
_SERVICES = ("pypi", "osv")


def audited(pip_audit: str, service: str) -> Sequence[dict[str, Any]]:
    """Return a service's findings for each package; nothing if it cannot be reached."""
    command = [pip_audit, "--requirement", str(LOCK), "--require-hashes", "--disable-pip", "--format", "json"]
    command += ["--progress-spinner", "off", "--vulnerability-service", service]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - named by the Makefile
    try:
        findings: Sequence[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return []
    return findings


def verdict(findings: Sequence[dict[str, Any]], names: set[str]) -> tuple[int, str]:
    """Return exit code and message; each of `names` must have been looked up."""
    known = {entry["name"]: entry["vulns"] for entry in findings if "vulns" in entry and "skip_reason" not in entry}
    lines = [
        f"{name}: {vulnerability['id']}, fixed in {', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for name, vulnerabilities in sorted(known.items())
        for vulnerability in vulnerabilities
    ]
    missing = names - known.keys()
    if missing:
        lines.append(f"NOT CHECKED: no vulnerability data for {len(missing)} of {len(names)} packages")
    if any(known.values()):
        return VULNERABLE, "\n".join(lines)
    return (NOT_CHECKED, "\n".join(lines)) if missing else (CLEAN, f"{len(names)} packages, nothing known")


def audit(pip_audit: str) -> int:
    """Ask each service until one knows every package; print the verdict and return its exit code."""
    names = {package.name for package in packages()}
    results = []
    for service in _SERVICES:
        results.append(verdict(audited(pip_audit, service), names))
        if results[-1][0] != NOT_CHECKED:
            break
    # If no service knows every package, report the verdict of the first.
    code, text = results[-1] if results[-1][0] != NOT_CHECKED else results[0]
    sys.stdout.write(text + "\n")
    return code


def main() -> int:
    """Run the command that the arguments name; return its exit code."""
    if sys.argv[1:] == ["sbom"]:
        write_sbom()
        return 0
    _, pip_audit = sys.argv[1:]
    return audit(pip_audit)


if __name__ == "__main__":
    sys.exit(main())
