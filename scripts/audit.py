"""Look up known vulnerabilities of the packages in requirements.lock: `python -m scripts.audit PIP_AUDIT`.

Exits with 0 if every package was looked up and none is known to be vulnerable, with 1 if one is, and with 3 if the data
of some package could not be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from scripts.licences import LOCK, packages

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


def main() -> int:
    """Ask each service until one knows every package."""
    names = {package.name for package in packages()}
    results = []
    for service in _SERVICES:
        results.append(verdict(audited(sys.argv[1], service), names))
        if results[-1][0] != NOT_CHECKED:
            break
    code, text = results[-1] if results[-1][0] != NOT_CHECKED else results[0]
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
