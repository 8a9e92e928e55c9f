"""What an image is made of: pinned, licensed, listed, and audited without false comfort."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import audit, sbom
from scripts.audit import CLEAN, NOT_CHECKED, VULNERABLE, verdict
from scripts.locked import ELSEWHERE, LOCK, ROOT, acceptable, licence, packages
from tests.promises import requirement

FOUND = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": [], "description": ""}


def looked_up(name: str, *vulnerabilities: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulnerabilities)}


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": "not found and could not be audited"}


@requirement("supply.locked")
def test_the_image_installs_only_what_the_lock_pins() -> None:
    installs = re.findall(r"pip (?:install|wheel) ([^&\n]+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(installs) == 4
    for arguments in installs:
        assert arguments.startswith(("--require-hashes -r requirements", "--no-deps --no-")), arguments


@requirement("supply.locked")
def test_every_package_of_the_lock_is_read() -> None:
    found = list(packages())
    assert [package.name for package in found] == re.findall(r"^([a-z0-9][\w.-]*)", LOCK.read_text(), re.MULTILINE)
    assert sum(len(package.hashes) for package in found) == LOCK.read_text().count("--hash=sha256:")


@requirement("supply.locked")
def test_every_licence_is_known_and_may_be_used() -> None:
    assert [(package.name, package.licence) for package in packages() if not acceptable(package.licence)] == []
    assert {name for name in ELSEWHERE if licence(name)} <= ({"colorama"} if sys.platform == "win32" else set())


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-2.0-or-later", False),
        ("MIT AND (GPL-2.0-only OR AGPL-3.0-only)", False),
        ("LGPL-3.0-only", False),
        ("Proprietary", False),
        ("", False),
    ],
)
@requirement("supply.locked")
def test_a_licence_is_taken_only_where_every_part_of_it_is_known(expression: str, expected: bool) -> None:  # noqa: FBT001
    assert acceptable(expression) is expected


@requirement("supply.locked")
def test_the_sbom_names_every_file_of_the_lock_and_nothing_of_the_machine() -> None:
    document = sbom.sbom()
    assert document == sbom.sbom()
    assert [(part["name"], part["version"]) for part in document["components"]] == [
        (package.name, package.version) for package in packages()
    ]
    hashes = [entry["content"] for part in document["components"] for entry in part["externalReferences"][0]["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:(\w{64})", LOCK.read_text()))
    assert all(part["licenses"] for part in document["components"])
    assert str(ROOT) not in json.dumps(document)


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        ([looked_up("a"), looked_up("b")], CLEAN, "2 packages, nothing known"),
        ([looked_up("a"), looked_up("b", FOUND)], VULNERABLE, "b: PYSEC-1, fixed in 2.0"),
        ([skipped("a"), looked_up("b", FOUND)], VULNERABLE, "NOT CHECKED: no vulnerability data for 1 of 2"),
        ([looked_up("a"), skipped("b")], NOT_CHECKED, "NOT CHECKED: no vulnerability data for 1 of 2"),
        ([looked_up("a")], NOT_CHECKED, "for 1 of 2"),
        ([], NOT_CHECKED, "for 2 of 2"),
    ],
)
@requirement("supply.audit")
def test_an_audit_is_clean_only_where_every_package_was_looked_up(
    found: list[dict[str, Any]], expected: int, says: str
) -> None:
    code, text = verdict(found, {"a", "b"})
    assert code == expected
    assert says in text


@pytest.mark.parametrize("output", ["", "Traceback", "[]", '{"dependencies": []}', "{}"])
@requirement("supply.audit")
def test_an_auditor_that_fails_is_no_clean_bill(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["audit", str(tool)])
    assert audit.main() == NOT_CHECKED
    assert capsys.readouterr().out.startswith("NOT CHECKED")
