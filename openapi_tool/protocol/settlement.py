"""How the delivery of a command ends."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the command: its result is committed."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """Hand the command back, to be redelivered after `delay_s` seconds; `defect`: because of one of this service.

    Only a defect, which may be permanent, counts as a lost run.
    """

    delay_s: float
    defect: bool = False
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """Store a dead letter; then terminate the command's message if `terminate`, else acknowledge it."""

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | HandBack | StoreDeadLetter
