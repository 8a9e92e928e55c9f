"""Dead letters: format of the records, and the stream that stores them."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from openapi_tool.bus.client import Denied
from openapi_tool.bus.leases import project_of
from openapi_tool.bus.wire import shown_subject
from openapi_tool.concurrency import FairSemaphore
from openapi_tool.protocol.command import BodyDigest, Delivery
from openapi_tool.protocol.dialect import claimed_identity
from openapi_tool.protocol.identity import TOPOLOGY, TRACEPARENT
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.redact import Redactor

log = logging.getLogger(__name__)

_MAX_WHOLE_BYTES = 160 * 1024
"""Limit of a record with the whole command: a body of 64 KiB in base64 fits, with headers of ordinary text."""

# Limits of a command that is recorded in part.
_HEAD_BYTES = 4 * 1024
_HEADERS_BYTES = 16 * 1024
_VALUE_CHARS = 1_024

_ID_CHARS = 256
_MESSAGE_CHARS = 2_000
_IDENTITY_HEADERS = {name.lower() for name in (*TOPOLOGY, TRACEPARENT)}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Command whose result cannot reach any turn; times are ISO 8601.

    `number` is the sequence of its record, 0 before it is stored; of an `abandoned` letter, which has none, that of the
    command. If not `whole`, `data` holds the first bytes of the body, and headers may be truncated or missing; `size`
    (bytes) and `sha256` are of the whole body.
    """

    number: int
    reason: str
    message: str
    subject: str
    headers: Mapping[str, str]
    data: bytes
    size: int
    sha256: str
    whole: bool
    published_at: str
    stream: str
    stream_sequence: int
    attempt: int = 0
    abandoned: bool = False

    @property
    def id(self) -> str:
        """Id on the command line."""
        return f"command-{self.number}" if self.abandoned else str(self.number)

    @property
    def version(self) -> str:
        """Return the protocol version in the subject; empty if it has none."""
        return self.subject.split(".", 2)[1] if "." in self.subject else ""

    def identity(self) -> dict[str, str | None]:
        """Return the caller's ids as the command claims them, truncated; None where missing."""
        claimed = claimed_identity(self.subject, self.headers, self.data)
        names = ("project_id", "channel_id", "agent_id", "agent_turn_id", "tool_call_id")
        return {name: (getattr(claimed, name) or "")[:_ID_CHARS] or None for name in names}


def without_secrets(letter: DeadLetter, redactor: Redactor) -> DeadLetter:
    """Return a letter with this executor's secrets masked: a sender may have sent one."""
    return replace(
        letter,
        subject=redactor.text(letter.subject),
        headers=redactor.value(dict(letter.headers)),
        data=redactor.text(letter.data.decode(errors="surrogateescape")).encode(errors="surrogateescape"),
    )


def dead_letter(delivery: Delivery, reason: str, message: str, redactor: Redactor) -> DeadLetter:
    """Make the dead letter of a delivery with secrets masked."""
    letter = unmasked_letter(delivery, reason, redactor.text(message)[:_MESSAGE_CHARS])
    if letter.whole:
        return without_secrets(letter, redactor)
    # Truncate while masking: to mask first would search a body of any size.
    beginning = redactor.head(letter.data.decode(errors="surrogateescape"), _HEAD_BYTES)
    return replace(
        letter,
        subject=redactor.text(letter.subject),
        headers=_bounded_headers(letter.headers, redactor.head),
        data=beginning.encode(errors="surrogateescape"),
    )


def unmasked_letter(delivery: Delivery, reason: str, message: str) -> DeadLetter:
    """Return the letter of a delivery with the command as it was received."""
    body = delivery.truncated_body or BodyDigest.of(delivery.data)
    return DeadLetter(
        number=0,
        reason=reason,
        message=message,
        subject=shown_subject(delivery.subject),
        headers=delivery.headers,
        data=delivery.data,
        size=body.size,
        sha256=body.sha256,
        whole=delivery.truncated_body is None and delivery.headers_complete,
        published_at=delivery.published_at.isoformat(),
        stream=delivery.stream,
        stream_sequence=delivery.stream_sequence,
        attempt=delivery.attempt,
    )


def encode(letter: DeadLetter, max_bytes: int) -> bytes:
    """Encode a letter: the whole command if it fits into `max_bytes`, else its beginning and identity."""
    if letter.whole:
        record = _encoded(letter)
        if len(record) <= min(max_bytes, _MAX_WHOLE_BYTES):
            return record
    headers = _bounded_headers(letter.headers, lambda text, chars: text[:chars])
    return _encoded(replace(letter, whole=False, headers=headers, data=letter.data[:_HEAD_BYTES]))


