"""One worker process of the pool, as the service sees it: started, given tasks, killed, started again.

The process runs the program `worker.py`, which forks a *child* for each task. Two kinds of sockets lead to it:

- the *control socket*, one for each worker process. Over it the service passes one end of a new socket pair for each
  task, and hears when the child of a task has ended;
- that socket pair, over which the child reads its task and answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

from openapi_tool.concurrency.background import in_background
from openapi_tool.isolation.frames import ANSWER, DEFECT, ENDED, TASK
from openapi_tool.isolation.limits import answer_bytes, cpu_s, memory_bytes
from openapi_tool.open_files import with_free_file
from openapi_tool.protocol.payload import Parts, is_cheap

log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("worker.py")
_TASKS_MODULE = "openapi_tool.worker_tasks"  # has the functions of the tasks
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_BACK_OFF_S = 0.1  # before the start after one failure; doubled with each further one
_MAX_BACK_OFF_S = 5.0  # however many starts failed in succession


class Killed(Exception):
    """The task ended without an answer: by a limit of CPU or memory."""


class Stuck(Exception):
    """The worker did not answer in time, and was killed."""


class Lost(Exception):
    """The worker process ended, or sent what it must not send; the task may be tried again."""


class Broken(Exception):
    """The task's function raised an exception: a defect of our own code. The message is its type and place."""


