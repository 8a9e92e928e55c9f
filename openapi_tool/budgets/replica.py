"""What the accounts of one replica share: the store, whether it is available, and the journal of unreported uses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from openapi_tool.budgets.allowance import Allowance
from openapi_tool.budgets.ledger import NOTHING, Amount, amount
from openapi_tool.limits.store import Store
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.shielding import in_background
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_EVERY_S = 0.05
"""Least seconds between writes of the journal; what is used meanwhile is written together."""

_MOST_ACCOUNTS = 3_000
"""Accounts in a journal, those used last; its record has at most 256 KiB."""


class AccountStore(Store, Protocol):
    """Store of accounts and journals; every method raises Unavailable."""

    async def put(self, name: str, value: bytes) -> None:
        """Send a record that only this replica writes; without a message to other replicas."""


class Outage:
    """Whether the store is unavailable, and why; the same for all accounts."""

    def __init__(self) -> None:
        self.reason = ""

    def begin(self, reason: str) -> None:
        """Record that the store is unavailable."""
        if not self.reason:
            log.warning(
                "budgets cannot be shared, the last known state decides: %s", reason, extra={"action": "budgets.alone"}
            )
        self.reason = reason
        metrics.BUDGETS_ALONE.set(1)

    def end(self) -> None:
        """Record that the store is available."""
        if self.reason:
            log.info("budgets are shared again", extra={"action": "budgets.shared"})
        self.reason = ""
        metrics.BUDGETS_ALONE.set(0)


class Journal:
    """Totals of the accounts of this replica whose last uses are not reported yet, in one record.

    If the replica dies, the next one that changes an account counts its uses from there. Results are committed once
    their uses are sent to the store, so a killed process forgets only requests of calls that it runs.
    """

    def __init__(self, replica: str, store: AccountStore, outage: Outage) -> None:
        self._name, self._store, self._outage = _name(replica), store, outage
        self._unreported: dict[str, Allowance] = {}
        self._waiting: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0
        self._is_empty = True

    def note(self, account: str, allowance: Allowance) -> None:
        """Write the total of an account soon; in an outage only its next report tells."""
        self._unreported.pop(account, None)  # so that it is the last
        self._unreported[account] = allowance
        if self._outage.reason:
            return
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = in_background(self._run(), "budget_journal")

    async def written(self) -> None:
        """Wait until all that was noted is written, or cannot be."""
        pending = self._waiting or self._writing
        if pending is not None:
            await asyncio.wait([pending])

    async def read(self, replica: str, account: str) -> Amount:
        """Return what a replica used of an account since its start, as far as it wrote that. Raises Unavailable."""
        _, value = await self._store.read(_name(replica))
        try:
            return amount(orjson.loads(value or b"{}").get(account, NOTHING))
        except (TypeError, ValueError, AttributeError):
            return NOTHING

    async def aclose(self) -> None:
        """Stop, and empty the record: call it after the last reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._unreported = {name: one for name, one in self._unreported.items() if one.spent != NOTHING}
        if not self._is_empty:
            await self._write()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting is not None:
                await asyncio.sleep(max(0.0, self._next_at - loop.time()))
                self._next_at = loop.time() + _EVERY_S
                self._writing, self._waiting = self._waiting, None
                self._unreported = {name: one for name, one in self._unreported.items() if one.spent != NOTHING}
                if self._unreported:
                    await self._write()
                _end(self._writing)
                self._writing = None
        finally:
            _end(self._writing)
            _end(self._waiting)
            self._writing = self._waiting = self._task = None

    async def _write(self) -> None:
        last = list(self._unreported.items())[-_MOST_ACCOUNTS:]
        self._is_empty = not last
        try:
            await self._store.put(self._name, orjson.dumps({name: list(one.total) for name, one in last}))
        except Unavailable as outage:
            self._outage.begin(str(outage))


@dataclass(frozen=True, slots=True)
class Replica:
    """Name, store and journal of this process; `now` is the server's time in seconds."""

    name: str
    store: AccountStore
    now: Callable[[], float]
    outage: Outage
    journal: Journal


def digest(*parts: str) -> str:
    """Return a key for KV, which takes fewer characters than ids may have."""
    return f"budget.{hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()}"


def _name(replica: str) -> str:
    return digest("journal", replica)


def _end(waited_for: asyncio.Future[None] | None) -> None:
    if waited_for is not None:
        waited_for.set_result(None)
