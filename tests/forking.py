"""Start `python -m openapi_tool…` and `python -m tests…` by forking a process that has already imported the package.

Imports are most of the cost of such a process. A forked child (of the "template" process) behaves like a fresh
interpreter: it has its own session, descriptors, environment and arguments, and runs its module as `__main__`. Linux
only: the test process sets PR_SET_CHILD_SUBREAPER and so becomes the parent of these children, whose direct parent ends
at once. Then `subprocess.Popen` can wait for them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import inspect
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO, cast

import typer.main

from tests.support import copy_clusters

_COMMANDS = [
    "budgets",
    "call",
    "check",
    "deadletters",
    "demo",
    "dev",
    "durable",
    "inspect",
    "limits",
    "permissions",
    "serve",
    "switches",
    "tools",
    "tools_apply",
    "tools_registry",
    "top",
    "usage",
]
_PRELOADED = (
    "openapi_tool.cli",
    *(f"openapi_tool.cli.{name}" for name in _COMMANDS),
    "openapi_tool.local.executor",
    "openapi_tool.local.double",
)
_PACKAGES = ("openapi_tool", "tests")
_STARTERS = ("demo", "dev")
"""Commands of `openapi_tool` that start servers."""

_PR_SET_CHILD_SUBREAPER = 36
_INTERPRETER = ("PYTHON", "LC_", "LANG")  # prefixes of variables that an interpreter reads only at its start
# Names of arguments of Popen._execute_child: descriptors of the child's stdin, stdout and stderr; all pipe ends;
# and options for which the process is not forked unless they have a default value.
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_NOT_FORKED = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
_DEFAULTS = (None, False, ())
_Popen = subprocess.Popen
_EXECUTE = inspect.signature(_Popen._execute_child)  # type: ignore[attr-defined]  # noqa: SLF001 - replaced on purpose


class _Template:
    """This process's connection to the template, which ends when the socket `ours` is closed."""

    def __init__(self, ours: socket.socket) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket = ours
        self._lock = threading.Lock()

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Return the process id of a new child; `streams` are descriptors for it."""
        with self._lock:
            text = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(text).to_bytes(4)], list(streams))
            self._socket.sendall(text)
            return int.from_bytes(_exactly(self._socket, 4))


class _Forked(_Popen[Any]):
    """A Popen that forks the template to run a module of this project."""

    template: _Template

    def _execute_child(self, *arguments: Any) -> None:
        """Replace fork and exec: CPython 3.11 to 3.14 calls this method for them."""
        given = _EXECUTE.bind(self, *arguments).arguments
        environment = os.environ if given["env"] is None else given["env"]
        if any(given[name] not in _DEFAULTS for name in _NOT_FORKED) or not _can_fork(given["args"], environment):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = {number: given[name] for number, name in enumerate(_STREAMS) if given[name] >= 0}
        _, _, module, *words = given["args"]  # python -m module …
        request = {
            "module": module,
            "arguments": [os.fspath(word) for word in words],
            "environment": dict(environment),
            "folder": os.fspath(given["cwd"] or Path.cwd()),
            "new_session": bool(given["start_new_session"]),
            "streams": list(streams),
        }
        self.pid = self.template.fork(request, list(streams.values()))
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]


def _can_fork(command: Any, environment: Mapping[str, str]) -> bool:
    """Return whether a command runs a module of this project, without variables that only a fresh interpreter reads."""
    if isinstance(command, str | bytes) or len(command) <= 2 or list(command[:2]) != [sys.executable, "-m"]:
        return False
    return command[2].split(".")[0] in _PACKAGES and not any(name.startswith(_INTERPRETER) for name in environment)


@contextmanager
def forking(model: Path) -> Iterator[None]:
    """Start a template, and let `subprocess` fork it in the block; `model` as in `copy_clusters`."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", f"from tests.forking import serve; serve({theirs.fileno()}, {str(model)!r})"]
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(Path(__file__).parents[1])}
    with ours, theirs:
        process = _Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        _fork_from(ours)
        try:
            yield
        finally:
            subprocess.Popen = _Popen  # type: ignore[misc]
    process.wait()


