"""Users that log in to NATS, each with permissions of its own (`openapi-tool nats permissions` prints them)."""

from __future__ import annotations

from enum import StrEnum


class NatsUser(StrEnum):
    """User that logs in to NATS: the executor, the gateway, or an operator's command of that name."""

    EXECUTOR = "executor"
    QUOTAS = "quotas"  # executor or gateway at another NATS, which holds the records of quotas
    GATEWAY = "gateway"
    DEADLETTERS = "deadletters"
    INSPECT = "inspect"
    TOP = "top"
    SWITCHES = "switches"
    DURABLE = "durable"

    def inbox_prefix(self, of_executor: str) -> str:
        """Return the prefix of this user's reply subjects: `_INBOX.openapi_tool_top`, for example.

        Commands arrive on the executor's `_INBOX.openapi_tool.…`, so no other user may receive what begins with that.
        """
        return of_executor if self is NatsUser.EXECUTOR else f"{of_executor}_{self}"

    @property
    def is_operator(self) -> bool:
        """Return whether an operator's command logs in."""
        return self not in (NatsUser.EXECUTOR, NatsUser.QUOTAS, NatsUser.GATEWAY)
