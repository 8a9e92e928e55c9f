"""Functions that workers run, and the reading and answering of one task. Imports pure code only."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from openapi_tool.isolation.frames import ANSWER, DEFECT, DONE, MAX_ANSWER_BYTES, MAX_TASK_BYTES, TASK, decode, encode
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonObject
from openapi_tool.tools.argument_check import ArgumentCheck, check_arguments
from openapi_tool.tools.definition_check import check_definition

Function = Callable[[JsonObject], Mapping[str, object]]


class Task(NamedTuple):
    """Function of a JSON object, and its name in metrics and logs."""

    name: str
    function: Function


def _check_arguments(argument: JsonObject) -> JsonObject:
    try:
        return check_arguments(ArgumentCheck.of_json(argument)).as_json()
    except ToolMisconfigured as unusable:
        return {"misconfigured": unusable.message}


def _check_definition(argument: JsonObject) -> JsonObject:
    return check_definition(argument["parameters"], argument["options"]).as_json()


CHECK_ARGUMENTS, CHECK_DEFINITION = "check_arguments", "check_definition"
TASKS: tuple[Task, ...] = (Task(CHECK_ARGUMENTS, _check_arguments), Task(CHECK_DEFINITION, _check_definition))
"""All tasks; a task is sent by its place here."""


def answer(stream: socket.socket) -> None:
    """Read one task from a socket, run it and send the answer. Raises whatever goes wrong; the caller then ends."""
    task_id, number, cpu_s, length = TASK.unpack(_read(stream, TASK.size))
    if length > MAX_TASK_BYTES:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))  # SIGKILL at the hard limit, which nothing can handle
    argument = _read(stream, length)
    status, result = DONE, b""
    try:
        result = encode(TASKS[number].function(decode(argument)))
    except MemoryError:
        raise  # as if the kernel had killed it
    except Exception as defect:  # noqa: BLE001 - reported by its place, without a value of the task
        status, result = DEFECT, encode({"defect": _place(defect)})
    if len(result) > MAX_ANSWER_BYTES:
        status, result = DEFECT, encode({"defect": "the result is too large"})
    stream.sendall(ANSWER.pack(task_id, status, len(result)) + result)


def _read(stream: socket.socket, size: int) -> bytearray:
    data, view = bytearray(size), 0
    while view < size:
        received = stream.recv_into(memoryview(data)[view:])
        if not received:
            raise EOFError
        view += received
    return data


def _place(defect: Exception) -> str:
    """Return type and place of a defect: its message may contain what the task was given."""
    last = defect.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last is not None else ""
    return f"{type(defect).__name__}{where}"
