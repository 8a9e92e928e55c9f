"""Signals to a `serve` process at any moment of its start, also as PID 1 of a container."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.requirements import requirement
from tests.waiting import WAIT_S

SERVE = (sys.executable, "-m", "openapi_tool", "serve")
# No server listens there, so it waits. With a variable of the interpreter, tests/forking.py does not fork for it.
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PG_DSN": "postgresql://127.0.0.1:1/kernel",
    "NATS_SERVERS": "nats://127.0.0.1:1",
    "PYTHONUNBUFFERED": "1",
}
ENDS_S = 10.0
DELAYS_MS = (0, 10, 50, 100, 300, 600, 1_000, 1_500, 2_500)  # the imports take a second, more on a busy machine
ISOLATED = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--")
IMPORTED_LAST = "pydantic_core"  # a library that the first import of the service loads


@cache
def may_isolate() -> bool:
    return bool(shutil.which("unshare")) and not subprocess.run([*ISOLATED, "true"], capture_output=True).returncode  # noqa: S603, PLW1510 - a fixed command


as_pid_1 = pytest.mark.skipif(not may_isolate(), reason="user namespaces are not permitted here")


def status(pid: int, field: str) -> int:
    """Return a mask of signals of a process: SigIgn or SigCgt."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    [mask] = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(mask, 16)


def is_in(mask: int, number: signal.Signals) -> bool:
    return bool(mask >> (number - 1) & 1)


def takes(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, or is a tini that waits for signals."""
    # tini waits in sigtimedwait, so it has no handlers; it ignores SIGTTOU as soon as it has blocked all others.
    return is_in(status(pid, "SigCgt"), number) or is_in(status(pid, "SigIgn"), signal.SIGTTOU)


def is_program(pid: int, name: str) -> bool:
    """Return whether a process runs this program, and no longer that of its parent."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith(name)


def child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(children[0]) if children else None


def wait_for_handler(pid: int, program: str, number: signal.Signals = signal.SIGTERM) -> None:
    give_up = time.monotonic() + WAIT_S
    while not (is_program(pid, program) and takes(pid, number)):
        assert time.monotonic() < give_up
        time.sleep(0.0005)


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            process.kill()  # unshare then kills its child
            process.wait()


@contextmanager
def started_as_pid_1(command: Sequence[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield `unshare`, which ends with the code of its child, and the process id of this child outside."""
    with started([*ISOLATED, *command], log) as process:
        give_up = time.monotonic() + WAIT_S
        while (child := child_of(process.pid)) is None:
            assert time.monotonic() < give_up
            time.sleep(0.0005)
        yield process, child


def code_of_pid_1(command: Sequence[str], program: str, delay_ms: int, log: Path) -> int:
    """Start a command as PID 1; send SIGTERM, this long after the process can take it; return the exit code."""
    with started_as_pid_1(command, log) as (process, pid):
        wait_for_handler(pid, program)
        assert program == "tini" or delay_ms or IMPORTED_LAST not in Path(f"/proc/{pid}/maps").read_text()
        time.sleep(delay_ms / 1000)
        os.kill(pid, signal.SIGTERM)
        return process.wait(ENDS_S)


@as_pid_1
@requirement("run.signals")
def test_as_pid_1_sigterm_ends_the_start_at_any_moment(tmp_path: Path) -> None:
    """Before it has a handler the kernel drops the signal: only an init process such as tini covers that moment."""
    with ThreadPoolExecutor(2) as workers:
        codes = workers.map(lambda ms: code_of_pid_1(SERVE, "python", ms, tmp_path / f"{ms}.log"), DELAYS_MS)
        assert dict(zip(DELAYS_MS, codes, strict=True)) == dict.fromkeys(DELAYS_MS, 0)


@as_pid_1
@pytest.mark.skipif(not shutil.which("tini"), reason="tini is not installed (Debian: apt-get install tini)")
@requirement("run.signals")
def test_under_tini_sigterm_ends_the_start_from_the_first_moment(tmp_path: Path) -> None:
    """Before the first line of the service has run the interpreter ends by the signal, which tini reports as 143."""
    command = ("tini", "--", *SERVE)
    with ThreadPoolExecutor(2) as workers:
        codes = list(workers.map(lambda ms: code_of_pid_1(command, "tini", ms, tmp_path / f"{ms}.log"), DELAYS_MS))
    assert set(codes) <= {0, 128 + signal.SIGTERM}
    assert codes[-1] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
@requirement("run.signals")
def test_a_stop_before_the_imports_ends_the_process_at_once_with_0(number: signal.Signals, tmp_path: Path) -> None:
    with started(SERVE, tmp_path / "log") as process:
        wait_for_handler(process.pid, "python", number)
        assert IMPORTED_LAST not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(number)
        assert process.wait(ENDS_S) == 0


@requirement("run.signals")
def test_another_command_ends_at_sigterm_as_if_killed(tmp_path: Path) -> None:
    """Its work is not done, so its exit code says so, also as PID 1 of a Job's container."""
    with started((sys.executable, "-m", "openapi_tool", "check"), tmp_path / "log") as process:
        wait_for_handler(process.pid, "python")
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_S) == 128 + signal.SIGTERM


@requirement("run.signals", "reload")
def test_other_signals_during_the_start_do_not_end_it_and_sighup_is_not_forgotten(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(SERVE, log) as process:
        wait_for_handler(process.pid, "python", signal.SIGHUP)
        others = (
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGALRM,
            signal.SIGVTALRM,
            signal.SIGPROF,
            signal.SIGIO,
            signal.SIGTTOU,
        )
        give_up = time.monotonic() + WAIT_S
        while not all(is_in(status(process.pid, "SigIgn"), number) for number in others):
            assert time.monotonic() < give_up
        for number in (*others, signal.SIGHUP):
            process.send_signal(number)
        while b'"reload.done"' not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_S) == 0
    assert b'"service.stopped"' in log.read_bytes()
