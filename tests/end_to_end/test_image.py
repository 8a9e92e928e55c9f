"""The image without a container engine: build steps in a folder; the result as another user on a read-only root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from openapi_tool import __version__
from scripts.chart import values
from scripts.docs import ROOT
from scripts.licences import packages as locked
from tests.end_to_end.kubelet import USER, isolated
from tests.requirements import requirement

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MAX_BYTES = 250_000_000
BASE = "python:3.11-slim-bookworm@sha256:" + "0" * 64


def instructions(stage: str, name: str) -> list[str]:
    """Return the arguments of every instruction of this name, continuation lines joined."""
    lines = re.sub(r"\\\n", " ", stage)
    return re.findall(rf"^{name} (.*)$", lines, re.MULTILINE)


def stages() -> tuple[str, str]:
    """Return build stage and final stage."""
    _, build, final = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    return build, final


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """Result of the build stage, below a folder instead of the root."""
    root = Path(tempfile.mkdtemp(prefix="openapi-tool-image-"))
    root.chmod(0o755)
    build, _ = stages()
    _copy_context(build, root / "src")
    for step in instructions(build, "RUN"):
        command = step.replace("/opt/", f"{root}/opt/")
        subprocess.run(  # noqa: S603 - the repository's own steps
            ["/bin/sh", "-e", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}'],
            cwd=root / "src",
            check=True,
            timeout=600,
        )
    yield root
    shutil.rmtree(root)


def _copy_context(build: str, source: Path) -> None:
    """Copy what COPY names, as far as .dockerignore lets it through."""
    left_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] not in "!*"]
    source.mkdir()
    for words in instructions(build, "COPY"):
        for name in words.split()[:-1]:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
    for path in [source / name for name in left_out]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*isolated(image, USER), str(image / "opt/openapi-tool/bin/openapi-tool"), *arguments]
    return subprocess.run(  # noqa: S603 - what the steps have made
        command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False
    )


@requirement("image.steps", "supply.locked")
def test_the_steps_make_an_entry_point_for_another_user_on_a_read_only_root(image: Path) -> None:
    """One test, so that the steps run once, also with several test processes."""
    _holds_what_is_locked_and_nothing_else(image / "opt/openapi-tool")
    assert run(image, "--version").stdout.strip() == __version__
    assert "Run tool calls until SIGTERM." in run(image, "serve", "--help").stdout
    checked = run(image, "check")
    assert (checked.returncode, checked.stdout) == (2, "")
    assert "postgres: is missing; set PG_DSN" in checked.stderr
    assert "No such command 'demo'" in run(image, "demo").stderr


def _holds_what_is_locked_and_nothing_else(prefix: Path) -> None:
    size = sum(file.stat().st_size for file in prefix.rglob("*") if file.is_file() and not file.is_symlink())
    sys.stdout.write(f"installed: {size / 1e6:.0f} MB\n")
    assert size < MAX_BYTES
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    names = {path.name.partition("-")[0].replace("_", "-").lower() for path in packages.glob("*.dist-info")}
    assert names - {package.name for package in locked()} == {"openapi-tool"}
    assert not [
        name for name in ("local", "testing.py", "pytest_plugin.py") if (packages / "openapi_tool" / name).exists()
    ]
    assert list((packages / "openapi_tool/__pycache__").glob("service.*.pyc")), (
        "compiled, since the file system is read-only later"
    )


@requirement("image.steps")
def test_the_final_stage_has_no_installer_and_a_numeric_user() -> None:
    _, final = stages()
    (removal,) = instructions(final, "RUN")
    assert "pip uninstall" in removal
    assert "ensurepip" in removal
    assert instructions(final, "USER") == [f"{USER}:{USER}"]
    assert [value.default for value in values() if value.path == "runAsUser"] == [USER]
    assert instructions(final, "COPY") == ["--from=build /opt/openapi-tool /opt/openapi-tool"]
    assert (instructions(final, "ENTRYPOINT"), instructions(final, "CMD")) == (['["openapi-tool"]'], ['["serve"]'])
    (labels,) = instructions(final, "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize(
    ("base", "code"),
    [
        (BASE, 0),
        (f"registry.example.org:5000/{BASE}", 0),
        ("", 2),
        ("python:3.11-slim-bookworm", 2),
        ("python@sha256:", 2),
        (BASE[:-1], 2),
        (f"{BASE}0", 2),
        (BASE.replace("000", "00g", 1), 2),
        (BASE.replace("000", "00A", 1), 2),
        (BASE.replace("sha256", "sha512"), 2),
        (BASE.partition("@")[2], 2),
        (f"@{BASE.partition('@')[2]}", 2),
        (f"{BASE} {BASE}", 2),
        (f"{BASE} --network=host", 2),
    ],
)
@requirement("image.steps")
def test_a_release_demands_the_digest_of_its_base(base: str, code: int) -> None:
    done = subprocess.run(  # noqa: S603 - the repository's own Makefile
        ["make", "--no-print-directory", "image", "DOCKER=echo", f"BASE={base}"],  # noqa: S607 - as it is found
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    if code:
        assert "BASE=python:3.11-slim-bookworm@sha256:" in done.stdout
    else:
        assert f"--build-arg BASE={base}" in done.stdout
        assert f"--build-arg VERSION={__version__}" in done.stdout
