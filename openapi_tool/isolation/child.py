"""What the child of a worker process does: it reads one task from a socket, runs it, and answers.

`worker.py` forks the child. Like that program it imports only code that needs no connection and no secret.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Mapping

from openapi_tool.isolation.frames import ANSWER, DEFECT, DONE, TASK
from openapi_tool.protocol.payload import Payload, is_cheap, pack, unpack

Function = Callable[[Payload], bytes]
"""What a task runs: it takes the task's argument, and returns a packed result."""


def answer(stream: socket.socket, functions: Mapping[str, Function]) -> None:
    """Read one task from a socket, run it and send the answer. Raises whatever goes wrong; the caller then ends."""
    task_id, cpu_s, name_bytes, argument_bytes = TASK.unpack(_read(stream, TASK.size))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))  # SIGKILL at the hard limit, which nothing can handle
    name = _read(stream, name_bytes).decode()
    argument = unpack(_read(stream, argument_bytes))
    status = DONE
    try:
        result = functions[name](argument)
    except MemoryError:
        raise  # the child ends without an answer, as if the system had killed it
    except Exception as defect:  # noqa: BLE001 - reported by its place, without a value of the task
        status, result = DEFECT, pack({"defect": _place(defect)})
    if not is_cheap(result):  # the service would refuse it
        raise ValueError("too many values in the result")
    stream.sendall(ANSWER.pack(task_id, status, len(result)))
    stream.sendall(result)


def _read(stream: socket.socket, size: int) -> bytearray:
    """Return exactly `size` bytes. Raises EOFError if the stream ends before."""
    data = bytearray(size)
    received = 0
    while received < size:
        count = stream.recv_into(memoryview(data)[received:])
        if not count:
            raise EOFError
        received += count
    return data


def _place(defect: Exception) -> str:
    """Return type and place of a defect: its message may contain what the task was given."""
    last = defect.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
    return f"{type(defect).__name__}{where}"
