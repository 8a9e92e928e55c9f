"""Settlement of a command after a delivery was handled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the command: its result is committed."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the command after `delay_s` seconds: the failure is temporary or ours.

    An outage ends, so it is retried without limit. A `defect` may not end: its retries count as lost
    runs, which are limited. `reason` is for the log.
    """

    delay_s: float
    defect: bool = False
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Record the command as a dead letter and end its deliveries: it can never be answered."""

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | Requeue | DeadLetter
