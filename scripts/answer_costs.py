"""Print the cost of the most hostile responses of 10 MB: `python -m scripts.answer_costs [NAME]`.

For each response: the longest iteration of the event loop (wall clock and CPU time), total CPU time, and per byte of
body the peak memory, from the first byte to the copies for the commit, and the memory that the executor reserves. The
last line is one JSON object.
Linux only: memory is read from /proc of a child process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openapi_tool.jina.memory_estimates import memory_of
from openapi_tool.protocol.errors import ToolError
from tests.answering import PAGES, SEARCHES, ToolsOverTransport, serving, watched

BODIES = {f"reader {name}": make for name, make in PAGES.items()} | {
    f"search {name}": make for name, make in SEARCHES.items()
}


def _resident(field: str) -> int:
    """Return `VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def _reset_peak_memory() -> None:
    gc.collect()
    gc.freeze()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # 5 resets VmHWM (proc(5))


async def measure(name: str) -> dict[str, Any]:
    """Return the figures of one body, measured in this process."""
    mode, body = name.partition(" ")[0], BODIES[name]()
    # A small call first, so that imports and lazy initialization do not count.
    await ToolsOverTransport(serving(b'{"data":{"content":"x"}}')).card()
    answering = ToolsOverTransport(serving(body))
    _reset_peak_memory()
    before, began, outcome = _resident("VmRSS"), time.process_time(), "success"
    async with watched() as lag:
        try:
            _, _, artifact = await answering.card(mode)
            stored = bytes(bytearray(b"\x01" + artifact.content)) if artifact else b""  # as the driver copies it
        except ToolError as error:
            outcome, stored = error.code, b""
    return {
        "name": name,
        "mb": round(len(body) / 1e6, 1),
        "lag_ms": round(lag.clock_s * 1e3, 1),
        "lag_cpu_ms": round(lag.cpu_s * 1e3, 1),
        "cpu_ms": round((time.process_time() - began) * 1e3, 1),
        "memory_per_byte": round((_resident("VmHWM") - before) / len(body), 1),
        "reserved_per_byte": round(memory_of(body) / len(body), 1),
        "stored_mb": round(len(stored) / 1e6, 1),
        "outcome": outcome,
    }


def main() -> int:
    """Measure each body in its own process; with a name, only that one, in this process."""
    if sys.argv[1:]:
        sys.stdout.write(json.dumps(asyncio.run(measure(sys.argv[1]))) + "\n")
        return 0
    rows = []
    for name in BODIES:
        command = [sys.executable, "-m", "scripts.answer_costs", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - ourselves
        rows.append(json.loads(done.stdout))
        sys.stdout.write("  ".join(f"{value!s:>8}" for value in rows[-1].values()) + "\n")
    worst = {key: max(row[key] for row in rows) for key in ("lag_ms", "lag_cpu_ms", "cpu_ms", "memory_per_byte")}
    sys.stdout.write(json.dumps(worst) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