class WorkerProcess:
    """Process that is started at the first use and again after its end; runs one task at a time."""

    def __init__(self, max_response_bytes: int) -> None:
        self._memory_bytes = memory_bytes(max_response_bytes)
        self._answer_bytes = answer_bytes(max_response_bytes)
        self._max_response_bytes = max_response_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._task_ended: asyncio.Future[bool] | None = None  # of the last task; its result: whether the worker lives
        self._starting: asyncio.Task[None] | None = None  # the last start, which may be done
        self._failures = 0  # starts that failed, or whose process ended by itself, since a task has ended well
        self._closed = asyncio.Event()

    def start(self) -> asyncio.Task[None]:
        """Start the process in the background, unless it runs or starts; return the task that starts it."""
        if self._starting is None:
            self._starting = in_background(self._start(), "start a worker process")
        return self._starting

    @property
    def pid(self) -> int | None:
        """Return the id of the process, None while none runs."""
        return self._process.pid if self._process is not None else None

    async def run(self, name: str, argument: Parts, wall_s: float) -> bytearray:
        """Run a task, whose argument comes in parts, and return its result once its child has ended.

        After `wall_s` seconds, or if the caller is cancelled, the worker is killed. Raises Killed, Stuck, Lost, Broken.
        """
        # An id that cannot be guessed, so that an answer prepared for another task is refused.
        task_id = secrets.randbits(64)
        function = name.encode()
        cpu_limit_s = cpu_s(self._max_response_bytes, name)
        head = TASK.pack(task_id, cpu_limit_s, len(function), sum(map(len, argument)))
        exchange = _Exchange((head + function, *argument), task_id, self._answer_bytes)
        try:
            async with asyncio.timeout(wall_s):
                await asyncio.shield(self.start())  # a start goes on for the next task, if this one is cancelled
                await self._send(exchange)
                return await self._result(exchange)
        except TimeoutError:
            self.kill()
            raise Stuck from None
        except OSError as error:
            self.kill()
            raise Lost from error
        except (Lost, asyncio.CancelledError):
            self.kill()
            raise
        finally:
            exchange.close()

    async def _send(self, exchange: _Exchange) -> None:
        """Pass the worker its end of a new socket pair, and send the task over ours. Raises Lost, OSError."""
        ours, theirs = await with_free_file(_socket_pair)
        with theirs:
            if self._control is None:  # killed meanwhile
                ours.close()
                raise Lost
            try:
                self._task_ended = asyncio.get_running_loop().create_future()
                socket.send_fds(self._control, [b"t"], [theirs.fileno()])  # one byte, as it cannot send nothing
                await asyncio.get_running_loop().create_unix_connection(lambda: exchange, sock=ours)
            except BaseException:  # also if the caller is cancelled: no transport owns the socket yet
                ours.close()
                raise

    async def _result(self, exchange: _Exchange) -> bytearray:
        """Return the result once the child has ended. Raises Killed, Lost, Broken."""
        if self._task_ended is None or not await self._task_ended:
            raise Lost
        await exchange.done
        return exchange.result()

    def kill(self) -> None:
        """Kill the process and its child; start another one in the background."""
        process, control, task_ended = self._process, self._control, self._task_ended
        self._process = self._control = self._task_ended = None
        if task_ended is not None and not task_ended.done():
            task_ended.set_result(False)
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own, and is not reaped yet
        self._starting = in_background(self._replace(process), "replace a worker process")

    async def _replace(self, killed: subprocess.Popen[bytes]) -> None:
        with suppress(RuntimeError):  # no thread can be started; `subprocess` reaps it before the next start
            await _in_thread(_reap, killed)
        await self._start()

    async def _start(self) -> None:
        """Start the process; wait before that if the last one failed, so that no failure repeats in a busy loop."""
        while not self._closed.is_set():
            if self._failures and await self._closes_within(_back_off_s(self._failures)):
                return
            try:
                self._process, control = await _in_thread(_spawn, self._memory_bytes)
            except Exception as error:  # noqa: BLE001 - if this task ended, no worker would start any more
                self._failures += 1
                log.error(  # noqa: TRY400 - the system's refusal, not a defect
                    "cannot start a worker process: %s; calls that need one wait",
                    getattr(error, "strerror", None) or str(error) or type(error).__name__,
                    extra={"action": "isolation.unavailable"},
                )
            else:
                self._control = control
                asyncio.get_running_loop().add_reader(control.fileno(), self._on_control)
                return

    async def _closes_within(self, seconds: float) -> bool:
        """Wait, and return whether `aclose` was called meanwhile, which ends the wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        return self._closed.is_set()

    def _on_control(self) -> None:
        """Read the control socket: the worker says that the task's child has ended, or the worker itself has ended.

        A worker that has ended, or sent anything else, is replaced at once.
        """
        if self._control is None:
            return
        try:
            message = self._control.recv(2)  # one byte more than `ENDED`, so that a longer message is found to be wrong
        except BlockingIOError:
            return
        except OSError:
            message = b""  # as if the socket was closed
        task_ended = self._task_ended
        if message == ENDED and task_ended is not None and not task_ended.done():
            self._failures = 0
            task_ended.set_result(True)
            return
        self._failures += 1
        log.warning(
            "a worker process ended by itself or was killed, as when memory is short; starting another one",
            extra={"action": "isolation.worker_lost"},
        )
        self.kill()

    async def aclose(self) -> None:
        """Kill the process for good, and wait until it has ended."""
        self._closed.set()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self.kill()
        if self._starting is not None:  # after `kill` it reaps the process, and starts no other one
            await asyncio.wait([self._starting])


class _Exchange(asyncio.Protocol):
    """One task and its answer on a socket pair; `done` when the child has ended, which closes the other end."""

    def __init__(self, task: Parts, task_id: int, max_bytes: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = task
        self._task_id = task_id
        self._max_bytes = max_bytes
        self._answer = bytearray()
        self._too_long = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        for part in self._task:
            self._transport.write(part)
        self._task = ()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if len(self._answer) > self._max_bytes + ANSWER.size:
            self._too_long = True
            self.close()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - reset or closed, it is over
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def result(self) -> bytearray:
        """Return the packed result of a child that has ended.

        Raises Killed for an incomplete answer, Lost for one that our own code would not send (a page may have taken
        control of the child), Broken for a defect.
        """
        if self._too_long:
            raise Lost
        if len(self._answer) < ANSWER.size:
            raise Killed
        task_id, status, length = ANSWER.unpack_from(self._answer)
        result = self._answer
        del result[: ANSWER.size]
        if not is_cheap(result):  # too slow to unpack
            raise Lost
        is_incomplete = len(result) < length <= self._max_bytes
        if is_incomplete:
            raise Killed
        if task_id != self._task_id or len(result) != length:
            raise Lost
        if status == DEFECT:
            raise Broken(result.decode("ascii", "replace"))
        return result


async def _in_thread(work: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Run `work` in a thread of its own. Raises RuntimeError if none can be started.

    A shared executor would keep the work then, and do it later, when nobody waits for the result.
    """
    executor = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, argument)
    finally:
        executor.shutdown(wait=False)


async def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def _back_off_s(failures: int) -> float:
    doublings = min(failures - 1, 10)  # more would give the maximum, too, and in the end overflow
    return min(_BACK_OFF_S * 2.0**doublings, _MAX_BACK_OFF_S)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait until a killed worker has ended, and its child, which init inherits: in a container that is this process."""
    process.wait()
    with suppress(ChildProcessError):  # none is left
        while True:
            os.waitpid(-process.pid, 0)  # any process of its group


def _spawn(memory_bytes: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker; return its process and our end of its control socket. Raises OSError."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - the only way to say it
    arguments = [str(memory_bytes), _TASKS_MODULE, *(str(Path(path).absolute()) for path in sys.path)]
    with theirs:
        try:
            # Without a shell; the interpreter and our own program. A group of its own, to kill it with its child.
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-S", "-B", str(_PROGRAM), str(theirs.fileno()), *arguments],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:  # whatever it is, nobody else knows the socket
            ours.close()
            raise
    return process, ours
