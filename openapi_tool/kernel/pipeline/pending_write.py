"""Rows of a result that are ready, and written once its turn's order allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from openapi_tool.kernel.pipeline.ports import Kernel
from openapi_tool.protocol.cards import ArtifactCard, ResultCard
from openapi_tool.protocol.report import Report, TurnCondition


class PendingWrite(Protocol):
    """Rows to be written. Both methods raise Unavailable."""

    async def write(self, condition: TurnCondition | None, /) -> bool:
        """Write the rows; return False if that was refused. Raises TurnBusy if the `condition` does not hold."""

    async def is_busy(self, quiet_s: float, /) -> bool:
        """Return whether the turn is busy: `write` would raise TurnBusy for commands younger than `quiet_s`."""


@dataclass(slots=True)
class PendingCommit:
    """Cards and report of a result; `failed_before`: an attempt to write them failed, for the circuit breaker."""

    kernel: Kernel
    card: ResultCard
    report: Report
    artifact: ArtifactCard | None
    failed_before: bool = False

    async def write(self, condition: TurnCondition | None) -> bool:
        """See `PendingWrite`."""
        return await self.kernel.commit(self.card, self.report, self.artifact, condition, retry=self.failed_before)

    async def is_busy(self, quiet_s: float) -> bool:
        """See `PendingWrite`."""
        return await self.kernel.is_turn_busy(self.report, quiet_s)


@dataclass(frozen=True, slots=True)
class PendingReport:
    """Report of a result whose card is stored."""

    kernel: Kernel
    card_id: str
    report: Report

    async def write(self, condition: TurnCondition | None) -> bool:
        """See `PendingWrite`."""
        return await self.kernel.report(self.card_id, self.report, condition)

    async def is_busy(self, quiet_s: float) -> bool:
        """See `PendingWrite`."""
        return await self.kernel.is_turn_busy(self.report, quiet_s)
