"""Users that log in to NATS."""

from __future__ import annotations

from enum import StrEnum


class NatsUser(StrEnum):
    """User that logs in to NATS: executor, gateway, either at another NATS for quotas, or an operator's command."""

    EXECUTOR = "executor"
    QUOTAS = "quotas"
    GATEWAY = "gateway"
    DEADLETTERS = "deadletters"
    INSPECT = "inspect"
    TOP = "top"
    SWITCHES = "switches"
    DURABLE = "durable"

    def inbox_prefix(self, of_executor: str) -> str:
        """Return the prefix of this user's reply subjects.

        Commands arrive on that of the executor, so it must not contain those of other users.
        """
        return of_executor if self is NatsUser.EXECUTOR else f"{of_executor}_{self}"

    @property
    def is_operator(self) -> bool:
        """Return whether an operator's command logs in."""
        return self not in (NatsUser.EXECUTOR, NatsUser.QUOTAS, NatsUser.GATEWAY)
