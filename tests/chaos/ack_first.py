"""Defective build for a test of the checker: it acknowledges a command before it has a result."""

from __future__ import annotations

from typing import Any

from openapi_tool.kernel.jetstream.command_runner import CommandRunner
from tests.chaos.fail_points import main

_handle = CommandRunner._handle_under_lease  # noqa: SLF001 - the defect


async def _acknowledge_first(self: CommandRunner, held: Any) -> Any:
    await held.message.ack_sync()
    return await _handle(self, held)


if __name__ == "__main__":
    CommandRunner._handle_under_lease = _acknowledge_first  # type: ignore[method-assign]  # noqa: SLF001
    main()
