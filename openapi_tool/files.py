"""Files that settings name: regular files only, of bounded size.

To open a FIFO waits for its writer, and a device may be endless, so a start would never end, or take all memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_SECRET_BYTES = 64 * 1024
MAX_CONFIG_BYTES = 4 * 2**20
MAX_CERTIFICATES_BYTES = 16 * 2**20


def check_regular_file(path: str | Path, max_bytes: int) -> None:
    """Check a file that a library opens by itself. Raises OSError for a larger one, or anything but a regular file."""
    _check_status(Path(path).stat(), max_bytes)


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError for a larger one, or anything but a regular file."""
    check_regular_file(path, max_bytes)  # first, as opening a device may have effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be another file now
    with os.fdopen(descriptor, "rb") as file:
        _check_status(os.fstat(descriptor), max_bytes)
        content = file.read(max_bytes + 1)  # it may grow meanwhile
    if content is None:  # such as /proc/kmsg, which claims to be a regular file, and waits for more
        raise OSError(errno.EINVAL, "not a regular file")
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _check_status(status: os.stat_result, max_bytes: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes")
