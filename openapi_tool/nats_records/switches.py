"""Which tools an operator has disabled (*switches*): the record in NATS, and how the service follows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from nats.aio.client import Client

from openapi_tool.nats_records.shared_bucket import BUCKET, shared_bucket
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.change import change as change_record
from openapi_tool.state.nats_kv import NatsKvRecords
from openapi_tool.state.port import AccessDenied, Contended
from openapi_tool.tools.switches import Switches, SwitchRecordInvalid

log = logging.getLogger(__name__)

SWITCHES_KEY = "switches"
SWITCHES_REMEDY = f"delete it, and disable again what must not run: nats kv del {BUCKET} {SWITCHES_KEY} --force"
SWITCHES_READ_INTERVAL_S = 1.0  # between two readings
_SWITCHES_TIMEOUT_S = 2.0  # of a request while the service runs
_CHANGE_TIMEOUT_S = 5.0  # of a request of an operator's command


@dataclass(frozen=True, slots=True)
class StoredSwitches:
    """The stored switches, and the revision of their record; 0 without a record."""

    switches: Switches = field(default_factory=Switches)
    revision: int = 0


def _records(client: Client, timeout_s: float) -> NatsKvRecords:
    return NatsKvRecords(client, shared_bucket(), timeout_s)


async def load_switches(client: Client) -> StoredSwitches:
    """Return the stored switches. Raises Unavailable, SwitchRecordInvalid."""
    stored = await _records(client, _SWITCHES_TIMEOUT_S).read(SWITCHES_KEY)
    return StoredSwitches(_switches(stored.value), stored.revision)


def _switches(record: bytes | None) -> Switches:
    return Switches() if record is None else Switches.decode(record)


async def change_switches(client: Client, change: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply `change`, again after each conflict; return the switches before and after.

    Raises SwitchRecordInvalid, Unavailable.
    """
    before = after = Switches()

    def changed(stored: bytes | None) -> bytes | None:
        nonlocal before, after
        before = _switches(stored)
        after = change(before)
        return None if after is before else after.encode()  # None: nothing to write

    try:
        await change_record(_records(client, _CHANGE_TIMEOUT_S), SWITCHES_KEY, changed)
    except Contended:
        raise Unavailable(
            "NATS: others change the disabled tools at the same time, or no stream stores them; try again"
        ) from None
    return before, after


class SwitchMonitor:
    """Passes the switches to `use` when they changed; the last known ones stay in use if they cannot be read.

    At the start none are known, so nothing may run until they have been read.
    """

    def __init__(self, client: Client, use: Callable[[Switches], None]) -> None:
        self._client = client
        self._use = use
        self._known = StoredSwitches()
        self._failure = ""

    async def run(self) -> None:
        """Read the switches again and again until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(SWITCHES_READ_INTERVAL_S)

    async def check(self) -> None:
        """Read once; log why that fails."""
        try:
            await self.load()
        except Unavailable as outage:
            self._log_failure(str(outage))

    async def load(self) -> None:
        """Read once. Raises Unavailable if that is impossible: an outage, no permission or a wrong record."""
        try:
            stored = await load_switches(self._client)
        except AccessDenied as error:
            raise Unavailable(f"NATS: {error}") from error
        except SwitchRecordInvalid as error:
            raise Unavailable(f"NATS: key {SWITCHES_KEY} in bucket {BUCKET}: {error}; {SWITCHES_REMEDY}") from error
        except Unavailable as outage:
            raise Unavailable(f"cannot read {SWITCHES_KEY} in bucket {BUCKET}: {outage}") from outage
        record_is_gone = stored.revision == 0 and self._known.revision > 0
        if record_is_gone:
            await self._write_again()
            return
        self._failure = ""
        if stored.revision != self._known.revision:
            self._use(stored.switches)
            _log_changes(self._known.switches, stored.switches)
            self._known = stored

    async def _write_again(self) -> None:
        """Store the known switches, whose record was lost with its bucket; another replica may do so first."""
        records = _records(self._client, _SWITCHES_TIMEOUT_S)
        try:
            written = await records.write(SWITCHES_KEY, self._known.switches.encode(), revision=0)
        except Unavailable as outage:
            self._log_failure(
                f"the record {SWITCHES_KEY} in bucket {BUCKET} is gone and cannot be written again: {outage}; "
                "disable them again, or restart to enable them"
            )
            return
        if written is not None:
            log.warning(
                "the record of disabled tools was gone and is written again",
                extra={"action": "switches.written_again"},
            )

    def _log_failure(self, failure: str) -> None:
        if failure != self._failure:  # else it was logged by the check before
            self._failure = failure
            log.warning(
                "cannot read which tools are disabled; the last known ones stay disabled: %s",
                failure,
                extra={"action": "switches.not_read"},
            )


def _log_changes(before: Switches, after: Switches) -> None:
    disabled_before = {switch.scope: switch for switch in before.all}
    disabled_now = {switch.scope: switch for switch in after.all}
    for scope, switch in disabled_now.items():
        if disabled_before.get(scope) != switch:
            log.warning("disabled by an operator", extra={"action": "tool.disabled"} | asdict(switch))
    enablings = {switch.scope: switch for switch in after.enablings}  # who enabled it, and why
    for scope, switch in disabled_before.items():
        if scope not in disabled_now:
            log.warning(
                "enabled again by an operator",
                extra={"action": "tool.enabled"} | asdict(enablings.get(scope, switch)),
            )
