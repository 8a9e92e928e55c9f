"""Record of the disabled tools in KV: changed by compare-and-set, read by every replica each second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError

from openapi_tool.bus.client import Denied
from openapi_tool.bus.session_key_store import BUCKET, ensure_bucket
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.tools.switches import Switch, Switches, SwitchRecordInvalid

log = logging.getLogger(__name__)

KEY = "switches"
READ_INTERVAL_S = 1.0
_REPLY_TIMEOUT_S = 2.0
_MAX_WRITE_ATTEMPTS = 8  # of a compare-and-set


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored switches and the revision of their record, 0 without one."""

    switches: Switches
    revision: int


async def load_switches(client: Client) -> Stored:
    """Return the stored switches. Raises nats.errors.Error, SwitchRecordInvalid."""
    try:
        bucket = await client.jetstream(timeout=_REPLY_TIMEOUT_S).key_value(BUCKET)
        entry = await bucket.get(KEY)
    except BucketNotFoundError:
        return Stored(Switches(), 0)
    except KeyNotFoundError as missing:
        return Stored(Switches(), (missing.entry.revision or 0) if missing.entry else 0)
    return Stored(Switches.decode(entry.value or b""), entry.revision or 0)


async def change_switches(client: Client, change: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply `change` to the stored switches; return them before and after. Raises nats.errors.Error, Unavailable.

    `change` is called again if another client changed the record meanwhile.
    """
    bucket = await ensure_bucket(client)
    for _ in range(_MAX_WRITE_ATTEMPTS):
        stored = await load_switches(client)
        changed = change(stored.switches)
        if changed is stored.switches:
            return stored.switches, changed
        try:
            await bucket.update(KEY, changed.encode(), last=stored.revision)
        except KeyWrongLastSequenceError:
            continue
        return stored.switches, changed
    raise Unavailable("NATS: others change the disabled tools at the same time; try again")


class SwitchMonitor:
    """Reads the switches every second, and passes them to `use` when they changed.

    If they cannot be read, the last known ones stay in use.
    """

    def __init__(self, client: Client, use: Callable[[Switches], None]) -> None:
        self._client = client
        self._use = use
        self._known = Stored(Switches(), 0)
        self._failure = ""

    async def run(self) -> None:
        """Monitor until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(READ_INTERVAL_S)

    async def check(self) -> None:
        """Read once; log why that fails."""
        try:
            await self.load()
        except Unavailable as outage:
            self._log_failure(str(outage))

    async def load(self) -> None:
        """Read once. Raises Unavailable in an outage; only logs a missing permission or a wrong record."""
        try:
            stored = await load_switches(self._client)
        except (Denied, SwitchRecordInvalid) as error:
            self._log_failure(str(error))
            return
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS: cannot read {KEY} in bucket {BUCKET}: {type(error).__name__}") from error
        if stored.revision == 0 < self._known.revision:
            self._log_failure(
                f"the record {KEY} in bucket {BUCKET} is gone; disable them again, or restart to enable them"
            )
            return
        self._failure = ""
        if stored.revision != self._known.revision:
            self._use(stored.switches)
            _log_changes(self._known.switches, stored.switches)
            self._known = stored

    def _log_failure(self, failure: str) -> None:
        if failure != self._failure:
            self._failure = failure
            log.warning(
                "cannot read which tools are disabled; the last known ones stay disabled: %s",
                failure,
                extra={"action": "switches.not_read"},
            )


def _log_changes(before: Switches, after: Switches) -> None:
    old, new = {switch.scope: switch for switch in before.all}, {switch.scope: switch for switch in after.all}
    for scope, switch in new.items():
        if old.get(scope) != switch:
            log.warning("disabled by an operator", extra={"action": "tool.disabled"} | _fields(switch))
    enablings = {switch.scope: switch for switch in after.enablings}
    for scope, switch in old.items():
        if scope not in new:
            log.warning(
                "enabled again by an operator",
                extra={"action": "tool.enabled"} | _fields(enablings.get(scope, switch)),
            )


def _fields(switch: Switch) -> dict[str, str]:
    return {
        "project_id": switch.project_id,
        "tool_name": switch.tool_name,
        "reason": switch.reason,
        "by": switch.by,
        "at": switch.at,
    }
