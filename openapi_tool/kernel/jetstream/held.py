"""A held command: received, and not yet settled, that is, acknowledged, handed back or recorded as a dead letter."""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import getsizeof

from nats.aio.msg import Msg

from openapi_tool.kernel.jetstream.claimed_ids import project_of
from openapi_tool.kernel.jetstream.leases import Lease
from openapi_tool.protocol.command import Delivery
from openapi_tool.protocol.headers import AGENT
from openapi_tool.protocol.ids import MAX_ID_BYTES
from openapi_tool.protocol.projects import AgentKey

_OVERHEAD_BYTES = 1_024
"""Memory of a held command beside subject, headers and body: objects, reply subject, queue entries."""


@dataclass(slots=True)
class HeldCommand:
    """Received command, with what is known of its run in this process.

    `message` is the NATS message by which it is settled, without its body and headers, which `delivery` has. Times are
    on the monotonic clock, in seconds.
    """

    message: Msg
    delivery: Delivery
    started_at: float
    """When its run began; until then, when it was received."""
    heartbeat_at: float
    """When its last heartbeat was sent; until then, when it was received."""
    stale: bool = False
    """Whether the server may have redelivered it elsewhere: heartbeats did not arrive in time."""
    forgive_on_hand_back: bool = True
    """Whether handing it back takes its run off the count of lost runs; `CommandRunner` sets it."""
    overdue: bool = False
    """Whether it ran longer than all time limits and was cancelled."""
    settling: bool = False
    """Whether its settlement is decided, so that it is no longer handed back."""
    probe: bool = False
    """Whether it was fetched as a test whether the database works again."""
    lease: Lease | None = None
    """The lease under which it runs; None for a first run, which needs none."""
    claimed_agent: AgentKey = field(init=False)
    """Project and agent as subject and header name them, unverified."""
    memory_bytes: int = field(init=False)
    """Memory that it takes while it is held."""

    def __post_init__(self) -> None:
        subject, headers = self.delivery.subject, self.delivery.headers
        self.claimed_agent = AgentKey(project_of(subject), headers.get(AGENT, "")[:MAX_ID_BYTES])
        # getsizeof, not len: one character such as an emoji makes CPython store a whole header in four bytes for each.
        header_bytes = sum(map(getsizeof, headers)) + sum(map(getsizeof, headers.values()))
        self.memory_bytes = _OVERHEAD_BYTES + len(self.delivery.data) + len(subject) + header_bytes

    @property
    def never_run(self) -> bool:
        """Return whether no delivery of the command was ever run, as far as is known here."""
        return self.delivery.number == 1 and not self.stale