def _encoded(letter: DeadLetter) -> bytes:
    fields = asdict(letter)
    del fields["number"], fields["abandoned"]
    fields["data_base64"] = base64.b64encode(fields.pop("data")).decode()
    return orjson.dumps(fields | letter.identity() | {"recorded_at": datetime.now(UTC)})


def _bounded_headers(headers: Mapping[str, str], head: Callable[[str, int], str]) -> dict[str, str]:
    """Return headers up to a size bound, identity headers first; `head` truncates names and values."""
    included: dict[str, str] = {}
    left = _HEADERS_BYTES
    for name in sorted(headers, key=lambda name: name.lower() not in _IDENTITY_HEADERS):
        short_name, value = head(name, _VALUE_CHARS), head(headers[name], _VALUE_CHARS)
        left -= len(orjson.dumps((short_name, value)))
        if left < 0:
            break
        included[short_name] = value
    return included


def decode(record: bytes, number: int) -> DeadLetter:
    """Decode a record; the first format always held the whole command. Raises ValueError, KeyError or TypeError."""
    fields: dict[str, Any] = orjson.loads(record)
    data = base64.b64decode(fields["data_base64"])
    body = BodyDigest.of(data)
    return DeadLetter(
        number=number,
        reason=fields["reason"],
        message=fields["message"],
        subject=fields["subject"],
        headers=fields["headers"],
        data=data,
        size=fields.get("size", body.size),
        sha256=fields.get("sha256", body.sha256),
        whole=fields.get("whole", True),
        published_at=fields["published_at"],
        stream=fields.get("stream", ""),
        stream_sequence=fields["stream_sequence"],
        attempt=fields["attempt"],
    )


STREAM = "openapi_tool_dead_letters"
SUBJECT_PREFIX = "openapi_tool.dead_letter"
"""Prefix of the subjects. A project token follows, so that limits apply per project; earlier versions had none."""

SUBJECT_FILTER = f"{SUBJECT_PREFIX}.*"
NO_PROJECT = "=unreadable"
_MAX_AGE_S = 7 * 24 * 3600
_MAX_BYTES = 512 * 1024 * 1024
_MAX_MESSAGES = 100_000
_MAX_PER_PROJECT = 1_000  # of at most 180 kB, so that one project alone cannot fill the stream

_TIMEOUT_S = 5.0
_LAST_DELIVERY = 5  # during an outage; then the command is settled without a record
_MAX_CONCURRENT = 2  # records being stored, shared fairly by projects: a flood must not take the CPU from calls

_STORE_FAILED = 10077  # error code of a full stream
_TOO_LARGE = 10054
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_HASH_CHARS = 32


