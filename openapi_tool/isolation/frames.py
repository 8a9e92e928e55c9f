"""Frames of a task and of its answer on a socket, for both sides; the rest of each is a `protocol.payload`.

task:   id of the task, CPU seconds, lengths of the function's name and of the argument; then both
answer: id of the task, status, length; then the result, or what is known of the defect
"""

from __future__ import annotations

import struct

TASK = struct.Struct("!QHHI")
ANSWER = struct.Struct("!QHI")

ENDED = b"e"
"""Sent on a worker's control socket after each child's end, so that the death of a child and of its parent differ."""

DONE, DEFECT = 0, 1
"""Status of an answer. `DEFECT`: an exception in our own code."""
