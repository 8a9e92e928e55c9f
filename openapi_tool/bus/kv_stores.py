"""KV buckets: compare-and-set on their records; session key, ack floor, disabled tools, parked results."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, StreamConfig
from nats.js.errors import (
    APIError,
    BadRequestError,
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoStreamResponseError,
)
from nats.js.kv import KeyValue

from openapi_tool.bus.client import Denied
from openapi_tool.bus.connection import outage_as_unavailable
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.tools.switches import Switches, SwitchRecordInvalid

log = logging.getLogger(__name__)

_MAX_WRITE_ATTEMPTS = 8  # of a compare-and-set


async def open_bucket(jetstream: JetStreamContext, config: KeyValueConfig) -> KeyValue:
    """Open a bucket; create it if it is missing. Raises nats.errors.Error."""
    try:
        return await jetstream.key_value(config.bucket)
    except BucketNotFoundError:
        with contextlib.suppress(BadRequestError):  # another executor created it first, with other options
            return await jetstream.create_key_value(config)
        return await jetstream.key_value(config.bucket)


async def read_key(bucket: KeyValue, key: str) -> tuple[int, bytes | None]:
    """Return revision and value of a key: 0 and None if it was never written. Raises nats.errors.Error."""
    try:
        entry = await bucket.get(key)
    except KeyNotFoundError as missing:  # a deleted key still has a revision
        return (missing.entry.revision or 0) if missing.entry else 0, None
    return entry.revision or 0, entry.value or b""


@contextmanager
def naming(bucket: str) -> Iterator[None]:
    """Add the bucket to an error of JetStream, such as that of a reached limit, which does not name it."""
    try:
        yield
    except APIError as error:
        error.description = f"{error.description or ''} (bucket {bucket})".strip()
        raise


class Records:
    """Records of one bucket, changed by compare-and-set; all methods raise nats.errors.Error.

    The first write creates a missing bucket. After an error the bucket is opened again, as it may have been replaced.
    """

    def __init__(self, client: Client, config: KeyValueConfig, timeout_s: float = 5.0) -> None:
        self.client = client
        self._config = config
        self._timeout_s = timeout_s
        self._bucket: KeyValue | None = None

    async def ensure(self) -> KeyValue:
        """Open the bucket; create it if it is missing."""
        self._bucket = await open_bucket(self.client.jetstream(timeout=self._timeout_s), self._config)
        return self._bucket

    async def read(self, key: str) -> tuple[int, bytes | None]:
        """Return revision and value of a record: 0 and None if it was never written."""
        try:
            if self._bucket is None:
                self._bucket = await self.client.jetstream(timeout=self._timeout_s).key_value(self._config.bucket)
            return await read_key(self._bucket, key)
        except BucketNotFoundError:
            return 0, None
        except nats.errors.Error:
            self._bucket = None
            raise

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision; return the new one, None if it was changed meanwhile."""
        try:
            bucket = self._bucket or await self.ensure()
            with naming(self._config.bucket):
                return await bucket.update(key, value, last=revision)
        except KeyWrongLastSequenceError:
            return None
        except NoStreamResponseError:  # the bucket was deleted, or has no leader: the next read reports it
            self._bucket = None
            return None
        except nats.errors.Error:
            self._bucket = None
            raise

    async def change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> bool:
        """Apply `change`, again after each conflict; None from it writes nothing. Return False after too many."""
        for _ in range(_MAX_WRITE_ATTEMPTS):
            revision, stored = await self.read(key)
            changed = change(stored)
            if changed is None or await self.write(key, changed, revision):
                return True
        return False


BUCKET = "openapi_tool"
STREAM = f"KV_{BUCKET}"
RESTRICT = f"nats stream edit {STREAM} --allow-direct --no-allow-rollup --force"
"""Command with which a bucket of an earlier version gets the configuration of a new one."""

SESSION_KEY = "session_key"


async def ensure_bucket(client: Client, replicas: int = 1) -> KeyValue:
    """Open the bucket, to read from its leader; create it if it is missing. Raises nats.errors.Error."""
    jetstream = client.jetstream()
    try:
        await jetstream.key_value(BUCKET)
    except BucketNotFoundError:
        with contextlib.suppress(BadRequestError):  # another executor created it first, with other options
            await jetstream.add_stream(_shared_bucket(replicas))
    return KeyValue(BUCKET, STREAM, f"$KV.{BUCKET}.", jetstream, direct=False)


