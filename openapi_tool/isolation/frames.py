"""Format of a task and of its answer on the socket between the service (`process.py`) and a child (`child.py`).

task:   the fields of TASK (id of the task, CPU seconds, length of the function's name, length of the argument);
        then the function's name, then the argument
answer: the fields of ANSWER (id of the task, status, length of the result); then the result, or if the status is DEFECT
        the type and place of the exception

Argument and result are payloads (`protocol/payload.py`).
"""

from __future__ import annotations

import struct

TASK = struct.Struct("!QHHI")
ANSWER = struct.Struct("!QHI")

ENDED = b"e"
"""What a worker sends on its control socket when a child has ended. If the worker itself ends, the socket is closed."""

DONE, DEFECT = 0, 1
"""Status of an answer. `DEFECT`: an exception in our own code."""
