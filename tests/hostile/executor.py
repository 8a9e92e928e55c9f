"""`serve` with a probe of its event loop, whose results another process reads from shared memory.

Lag is the duration of one iteration of the loop in seconds: the lesser of wall-clock and CPU time. Other load of the
machine lengthens only the first, another thread of the process only the second.

The process may open 1,024 descriptors, the default of many systems.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp.abc import ResolveResult

from openapi_tool.local import executor
from openapi_tool.local.executor import LoopbackResolver
from openapi_tool.service import process
from openapi_tool.telemetry.loop_lag import monitor_loop_lag
from openapi_tool.tools.operations import SEARCH

PROBE_VARIABLE = "HOSTILE_PROBE"
SEARCH_PORT_VARIABLE = "HOSTILE_SEARCH_PORT"
_TICK_S = 0.005
_DESCRIPTORS = 1_024
_FORMAT = struct.Struct("d")


class LagProbe:
    """Maximum lag since `forget`, in seconds, in a file that both processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    @property
    def worst_s(self) -> float:
        """Return the maximum since `forget`."""
        return float(_FORMAT.unpack_from(self._memory)[0])

    def forget(self) -> None:
        """Reset the maximum."""
        _FORMAT.pack_into(self._memory, 0, 0.0)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            clock, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(_TICK_S)
            lag_s = min(time.monotonic() - clock - _TICK_S, time.process_time() - cpu)
            if lag_s > self.worst_s:
                _FORMAT.pack_into(self._memory, 0, lag_s)


class _TwoUpstreams(LoopbackResolver):
    """Resolves the search host to a second upstream, so that pages for attackers do not delay the victim's searches."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the loopback address and port."""
        found = await super().resolve(host, port, family)
        if host == SEARCH.host:
            found[0]["port"] = int(os.environ[SEARCH_PORT_VARIABLE])
        return found


async def _watch_both(stalled: Callable[[float], None]) -> None:
    probe = LagProbe(Path(os.environ[PROBE_VARIABLE]))
    await asyncio.gather(monitor_loop_lag(stalled), probe.watch())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    process.monitor_loop_lag = _watch_both  # type: ignore[assignment,attr-defined]
    executor.LoopbackResolver = _TwoUpstreams  # type: ignore[misc]
    executor.main()
