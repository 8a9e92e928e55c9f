"""Program of a worker process: forks a child for each task, and never reads a task itself.

`process.py` runs it by path, as `python -I -S -B worker.py SOCKET MEMORY_BYTES MODULE PATHS`:

- SOCKET is the number of its end of the control socket. It has no other files but /dev/null as standard streams, and
  an empty environment;
- MODULE has the functions of the tasks, as `TASKS`;
- PATHS are the import paths of the service.

Over the control socket it receives, for each task, one end of a new socket pair. The child reads the task from that,
answers, and ends; so the service, at the other end, sees the end of the stream.

A child per task makes the limits simple (RLIMIT_CPU counts from the fork, so it limits the task), a kill cheap (a
millisecond for the next child, not 100 ms for a new interpreter), and leaves nothing of a task in memory: what a later
task could read was never there.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

_NICE = 10  # the event loop of the service goes first
_LIFE_S = 30  # of a child whose parents are gone; the service kills it much earlier


def main() -> None:
    """Serve until the service closes the socket, or ends."""
    descriptor, memory_bytes, module, *paths = sys.argv[1:]
    sys.path[:] = paths  # with -I and -S there are only those of the standard library
    from openapi_tool.isolation.child import answer  # noqa: PLC0415 - `sys.path` has this package only now

    functions = importlib.import_module(module).TASKS
    _limit_itself(int(memory_bytes))
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all these objects
    gc.disable()
    with suppress(OSError):  # the service has ended
        _serve(lambda stream: answer(stream, functions), socket.socket(fileno=int(descriptor)))


def _serve(run_task: Callable[[socket.socket], None], control: socket.socket) -> None:
    """Fork a child for each socket that arrives on the control socket; tell the service when it has ended."""
    from openapi_tool.isolation.frames import ENDED  # noqa: PLC0415 - as in `main`

    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message or len(descriptors) != 1:  # the service has closed the socket
            return
        child = os.fork()
        if child == 0:
            control.close()
            _run_and_exit(run_task, descriptors[0])
        os.close(descriptors[0])
        os.waitpid(child, 0)
        control.send(ENDED)


def _limit_itself(memory_bytes: int) -> None:
    import resource  # noqa: PLC0415 - as in `main`

    from openapi_tool.isolation.limits import OPEN_FILES  # noqa: PLC0415 - as in `main`

    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("1000")  # without memory the kernel kills a worker, not the service
    if sys.platform == "linux":  # macOS refuses a limit of the address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the service, which drains; it ends the workers


def _run_and_exit(run_task: Callable[[socket.socket], None], descriptor: int) -> None:
    """Run one task in the child, and end the child."""
    with suppress(BaseException):  # the service sees that there is no answer
        signal.alarm(_LIFE_S)
        run_task(socket.socket(fileno=descriptor))
    os._exit(0)


if __name__ == "__main__":
    main()
