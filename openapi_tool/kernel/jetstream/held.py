"""A held command: received, and not yet settled."""

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
"""Memory of a held command besides subject, headers and body: objects, reply subject, queue entries."""


@dataclass(slots=True)
class HeldCommand:
    """Received command; times are on the monotonic clock, in seconds.

    `started_at` is when its run began, `heartbeat_at` when its last heartbeat was sent; both begin as the time of its
    delivery. `claimed_agent` is unverified: of subject and header.
    """

    message: Msg
    delivery: Delivery
    started_at: float
    heartbeat_at: float
    stale: bool = False  # the server may have redelivered it elsewhere
    forgive_on_hand_back: bool = True  # if it is handed back, this run is no lost one
    overdue: bool = False  # it ran longer than all time limits and was cancelled
    settling: bool = False  # its settlement is decided
    probe: bool = False  # it tests whether calls can be committed again
    lease: Lease | None = None
    claimed_agent: AgentKey = field(init=False)
    memory_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        subject, headers = self.delivery.subject, self.delivery.headers
        self.claimed_agent = AgentKey(project_of(subject), headers.get(AGENT, "")[:MAX_ID_BYTES])
        # getsizeof, not len: one wide character makes CPython store the whole header in four bytes per character.
        texts = len(subject) + sum(map(getsizeof, headers)) + sum(map(getsizeof, headers.values()))
        self.memory_bytes = _OVERHEAD_BYTES + len(self.delivery.data) + texts

    @property
    def never_run(self) -> bool:
        """Return whether no delivery of the command was ever run, as far as is known here."""
        return self.delivery.number == 1 and not self.stale
