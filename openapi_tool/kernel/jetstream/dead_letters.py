"""Store dead letters: records of commands that get no result, or that ended executors, in a stream of their own.

A record is published on a subject that ends with a *token* for the command's project, usually its id. So the stream can
limit the records of each project. Operators read and replay them with `openapi-tool deadletters`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator

import nats.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StreamConfig, StreamInfo
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.kernel.jetstream.claimed_ids import project_of
from openapi_tool.kernel.jetstream.dead_letter_records import DeadLetter, dead_letter, encode
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.protocol.command import Delivery
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.redact import Redactor

log = logging.getLogger(__name__)

STREAM = "openapi_tool_dead_letters"
SUBJECT_PREFIX = "openapi_tool.dead_letter"
"""Beginning of the subjects; the project's token follows. In a stream that an earlier version created, this is the
whole subject."""

SUBJECT_FILTER = f"{SUBJECT_PREFIX}.*"
NO_PROJECT = "=unreadable"  # token of a command without a project in its subject

# Limits of the stream.
_MAX_AGE_S = 7 * 24 * 3600
_MAX_BYTES = 512 * 1024 * 1024
_MAX_MESSAGES = 100_000
_MAX_PER_PROJECT = 1_000  # of at most 180 kB, so that one project alone cannot fill the stream

_TIMEOUT_S = 5.0
_DISCARD_FROM_DELIVERY = 5
"""Number of the delivery from which on, in an outage, a command is settled without a record: else it would be delivered
again for as long as the outage lasts."""

_MAX_CONCURRENT = 2  # records being stored at once, shared fairly by projects: a flood must not take the CPU from calls

# Error codes of JetStream.
_STORE_FAILED = 10077  # the stream is full
_TOO_LARGE = 10054  # the message is larger than the stream allows

_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a project such as `proj_1` is its own token; others are hashed
_HASH_CHARS = 32


class DeadLetters:
    """Logs dead letters and publishes them, masked by `redactor`, to the stream, which it creates."""

    def __init__(self, client: Client, redactor: Redactor, replicas: int = 1) -> None:
        self._client = client
        self._redactor = redactor
        self._replicas = replicas
        self._permits = FairSemaphore(_MAX_CONCURRENT)
        self._subject_per_project = True  # False for a stream of an earlier version
        self._inspected = False  # whether `inspect` has looked at the stream

    async def record(self, delivery: Delivery, reason: str, message: str) -> None:
        """Record why a command gets no result. The caller settles the command afterwards.

        A record that the server refuses (stream full, no permission, too large) is logged, counted and discarded. In an
        outage nats.errors.Error is raised, so that the command is delivered again; from delivery
        `_DISCARD_FROM_DELIVERY` on the record is discarded then, too.
        """
        token = _token(delivery.subject)
        async with self._permits.permit(token):
            letter = dead_letter(delivery, reason, message, self._redactor)
            ids = {name: value for name, value in letter.identity().items() if value}
            fields: dict[str, object] = {
                "reason": reason,
                "subject": letter.subject,
                "stream_sequence": letter.stream_sequence,
                **ids,
            }
            log.error("command dead-lettered: %s", letter.message, extra={"action": "call.dead_lettered"} | fields)
            try:
                await self._publish(token, letter)
            except (nats.errors.Error, OSError) as error:
                cause = _cause(error)
                if cause == "unavailable" and delivery.number < _DISCARD_FROM_DELIVERY:
                    raise
                _report_discarded(error, cause, fields)
            else:
                metrics.DEAD_LETTERS.labels(reason).inc()

    async def _publish(self, token: str, letter: DeadLetter) -> None:
        """Publish a record; if there is no stream for it, create the stream and publish again."""
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
        try:
            info = await self._client.jetstream().stream_info(STREAM)
        except NotFoundError:
            info = await self._create()
        self._adapt_to(info.config)

    async def _create(self) -> StreamInfo:
        jetstream = self._client.jetstream()
        try:
            return await jetstream.add_stream(_new_stream(self._replicas))
        except BadRequestError:
            log.info("another replica created the dead letter stream", extra={"action": "dead_letters.raced"})
            return await jetstream.stream_info(STREAM)

    async def inspect(self) -> None:
        """Look at an existing stream once: adapt to its subjects, and warn of missing limits."""
        if self._inspected:
            return
        try:
            info = await self._client.jetstream().stream_info(STREAM)
            self._adapt_to(info.config)
        except NotFoundError:
            pass  # it is created when it is needed, with the subjects and limits of this version
        except (nats.errors.Error, OSError) as error:
            log.warning("cannot inspect stream %s: %s", STREAM, error, extra={"action": "dead_letters.unknown"})
        self._inspected = True

    def _adapt_to(self, config: StreamConfig) -> None:
        """Use the subjects that the stream stores, and warn of limits that it lacks."""
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


def _report_discarded(error: Exception, cause: str, fields: dict[str, object]) -> None:
    metrics.DEAD_LETTERS_DISCARDED.labels(cause).inc()
    log.error(
        "cannot store a dead letter in stream %s; it is discarded: %s",
        STREAM,
        error,
        extra={"action": "dead_letters.discarded", "cause": cause} | fields,
    )


def _new_stream(replicas: int) -> StreamConfig:
    """Return the stream to create, with limits per project and in total. When it is full, it refuses new records."""
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
    """Yield each limit that the stream lacks, with the option of `nats stream edit` that sets it."""
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
    """Return the token for a command's project: the project if it is plain, else `=` and its hash, or NO_PROJECT.

    The project is taken from the command's subject, which NATS permissions limit; headers and body can name any other.
    """
    project = project_of(subject)
    if not project:
        return NO_PROJECT
    if _PLAIN_TOKEN.fullmatch(project):
        return project
    try:
        encoded = project.encode()
    except UnicodeEncodeError:  # the subject had bytes that are not UTF-8, which were decoded to lone surrogates
        return NO_PROJECT
    return f"={hashlib.sha256(encoded).hexdigest()[:_HASH_CHARS]}"


def _cause(error: Exception) -> str:
    """Return why the server stored no record, as the metric of discarded dead letters names it."""
    code = error.err_code if isinstance(error, APIError) else None
    if isinstance(error, nats.errors.MaxPayloadError) or code == _TOO_LARGE:
        return "too_large"
    if isinstance(error, Denied):
        return "denied"
    if code == _STORE_FAILED:
        return "full"
    return "unavailable"
