"""The port of shared state: what its users see of a store.

*Records* are small, and are read and changed by several processes at the same time. *Texts* may be large, and expire.
The modules `memory`, `sqlite` and those whose names begin with `nats` implement them for one store each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from openapi_tool.protocol.errors import Unavailable


class AccessDenied(Unavailable):
    """The store refuses the access to `subject`: its operator must grant it, and waiting does not help."""

    def __init__(self, message: str, subject: str = "") -> None:
        super().__init__(message)
        self.subject = subject


class Contended(Unavailable):
    """A record was not written: each time, another process changed it between read and write."""

    def __init__(self, key: str) -> None:
        super().__init__(f"others keep changing the shared record {key}; try again")


class Stored(NamedTuple):
    """Value of a record and its revision, which each write raises.

    The value is None if the record was never written (then the revision is 0), was deleted, or has expired.
    """

    value: bytes | None = None
    revision: int = 0


ALL_RECORDS = ""
"""Name with which `OnChange` is called once an operator has deleted all records. What a process knows of them must no
longer be used or written."""

OnChange = Callable[[str, Stored], None]


class Records(Protocol):
    """Records by key, of at most 256 KiB. Every method raises Unavailable, also its kind AccessDenied.

    Keys consist of letters, digits and `-_=.`, and neither begin nor end with a dot.
    """

    async def read(self, key: str) -> Stored:
        """Return a record; `Stored()` if it was never written."""

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, 0 if it was never written.

        Return the new revision, None if the record was changed meanwhile. After Unavailable it may have been written.
        """

    def watch(self, on_change: OnChange) -> AbstractAsyncContextManager[None]:
        """Call `on_change` with the key and the new value of records that any process changes.

        It is called while the context is open. Changes may be missed, come late or in another order: so a caller
        compares revisions, and uses what it hears only to save reads.
        """


class ListedRecords(Records, Protocol):
    """Records that can be listed: of a bucket that is seldom written."""

    async def all(self) -> dict[str, bytes]:
        """Return all records by key; each write that was confirmed before is among them."""

    async def put(self, key: str, value: bytes) -> None:
        """Store a record whatever its revision is; for records that only one process writes."""


class Texts(Protocol):
    """Texts by name that expire some time after they were stored; every method raises Unavailable.

    A name may begin with that of its owner and a dot. If there is no room for a text, others are dropped. A state file
    drops texts of the owner with the most bytes first. A NATS bucket that is nearly full drops the oldest texts of the
    owner who stores one.
    """

    async def put(self, name: str, text: bytes) -> None:
        """Store or replace a text."""

    async def get(self, name: str) -> bytes | None:
        """Return a text, None if there is none or it has expired."""

    async def delete(self, name: str) -> None:
        """Delete a text if there is one."""


class TextSets(Texts, Protocol):
    """Texts of which several belong together."""

    async def put_all(self, texts: Mapping[str, bytes]) -> None:
        """Store all of these texts.

        A store without transactions stores the first one last: if the first one is found, all were stored.
        """