def _shared_bucket(replicas: int) -> StreamConfig:
    """Return the configuration of a bucket whose keys users may be permitted one by one.

    Direct gets can be permitted by key, other reads cannot. A rollup header would remove the other keys; nats-py's
    buckets allow it.
    """
    return StreamConfig(
        name=STREAM,
        subjects=[f"$KV.{BUCKET}.>"],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        deny_delete=True,
        allow_direct=True,
        allow_rollup_hdrs=False,
        num_replicas=replicas,
    )


_SESSION_KEY_BYTES = 32


async def shared_session_key(client: Client, replicas: int = 1) -> bytes:
    """Return the key for session identities, which the first executor creates and none changes. Raises Unavailable."""
    try:
        bucket = await ensure_bucket(client, replicas)
        _, key = await read_key(bucket, SESSION_KEY)
        return _checked(key) if key else await _store_session_key(bucket, secrets.token_bytes(_SESSION_KEY_BYTES))
    except nats.errors.Error as error:
        raise Unavailable(f"NATS: no shared session key (set session.key): {type(error).__name__}: {error}") from error


async def restore_session_key(client: Client, key: bytes, replicas: int = 1) -> None:
    """Store the key after its bucket was deleted, for executors which start later.

    Raises nats.errors.Error, or Unavailable if the stored key is empty.
    """
    if await _store_session_key(await ensure_bucket(client, replicas), key) != key:
        log.error(
            "another executor created a different session key: the executors compute different sessions; restart all",
            extra={"action": "session_key.differs"},
        )


async def _store_session_key(bucket: KeyValue, key: bytes) -> bytes:
    """Store the key unless there is one; return the stored one."""
    try:
        await bucket.create(SESSION_KEY, key)
    except KeyWrongLastSequenceError:  # another executor was first
        key = (await bucket.get(SESSION_KEY)).value or b""
    return _checked(key)


def _checked(key: bytes) -> bytes:
    """Refuse a key that no executor made: a NATS user may have an answer of JetStream, which it knows, stored there."""
    if not key:
        raise Unavailable(f"NATS: the key {SESSION_KEY} in bucket {BUCKET} is empty; remove it")
    if len(key) != _SESSION_KEY_BYTES:
        raise Unavailable(
            f"NATS: the key {SESSION_KEY} in bucket {BUCKET} has {len(key)} bytes instead of {_SESSION_KEY_BYTES}, "
            "so no executor made it; remove it"
        )
    return key


FLOOR_PREFIX = "floor"


@dataclass(frozen=True, slots=True)
class AckFloor:
    """All commands up to `sequence` of a stream that match the filter are settled: where a new durable resumes.

    Otherwise it would redeliver every command of the last day. `created` distinguishes a stream from an earlier one of
    the same name, whose sequences mean nothing.
    """

    stream: str
    created: str
    filter_subject: str
    sequence: int


async def load_ack_floor(client: Client, durable: str, current: AckFloor) -> int:
    """Return the stored sequence for stream and filter of `current`, 0 without one. Raises nats.errors.Error."""
    try:
        _, value = await Records(client, KeyValueConfig(bucket=BUCKET)).read(_floor_key(durable))
    except Denied as denied:
        log.warning(
            "cannot read the ack floor; the durable starts at the first command of the stream: %s",
            denied,
            extra={"action": "ack_floor.denied"},
        )
        return 0
    return _stored_sequence(value, current)


async def save_ack_floor(client: Client, durable: str, current: AckFloor) -> None:
    """Store `current` if it is ahead of the stored floor; on a conflict the other stays. Raises nats.errors.Error."""
    bucket = await client.jetstream().key_value(BUCKET)
    revision, value = await read_key(bucket, _floor_key(durable))
    if _stored_sequence(value, current) >= current.sequence:
        return
    try:
        await bucket.update(_floor_key(durable), orjson.dumps(asdict(current)), last=revision)
    except KeyWrongLastSequenceError:
        log.debug("another replica stored the ack floor", extra={"action": "ack_floor.raced"})


def _floor_key(durable: str) -> str:
    return f"{FLOOR_PREFIX}.{durable}"


