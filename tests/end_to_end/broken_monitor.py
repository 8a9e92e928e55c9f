"""Defective build: one of its background tasks fails at once."""

from __future__ import annotations

from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.local.executor import main


async def _fail(_: DurableMonitor) -> None:
    raise RuntimeError("a defect")


if __name__ == "__main__":
    DurableMonitor.run = _fail  # type: ignore[assignment]
    main()
