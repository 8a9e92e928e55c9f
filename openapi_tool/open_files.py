"""Shortage of open files (file descriptors): recognition, and waiting until it ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cachetools import TTLCache, cached

log = logging.getLogger(__name__)

OUT_OF_FILES = "too many open files: raise ulimit -n"

_RETRY_S = 0.1
_LOG_INTERVAL_S = 60.0

T = TypeVar("T")


def is_out_of_files(error: BaseException | None) -> bool:
    """Return whether an error came because no further file could be opened, as one in its chain of causes says."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):  # limits of the process, and of the system
            return True
        # asyncio joins the errors of several addresses in one text, without an errno.
        if os.strerror(errno.EMFILE) in str(error):
            return True
        if isinstance(error, socket.gaierror) and not _can_open_file():  # the resolver does not tell
            return True
        error = error.__cause__ or error.__context__
    return False


def _can_open_file() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


async def with_free_file(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `attempt`, repeated while no file can be opened; the caller limits the time."""
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not is_out_of_files(error):
                raise
            _log_shortage()
            try:
                await asyncio.sleep(_RETRY_S)
            except asyncio.CancelledError as cancelled:
                raise cancelled from error  # so that a timeout has the shortage as its cause


@cached(TTLCache(1, _LOG_INTERVAL_S))
def _log_shortage() -> None:
    log.warning("%s; calls wait", OUT_OF_FILES, extra={"action": "open_files.exhausted"})