class DeadLetters:
    """Logs dead letters and publishes them, masked by `redactor`, to the stream, which it creates."""

    def __init__(self, client: Client, redactor: Redactor, replicas: int = 1) -> None:
        self._client = client
        self._redactor = redactor
        self._replicas = replicas
        self._permits = FairSemaphore(_MAX_CONCURRENT)
        self._subject_per_project = True
        self._inspected = False

    async def record(self, delivery: Delivery, reason: str, message: str) -> None:
        """Record why a command gets no result. The caller settles the command afterwards.

        A record that the server refuses (stream full, no permission, too large) is logged, counted and discarded; in an
        outage nats.errors.Error is raised before delivery `_LAST_DELIVERY`.
        """
        token = _token(delivery.subject)
        async with self._permits.permit(token):
            letter = dead_letter(delivery, reason, message, self._redactor)
            fields = {"reason": reason, "subject": letter.subject, "stream_sequence": letter.stream_sequence}
            fields |= {name: value for name, value in letter.identity().items() if value}
            log.error("command dead-lettered: %s", letter.message, extra={"action": "call.dead_lettered"} | fields)
            try:
                await self._publish(token, letter)
            except (nats.errors.Error, OSError) as error:
                cause = _cause(error)
                if cause == "unavailable" and delivery.attempt < _LAST_DELIVERY:
                    raise
                metrics.DEAD_LETTERS_DISCARDED.labels(cause).inc()
                log.error(  # noqa: TRY400 - refused by the server, not a defect
                    "cannot store a dead letter in stream %s; it is discarded: %s",
                    STREAM,
                    error,
                    extra={"action": "dead_letters.discarded", "cause": cause} | fields,
                )
            else:
                metrics.DEAD_LETTERS.labels(reason).inc()

    async def inspect(self) -> None:
        """Check the configuration of an existing stream once, and warn of missing limits."""
        if self._inspected:
            return
        try:
            with suppress(NotFoundError):
                self._adapt_to((await self._client.jetstream().stream_info(STREAM)).config)
        except (nats.errors.Error, OSError) as error:
            log.warning("cannot inspect stream %s: %s", STREAM, error, extra={"action": "dead_letters.unknown"})
        self._inspected = True

    async def _publish(self, token: str, letter: DeadLetter) -> None:
        record = encode(letter, self._client.max_payload)
        jetstream = self._client.jetstream()
        try:
            await jetstream.publish(self._subject(token), record, timeout=_TIMEOUT_S)
        except NoStreamResponseError:
            await self.ensure()
            await jetstream.publish(self._subject(token), record, timeout=_TIMEOUT_S)

    def _subject(self, token: str) -> str:
        return f"{SUBJECT_PREFIX}.{token}" if self._subject_per_project else SUBJECT_PREFIX

    async def ensure(self) -> None:
        """Create the stream if it is missing. Raises nats.errors.Error."""
        jetstream = self._client.jetstream()
        try:
            info = await jetstream.stream_info(STREAM)
        except NotFoundError:
            try:
                info = await jetstream.add_stream(_new_stream(self._replicas))
            except BadRequestError:
                log.info("another replica created the dead letter stream", extra={"action": "dead_letters.raced"})
                info = await jetstream.stream_info(STREAM)
        self._adapt_to(info.config)

    def _adapt_to(self, config: StreamConfig) -> None:
        self._subject_per_project = SUBJECT_FILTER in (config.subjects or [])
        if missing := dict(_missing_limits(config)):
            log.warning(
                "stream %s has no %s: one project can evict the dead letters of others or fill the disk; run: "
                "nats stream edit %s %s --force",
                STREAM,
                ", ".join(missing),
                STREAM,
                " ".join(missing.values()),
                extra={"action": "dead_letters.unlimited"},
            )


def _new_stream(replicas: int) -> StreamConfig:
    """Limit records per project and in total. With `discard new` a full stream refuses new records."""
    return StreamConfig(
        name=STREAM,
        subjects=[SUBJECT_FILTER],
        max_age=_MAX_AGE_S,
        max_bytes=_MAX_BYTES,
        max_msgs=_MAX_MESSAGES,
        max_msgs_per_subject=_MAX_PER_PROJECT,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        num_replicas=replicas,
    )


def _missing_limits(config: StreamConfig) -> Iterator[tuple[str, str]]:
    subjects = list(config.subjects or [])
    if SUBJECT_FILTER not in subjects:
        yield f"subject {SUBJECT_FILTER}", f"--subjects '{','.join([*subjects, SUBJECT_FILTER])}'"
    if not config.max_age:
        yield "age limit", f"--max-age {_MAX_AGE_S}s"
    if (config.max_bytes or 0) <= 0:
        yield "byte limit", f"--max-bytes {_MAX_BYTES}"
    if (config.max_msgs or 0) <= 0:
        yield "message limit", f"--max-msgs {_MAX_MESSAGES}"
    if config.max_msgs_per_subject <= 0:
        yield "message limit per subject", f"--max-msgs-per-subject {_MAX_PER_PROJECT}"
    if config.discard != DiscardPolicy.NEW or not config.discard_new_per_subject:
        yield "discard policy `new` per subject", "--discard new --discard-per-subject"


def _token(subject: str) -> str:
    """Return the subject token of a command's project: the name if it is plain, else its hash; NO_PROJECT without one.

    Only the subject can be trusted: NATS permissions limit it, but not headers and body.
    """
    project = project_of(subject)
    if _PLAIN_TOKEN.fullmatch(project):
        return project
    try:
        return f"={hashlib.sha256(project.encode()).hexdigest()[:_HASH_CHARS]}" if project else NO_PROJECT
    except UnicodeEncodeError:
        return NO_PROJECT


def _cause(error: Exception) -> str:
    code = error.err_code if isinstance(error, APIError) else None
    if isinstance(error, nats.errors.MaxPayloadError) or code == _TOO_LARGE:
        return "too_large"
    if isinstance(error, Denied):
        return "denied"
    return "full" if code == _STORE_FAILED else "unavailable"
