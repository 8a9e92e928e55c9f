"""Remove each check that guards money, identity, secrets or loss, and verify that its test fails.

`python -m scripts.mutate [--only SUBSTRING] [--workers N]` works in copies of the project and does not
change the checkout. The list is tests/mutations.py. The last line is one JSON object; the exit code is 0
only if the test of every mutation failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
PACKAGE = "openapi_tool"
COPIED = (PACKAGE, "tests", "scripts", "config", "docs", "helm", "pyproject.toml", "SECURITY.md")
TIMEOUT_S = 120.0
SEED = "--hypothesis-seed=0"
RED, SURVIVED, BROKEN = "red", "survived", "broken"
_TESTS_FAILED = 1
_SHOWN_LINES = 15


@dataclass(frozen=True, slots=True)
class Run:
    """Exit code and output of pytest; `code` is None after a timeout."""

    code: int | None
    output: str

    @property
    def verdict(self) -> str:
        """Return `red` only if a test failed or hung: a broken fixture or import proves nothing."""
        if self.code is None or (self.code == _TESTS_FAILED and "\nFAILED " in self.output):
            return RED
        return SURVIVED if self.code == 0 else BROKEN


def problems(mutations: Sequence[Mutation]) -> Iterator[str]:
    """Yield the mistakes in the list itself."""
    for mutation in mutations:
        occurrences = _read(ROOT / PACKAGE / mutation.file).count(mutation.old)
        if occurrences != 1 or mutation.old == mutation.new:
            yield f"{mutation.file} holds {occurrences} times: {mutation.old}"
        module, _, test = mutation.test.partition("::")
        if f"def {test}(" not in _read(ROOT / module):
            yield f"{mutation.file}: no such test: {mutation.test}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def copy_project(folder: Path) -> Path:
    """Return a copy of the project in which pytest can run, without compiled files."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(copy: Path, tests: Sequence[str], timeout_s: float | None = TIMEOUT_S) -> Run:
    """Run tests on the copy's own code."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", SEED, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(  # noqa: S603 - our own tests
            command,
            cwd=copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Run(None, f"no end within {timeout_s} s\n")
    return Run(done.returncode, done.stdout)


def try_mutation(copy: Path, mutation: Mutation) -> Run:
    """Change the copy, run the test, change it back."""
    path = copy / PACKAGE / mutation.file
    original = path.read_text(encoding="utf-8")
    _write(path, original.replace(mutation.old, mutation.new))
    try:
        return run_tests(copy, [mutation.test])
    finally:
        _write(path, original)


def _write(path: Path, text: str) -> None:
    """Write a module and delete its bytecode, which Python may reuse if the time (in seconds) and size are equal."""
    path.write_text(text, encoding="utf-8")
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def run_all(mutations: Sequence[Mutation], copies: Sequence[Path]) -> Iterator[tuple[Mutation, Run]]:
    """Try every mutation, as many at once as there are copies."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def try_one(mutation: Mutation) -> Run:
        copy = free.get()
        try:
            return try_mutation(copy, mutation)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as workers:
        yield from zip(mutations, workers.map(try_one, mutations), strict=True)


def report(mutation: Mutation, run: Run) -> str:
    """Return one line for a mutation; if it is not red, also the change and the end of pytest's output."""
    line = f"{run.verdict:8}  {mutation.file}  {mutation.test}\n"
    if run.verdict == RED:
        return line
    end = "\n".join(run.output.splitlines()[-_SHOWN_LINES:])
    return f"{line}  - {mutation.old}\n  + {mutation.new}\n{end}\n"


def mutate(mutations: Sequence[Mutation], workers: int) -> dict[str, list[str]]:
    """Return descriptions of the mutations by verdict. Raises SystemExit if tests fail without any mutation."""
    verdicts: dict[str, list[str]] = {RED: [], SURVIVED: [], BROKEN: []}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [copy_project(Path(folder) / str(number)) for number in range(workers)]
        untouched = run_tests(copies[0], sorted({mutation.test for mutation in mutations}), None)
        if untouched.code != 0:
            raise SystemExit(f"{untouched.output}the tests fail without any mutation")
        for mutation, run in run_all(mutations, copies):
            _print(report(mutation, run))
            verdicts[run.verdict].append(f"{mutation.file}: {mutation.old}")
    return verdicts


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> int:
    """Check the list, then try it; return 0 if every mutation was detected."""
    parser = argparse.ArgumentParser(description="Remove each check in turn and verify that its test fails.")
    parser.add_argument("--only", default="", help="only mutations whose file or test contains this text")
    parser.add_argument("--workers", type=int, default=2, help="number of concurrent copies")
    arguments = parser.parse_args()
    wrong = list(problems(MUTATIONS))
    if wrong:
        _print("\n".join([*wrong, "the list of mutations is wrong: tests/mutations.py\n"]))
        return 1
    chosen = [mutation for mutation in MUTATIONS if arguments.only in f"{mutation.file} {mutation.test}"]
    if not chosen:
        _print(f"no mutation holds {arguments.only!r}\n")
        return 1
    began = time.monotonic()
    verdicts = mutate(chosen, arguments.workers)
    seconds = round(time.monotonic() - began, 1)
    red, survived, broken = (verdicts[verdict] for verdict in (RED, SURVIVED, BROKEN))
    _print(f"{len(chosen)} mutations: {len(red)} red, {len(survived)} survived, {len(broken)} broken\n")
    summary = {"mutations": len(chosen), "red": len(red), "survived": survived, "broken": broken, "seconds": seconds}
    _print(json.dumps(summary) + "\n")
    return int(len(red) != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
