"""Build the wheel and the source distribution into dist/, and check both in an empty environment.

`make dist` uses the locked build backend; the check installs the locked packages from a package index, which takes a
minute.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import openapi_tool

ROOT = Path(__file__).parent.parent


def build(into: Path, source: Path = ROOT) -> tuple[Path, Path]:
    """Build `source` with the backend of this environment; return wheel and source distribution."""
    _run([sys.executable, "-m", "hatchling", "build", "--directory", str(into)], source)
    [wheel], [sdist] = into.glob("*.whl"), into.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Raise SystemExit if the source distribution gives another wheel, or the wheel does not run on its own."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        again, _ = build(Path(folder, "again"), Path(folder, sdist.name.removesuffix(".tar.gz")))
        if _content(wheel) != _content(again):
            raise SystemExit(f"{sdist.name} gives a wheel with other content than {wheel.name}")
        python = str(Path(folder, "venv", "bin", "python"))
        _run([sys.executable, "-m", "venv", str(Path(folder, "venv"))])
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*install, "--require-hashes", "-r", str(ROOT / "requirements-build.lock")])
        _run([*install, "--require-hashes", "--no-build-isolation", "-r", str(ROOT / "requirements.lock")])
        _run([*install, "--no-deps", "--no-index", str(wheel.absolute())])
        program = str(Path(folder, "venv", "bin", "openapi-tool"))
        if (version := _run([program, "--version"], Path(folder)).strip()) != openapi_tool.__version__:
            raise SystemExit(f"the installed program says {version}, not {openapi_tool.__version__}")
        definitions = sorted((ROOT / "config" / "tools").glob("jina_*.yaml"))
        _run([program, "tools", "lint", *map(str, definitions)], Path(folder))
        _run([python, "-c", "import openapi_tool.http.server, openapi_tool.mcp.stdio"], Path(folder))  # every door


def _content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _run(command: list[str], folder: Path = ROOT) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own


if __name__ == "__main__":
    built = build(ROOT / "dist")
    check(*built)
    sys.stdout.write("".join(f"dist/{file.name}\n" for file in built))
