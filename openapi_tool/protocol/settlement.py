"""How the delivery of a command ends: the answer of the pipeline to the consumer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the command: its result is committed."""


@dataclass(frozen=True, slots=True)
class HandBack:
    """Hand the command back, to be redelivered after `delay_s` seconds; `reason` is for the log.

    `defect` means that a defect of this service is the cause. Since it may be permanent, the run then counts as lost,
    and after a few lost runs the command gets an error result.
    """

    delay_s: float
    defect: bool = False
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """Store a dead letter; then terminate the command's message if `terminate`, else acknowledge it.

    Neither is delivered again. Of a terminated message JetStream publishes an advisory.

    `reason` is a stable name of the cause, `message` is for people.
    """

    reason: str
    message: str
    terminate: bool


Settlement = Acknowledge | HandBack | StoreDeadLetter