def _stored_sequence(value: bytes | None, current: AckFloor) -> int:
    """Return the stored sequence, 0 if it is of another stream or filter than `current`."""
    try:
        found = orjson.loads(value or b"null")
        stored = AckFloor(found["stream"], found["created"], found["filter_subject"], int(found["sequence"]))
    except (TypeError, ValueError, KeyError):
        return 0
    return stored.sequence if stored == replace(current, sequence=stored.sequence) else 0


SWITCHES_KEY = "switches"
SWITCHES_REMEDY = f"delete it, and disable again what must not run: nats kv del {BUCKET} {SWITCHES_KEY} --force"
SWITCHES_READ_INTERVAL_S = 1.0
_SWITCHES_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StoredSwitches:
    """The stored switches and the revision of their record, 0 without one."""

    switches: Switches = field(default_factory=Switches)
    revision: int = 0


async def load_switches(client: Client) -> StoredSwitches:
    """Return the stored switches. Raises nats.errors.Error, SwitchRecordInvalid."""
    return await _read_switches(Records(client, KeyValueConfig(bucket=BUCKET), _SWITCHES_TIMEOUT_S))


async def _read_switches(records: Records) -> StoredSwitches:
    revision, record = await records.read(SWITCHES_KEY)
    return StoredSwitches(_switches(record), revision)


def _switches(record: bytes | None) -> Switches:
    return Switches() if record is None else Switches.decode(record)


async def change_switches(client: Client, change: Callable[[Switches], Switches]) -> tuple[Switches, Switches]:
    """Apply `change`, again after each conflict; return the switches before and after.

    Raises nats.errors.Error, SwitchRecordInvalid, Unavailable.
    """
    await ensure_bucket(client)
    records = Records(client, KeyValueConfig(bucket=BUCKET))
    before = after = Switches()

    def changed(stored: bytes | None) -> bytes | None:
        nonlocal before, after
        before = _switches(stored)
        after = change(before)
        return None if after is before else after.encode()

    if await records.change(SWITCHES_KEY, changed):
        return before, after
    raise Unavailable("NATS: others change the disabled tools at the same time, or no stream stores them; try again")


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
        """Read the switches every second until cancelled."""
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
        except Denied as error:
            raise Unavailable(f"NATS: {error}") from error
        except SwitchRecordInvalid as error:
            raise Unavailable(f"NATS: key {SWITCHES_KEY} in bucket {BUCKET}: {error}; {SWITCHES_REMEDY}") from error
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"NATS: cannot read {SWITCHES_KEY} in bucket {BUCKET}: {type(error).__name__}") from error
        if stored.revision == 0 and self._known.revision > 0:
            self._log_failure(
                f"the record {SWITCHES_KEY} in bucket {BUCKET} is gone; disable them again, or restart to enable them"
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
            log.warning("disabled by an operator", extra={"action": "tool.disabled"} | asdict(switch))
    enablings = {switch.scope: switch for switch in after.enablings}
    for scope, switch in old.items():
        if scope not in new:
            log.warning(
                "enabled again by an operator",
                extra={"action": "tool.enabled"} | asdict(enablings.get(scope, switch)),
            )


PARKED_BUCKET = "openapi_tool_parked"
PARKED_KEYS = "result.*"


class ParkedResultStore:
    """Stores parked results by name for an hour; all methods raise Unavailable."""

    def __init__(self, client: Client, replicas: int) -> None:
        self._client = client
        self._config = KeyValueConfig(
            bucket=PARKED_BUCKET,
            ttl=3600,
            max_bytes=64 * 2**20,
            max_value_size=512 * 1024,
            replicas=replicas,
        )

    async def ensure(self) -> None:
        """Create the bucket if it is missing."""
        with outage_as_unavailable():
            await open_bucket(self._client.jetstream(), self._config)

    async def put(self, name: str, record: bytes) -> None:
        """Store a record."""
        with outage_as_unavailable():
            bucket = await open_bucket(self._client.jetstream(), self._config)
            with naming(PARKED_BUCKET):
                await bucket.put(_parked_key(name), record)

    async def get(self, name: str) -> bytes | None:
        """Return a record, None if there is none."""
        with outage_as_unavailable():
            _, record = await Records(self._client, self._config).read(_parked_key(name))
            return record

    async def delete(self, name: str) -> None:
        """Delete a record with all its revisions."""
        with outage_as_unavailable():
            bucket = await self._client.jetstream().key_value(PARKED_BUCKET)
            await bucket.purge(_parked_key(name))


def _parked_key(name: str) -> str:
    return f"result.{name}"
