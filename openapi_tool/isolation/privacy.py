"""Protection of the service's memory from its own workers, which run as the same user."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4  # prctl(2)


def hide_memory() -> None:
    """Forbid other processes of the same user to read memory, environment and open files of this one (`/proc`, ptrace).

    It leaves no core dump either. Code with CAP_SYS_PTRACE, such as root, may still do all of it. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
