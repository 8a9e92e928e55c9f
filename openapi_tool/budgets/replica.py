"""State shared by the accounts of one replica: the store and its outages, and the journal of unreported uses."""

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
from openapi_tool.budgets.ledger import NOTHING, Amount, parse_amount
from openapi_tool.concurrency import in_background
from openapi_tool.limits.permits import Store
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 0.05
"""Minimum seconds between writes of the journal; uses in between are written together."""

_MAX_ACCOUNTS = 3_000
"""Maximum of the last used accounts in a journal, whose record may have 256 KiB."""


class AccountStore(Store, Protocol):
    """Store of accounts and journals; every method raises Unavailable."""

    async def put(self, name: str, value: bytes) -> None:
        """Write a record that belongs to this replica, without a message to other replicas or a confirmation."""


class Outage:
    """Outage of the store, common to all accounts; `reason` is empty while the store is available."""

    def __init__(self) -> None:
        self.reason = ""

    def begin(self, reason: str) -> None:
        """Record that the store is unavailable."""
        if not self.reason:
            log.warning(
                "cannot share budgets; calls are checked against the last known use: %s",
                reason,
                extra={"action": "budgets.not_shared"},
            )
        self.reason = reason
        metrics.BUDGETS_NOT_SHARED.set(1)

    def end(self) -> None:
        """Record that the store is available."""
        if self.reason:
            log.info("budgets are shared again", extra={"action": "budgets.shared"})
        self.reason = ""
        metrics.BUDGETS_NOT_SHARED.set(0)


class Journal:
    """Write-ahead journal: one record with the totals of the accounts whose last uses are not reported yet.

    If the replica dies, the next replica that writes an account adds the uses from the journal. A call commits its
    result after its uses were sent to the store, so a killed process loses only the uses of calls that it was running.
    """

    def __init__(self, replica: str, store: AccountStore, outage: Outage) -> None:
        self._key, self._store, self._outage = _journal_key(replica), store, outage
        self._unreported: dict[str, Allowance] = {}
        self._waiting: asyncio.Future[None] | None = None  # for the next write
        self._writing: asyncio.Future[None] | None = None  # the current write
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0
        self._is_empty = True

    def record(self, account: str, allowance: Allowance) -> None:
        """Schedule a write of an account's total, except during an outage: the account's next report contains it."""
        self._unreported.pop(account, None)  # move to the end: the last ones are written
        self._unreported[account] = allowance
        if self._outage.reason:
            return
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = in_background(self._run(), "budget_journal")

    async def wait_until_written(self) -> None:
        """Wait until everything recorded is written, or the write has failed."""
        pending = self._waiting or self._writing
        if pending is not None:
            await asyncio.wait([pending])

    async def read(self, replica: str, account: str) -> Amount:
        """Return the uses of an account that a replica wrote since its start. Raises Unavailable."""
        _, value = await self._store.read(_journal_key(replica))
        try:
            return parse_amount(orjson.loads(value or b"{}").get(account, NOTHING))
        except (TypeError, ValueError, AttributeError):
            return NOTHING

    async def aclose(self) -> None:
        """Stop, and empty the record. Call it after the last reports."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._unreported = {
            name: allowance for name, allowance in self._unreported.items() if allowance.spent != NOTHING
        }
        if not self._is_empty:
            await self._write()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting is not None:
                await asyncio.sleep(max(0.0, self._next_at - loop.time()))
                self._next_at = loop.time() + _WRITE_INTERVAL_S
                self._writing, self._waiting = self._waiting, None
                self._unreported = {
                    name: allowance for name, allowance in self._unreported.items() if allowance.spent != NOTHING
                }
                if self._unreported:
                    await self._write()
                _resolve(self._writing)
                self._writing = None
        finally:
            _resolve(self._writing)
            _resolve(self._waiting)
            self._writing = self._waiting = self._task = None

    async def _write(self) -> None:
        last = list(self._unreported.items())[-_MAX_ACCOUNTS:]
        self._is_empty = not last
        try:
            await self._store.put(self._key, orjson.dumps({name: list(allowance.total) for name, allowance in last}))
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


def record_key(*parts: str) -> str:
    """Return a KV key: a hash, because ids may contain any characters."""
    return f"budget.{hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()}"


def _journal_key(replica: str) -> str:
    return record_key("journal", replica)


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None:
        future.set_result(None)
