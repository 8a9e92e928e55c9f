"""What becomes of a command after a delivery was handled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """It is answered; the stream need not deliver it again."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The failure is ours: deliver it again after `delay_s` seconds.

    An outage passes, so it may be tried for as long as that takes. A `defect` may not: its tries are
    counted like runs that took their executor along.
    """

    delay_s: float
    defect: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """It can never be answered: keep a record of it and end its deliveries."""

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | TryAgain | DeadLetter
