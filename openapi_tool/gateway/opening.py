"""Opens the state of a gateway, which its processes share: a file, or NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.gateway.file_state import FileState
from openapi_tool.gateway.state import GatewayState
from openapi_tool.state.sqlite import StateFile

NATS = Path("nats")
"""Stands for the path of a state file if the state is in the NATS of the settings."""


@asynccontextmanager
async def open_state(
    bootstrap: Bootstrap, where: Path, on_unavailable: Callable[[str], None] | None = None
) -> AsyncIterator[GatewayState]:
    """Open the state until the context ends. While NATS is unavailable, this waits, and tells `on_unavailable` why.

    Raises StateUnusable, Unavailable.
    """
    if where == NATS:
        from openapi_tool.gateway.nats_state import open_nats_state  # noqa: PLC0415 - drivers that a file does not need

        async with open_nats_state(bootstrap, on_unavailable) as state:
            yield state
        return
    async with aclosing(StateFile.open(where)) as file:
        yield FileState(file)
