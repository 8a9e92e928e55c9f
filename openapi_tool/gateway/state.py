"""The port of what the processes of a gateway share; `file_state` and `nats_state` implement it.

`Records`, `ListedRecords` and `TextSets` are explained in `state/port.py`: records are small and change, texts may be
large and expire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from openapi_tool.gateway.call_row import CallRow
from openapi_tool.state.port import ListedRecords, Records, TextSets
from openapi_tool.tools.switches import Switches

LIMITS_TTL_S = 2 * 3600
"""Seconds after its last change for which a limit's record is kept."""

BUDGETS_TTL_S = 40 * 86_400
"""Seconds after its last change for which a budget's record is kept: longer than the month of a budget."""

TOKENS = "tokens"
"""Name of the bucket of tokens."""


class CallRows(Protocol):
    """Rows of finished calls, which are kept for 90 days; every method raises Unavailable."""

    async def store(self, row: CallRow) -> None:
        """Store a row."""

    async def by_tool(self, project: str, agent: str, since: float) -> list[dict[str, Any]]:
        """Return the figures of an agent's calls since a time, by tool, the most expensive first."""


class GatewayState(Protocol):
    """What the processes of a gateway share; every method raises Unavailable.

    `time` returns the seconds since the epoch, from one clock for all these processes. The records of `limits` and
    `budgets` may be shared with executors, too: the processes that run the tool calls of a kernel (an agent platform).
    """

    time: Callable[[], float]

    @property
    def limits(self) -> Records:
        """Records of limits, and of refused keys."""

    @property
    def budgets(self) -> Records:
        """Records of budgets."""

    @property
    def tokens(self) -> ListedRecords:
        """Records of tokens."""

    @property
    def rows(self) -> CallRows:
        """Rows of calls."""

    def texts(self, bucket: str, ttl_s: float) -> TextSets:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""

    async def session_key(self) -> bytes:
        """Return the key that signs session identities and cursors, which the first process creates."""

    def operated(
        self, name: str, use: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
    ) -> AbstractAsyncContextManager[None]:
        """While the context is open pass an operator's switches to `use`, and answer requests for statistics.

        Switches say which tools are disabled; until they have been read no tool may run. `name` is the name of this
        process, and `snapshot` returns its statistics.
        """