def _fork_from(ours: socket.socket) -> None:
    """Let `subprocess` fork the template at the other end of this socket."""
    _Forked.template = _Template(ours)
    subprocess.Popen = _Forked  # type: ignore[misc]


def serve(number: int, model: str) -> None:
    """Run as template: import everything, then fork a child for each request on the socket with descriptor `number`."""
    for module in _PRELOADED:
        __import__(module)
    build = typer.main.get_command = functools.cache(typer.main.get_command)
    build(sys.modules["openapi_tool.cli"].app)  # building the command line takes 50 ms
    copy_clusters(Path(model))
    os.environ.pop("PYTHONPATH")
    gc.collect()
    gc.freeze()
    _answer(socket.socket(fileno=number))


def _answer(requests: socket.socket) -> None:
    """Fork a child for each request, until the socket is closed; in a child, run the requested module."""
    with requests:
        while True:
            head, streams, _, _ = socket.recv_fds(requests, 4, len(_STREAMS))
            if not head:
                return
            request = json.loads(_exactly(requests, int.from_bytes(head)))
            read, write = os.pipe()
            # Fork twice: when the process between has ended, the requesting process (subreaper) is the child's parent.
            if not (between := os.fork()):
                os.close(read)
                if child := os.fork():
                    os.write(write, child.to_bytes(4))
                    os._exit(0)
                os.close(write)
                break
            os.close(write)
            child_id = os.read(read, 4)
            os.waitpid(between, 0)
            requests.sendall(child_id)
            for fd in (read, *streams):
                os.close(fd)
    _become(request, streams)


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Adopt the session, descriptors, folder, environment and arguments of a request, and run its module."""
    if request["new_session"]:
        os.setsid()
    for number, fd in zip(request["streams"], streams, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout = _stream(0, "r", "surrogateescape"), _stream(1, "w", "surrogateescape")
    sys.stderr = _stream(2, "w", "backslashreplace", line_buffering=True)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    sys.argv = [request["module"], *request["arguments"]]
    if request["module"] == "openapi_tool" and any(word in _STARTERS for word in request["arguments"][:1]):
        _fork_own_template()
    if request["module"] != "openapi_tool":  # runpy warns if a module that it runs is already imported
        sys.modules.pop(request["module"], None)
    _run(request["module"])


def _run(module: str) -> None:
    """Run a module as `__main__` and end this process.

    Modules are not cleared, which would take a third of the time of a short process. But garbage is collected, so that
    objects that warn when they are deleted (such as unclosed files) do so.
    """
    code: Any = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(code := end.code, int | None):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - first step of the interpreter's exit
    atexit._run_exitfuncs()  # noqa: SLF001 - second step
    gc.collect()
    logging.shutdown()  # what was logged since the second step
    with suppress(OSError, ValueError):  # a stream that cannot be flushed is left to the interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit((code or 0) & 0xFF)
    sys.exit(code)


def _fork_own_template() -> None:
    """Fork another template for the servers that this process starts: it must be their parent."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _fork_from(ours)
        return
    ours.close()
    os.setsid()  # Ctrl-C must reach only the process that starts the servers
    _answer(theirs)
    sys.exit()


def _stream(number: int, mode: str, errors: str, *, line_buffering: bool = False) -> TextIO:
    """Open a standard stream anew: the template's stream was opened for the template's file or terminal."""
    stream = open(number, mode, errors=errors, closefd=False)  # noqa: SIM115 - stays open until the end
    if isinstance(stream, TextIOWrapper) and line_buffering:
        stream.reconfigure(line_buffering=True)
    return cast("TextIO", stream)


def _exactly(source: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises EOFError."""
    data = b""
    while len(data) < size:
        if not (piece := source.recv(size - len(data))):
            raise EOFError("the other process has ended")
        data += piece
    return data
