"""Entry point of the command line; imports the rest later, because that takes a while."""

from __future__ import annotations

import os
import resource
import signal
import sys
from importlib.metadata import PackageNotFoundError, version

from openapi_tool.files import MAX_CERTIFICATES_BYTES, check_regular_file
from openapi_tool.signals import guard_command, guard_service

_USAGE = 2  # `USAGE` of `cli.output`
_FEWEST_FILES = 32
"""Limit of open files with which `serve` works; with 20 it starts and no call gets a result."""

PINNED = {
    "aiohttp": ("aiohttp", "3.14"),  # jina/connections.py
    "nats-py": ("nats-py[nkeys]", "2.16"),  # nats_client/client.py
}
"""Requirement and minor version of each dependency whose private names a module uses."""


def open_closed_streams() -> None:
    """Open those of standard input, output and error that the process was started without, on /dev/null.

    Otherwise the next files and sockets would get their numbers. What libraries write to standard error would go into
    them, and libuv (of uvloop) aborts when it closes one. Python sets the closed streams to None, on which a flush
    fails.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is that of the stream
            os.set_inheritable(number, True)  # noqa: FBT003 - its only parameter; child processes have the same need
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback, also during the import, and so does SIGTERM."""
    if sys.argv[1:2] in (["serve"], ["gateway"]):
        guard_service()
        _check_file_limit()
    else:
        guard_command()
    open_closed_streams()
    _check_certificates()
    _check_pinned()
    try:
        from openapi_tool.cli import main as run  # noqa: PLC0415 - takes a while, during which signals may come

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # `INTERRUPTED` of `cli.output`, which may not be imported yet


def _check_file_limit() -> None:
    """Exit if the process can open too few files: whatever fails at the limit first hides the cause."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # the hard one, to which `serve` raises the soft one
    if 0 <= limit < _FEWEST_FILES:  # RLIM_INFINITY is negative
        sys.stderr.write(
            f"openapi-tool: this process may open {limit} files only (EMFILE beyond that): raise the limit "
            f"(ulimit -Hn) to {_FEWEST_FILES} at least\n"
        )
        sys.exit(_USAGE)


def _check_certificates() -> None:
    """Exit if OpenSSL would wait for its default file forever, as soon as a library is imported that creates a context.

    It ignores a missing file; a wrong one is reported with the settings.
    """
    file = os.environ.get("SSL_CERT_FILE")
    if not file or not os.path.exists(file):  # noqa: PTH110 - `Path.exists` raises for a name that is too long
        return
    try:
        check_regular_file(file, MAX_CERTIFICATES_BYTES)
    except OSError as error:
        sys.stderr.write(f"openapi-tool: SSL_CERT_FILE: cannot be used: {error.strerror}; name a readable PEM file\n")
        sys.exit(_USAGE)


def _check_pinned() -> None:
    """Exit if another minor version of a dependency is installed: its private names may have another meaning."""
    for name, (requirement, minor) in PINNED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # the import names what is missing
        if not found.startswith(f"{minor}."):
            sys.stderr.write(
                f"openapi-tool: {name} {found} is installed, but this version needs {minor}.x, whose private names it "
                f"uses; run: pip install '{requirement}~={minor}.0'\n"
            )
            sys.exit(_USAGE)


if __name__ == "__main__":
    main()
