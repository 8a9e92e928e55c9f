"""Least NATS permissions of each command of `openapi-tool`: the subjects that its user must publish and subscribe to.

Only the executor and `nats durable` may create a consumer, and only their durable. A user who may create any consumer
can have the server publish stored messages on any subject. So commands that only read streams request single messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from openapi_tool.kernel.jetstream import ack_floor, dead_letters, hand_back, leases, parked_records
from openapi_tool.nats_client.client import routed
from openapi_tool.nats_client.options import INBOX, DurableOptions
from openapi_tool.nats_records import replica_statistics, shared_bucket, switches
from openapi_tool.nats_records import session_key as stored_session_key
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.protocol.subjects import doorbell_filter

_API = "$JS.API"  # prefix of the subjects of JetStream's requests
_REPLIES = f"{INBOX}.>"  # on which every user receives replies


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects, possibly with NATS wildcards, that a user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...] = (_REPLIES,)

    def as_object(self) -> dict[str, dict[str, list[str]]]:
        """Return the `permissions` of a user as a JSON object."""
        return {name: {"allow": list(subjects)} for name, subjects in asdict(self).items()}

    def union(self, other: Permissions) -> Permissions:
        """Return both permissions, each subject once."""
        publish = dict.fromkeys(self.publish + other.publish)
        subscribe = dict.fromkeys(self.subscribe + other.subscribe)
        return Permissions(tuple(publish), tuple(subscribe))

    def over(self, domain: str | None, inbox: str) -> Permissions:
        """Return the permissions for another JetStream domain and inbox prefix."""
        subscribe = tuple(f"{inbox}.>" if subject == _REPLIES else subject for subject in self.subscribe)
        return Permissions(tuple(routed(subject, domain) for subject in self.publish), subscribe)

    def server_config(self) -> str:
        """Return the `permissions` block of a user in the server's configuration."""
        lines = ["permissions: {"]
        for name, subjects in asdict(self).items():
            allowed = [f"      {json.dumps(subject)}" for subject in subjects]
            lines += [f"  {name}: {{", "    allow: [", *allowed, "    ]", "  }"]
        return "\n".join([*lines, "}"])


def executor_permissions(options: DurableOptions, stream: str, *, session_key: bool, quotas: bool) -> Permissions:
    """Return the permissions of `serve`; `stream` is the command stream.

    - `session_key`: whether the settings contain the session key, so that it is not stored in NATS.
    - `quotas`: whether the records of quotas are in the kernel's NATS, too.
    """
    notices = hand_back.notice_subject(stream, options.name)  # by which replicas tell which commands were never run
    _, _, project, *_ = options.filter_subject.split(".")  # cg.VERSION.PROJECT.…; `*` for all projects
    key_record = f"$KV.{shared_bucket.BUCKET}.{stored_session_key.SESSION_KEY}"
    own = Permissions(
        publish=(
            f"{_API}.STREAM.NAMES",
            f"{_API}.STREAM.INFO.{stream}",
            f"{_API}.STREAM.CREATE.{stream}",
            f"{_API}.CONSUMER.INFO.{stream}.{options.name}",
            f"{_API}.CONSUMER.CREATE.{stream}.{options.name}.{options.filter_subject}",
            f"{_API}.CONSUMER.MSG.NEXT.{stream}.{options.name}",
            f"{_API}.CONSUMER.RESET.{stream}.{options.name}",
            f"$JS.ACK.{stream}.{options.name}.>",
            # Doorbells of any channel: that of the waiting turn may differ from that of the command.
            doorbell_filter(options.version, project),
            dead_letters.SUBJECT_PREFIX,  # the whole subject in a stream that an earlier version created
            dead_letters.SUBJECT_FILTER,
            replica_statistics.STATS_REPLIES,
            notices,
            *_created_stream(dead_letters.STREAM),
            *_bucket(leases.BUCKET, leases.KEYS),
            *_bucket(parked_records.PARKED_BUCKET, parked_records.PARKED_KEYS),
            *_bucket(shared_bucket.BUCKET, f"{ack_floor.FLOOR_PREFIX}.{options.name}"),
            *([] if session_key else [key_record]),
            _direct_get(shared_bucket.BUCKET, switches.SWITCHES_KEY),
            # Needed to write the record again if its bucket was deleted. Otherwise the next replica would start with
            # every tool enabled.
            f"$KV.{shared_bucket.BUCKET}.{switches.SWITCHES_KEY}",
        ),
        subscribe=(_REPLIES, replica_statistics.STATS_SUBJECT, notices),
    )
    return own.union(quota_permissions()) if quotas else own


def quota_permissions() -> Permissions:
    """Return the permissions of `serve` for the records of quotas."""
    changes = (f"{LIMITS.bucket.changes}.>", f"{BUDGETS.bucket.changes}.>")
    return Permissions(
        publish=(
            *_bucket(LIMITS.bucket.name, LIMITS.keys),
            *_bucket(BUDGETS.bucket.name, BUDGETS.keys),
            *(_read(BUDGETS.earlier.stream) if BUDGETS.earlier else ()),
            *changes,
        ),
        subscribe=(_REPLIES, *changes),
    )


def gateway_permissions(
    buckets: Mapping[str, str],
    purged: Iterable[str],
    stream: str,
    stream_subjects: str,
    command_stream: str,
    *,
    session_key: bool,
    quotas: bool,
) -> Permissions:
    """Return the permissions of `gateway` and its commands.

    - `buckets`: the gateway's own buckets, with the pattern of their keys; in those of `purged` it deletes old keys.
    - `stream`, `stream_subjects`: the gateway's own stream with its subjects, as one pattern.
    - `command_stream`: the kernel's stream, whose number of replicas the gateway takes over for its own.
    - `session_key`: whether the settings contain the session key, so that it is not stored in NATS.
    - `quotas`: whether the records of quotas are in the same NATS.
    """
    stored_key = [  # subjects to read and write it
        f"{_API}.STREAM.MSG.GET.KV_{shared_bucket.BUCKET}",
        f"$KV.{shared_bucket.BUCKET}.{stored_session_key.SESSION_KEY}",
    ]
    own = Permissions(
        publish=(
            f"{_API}.STREAM.NAMES",
            f"{_API}.STREAM.INFO.{command_stream}",
            *(subject for bucket, keys in buckets.items() for subject in _listed_bucket(bucket, keys)),
            *(f"{_API}.STREAM.PURGE.KV_{bucket}" for bucket in purged),
            *_created_stream(stream),
            f"{_API}.DIRECT.GET.{stream}",
            stream_subjects,
            replica_statistics.STATS_REPLIES,
            *_created_stream(f"KV_{shared_bucket.BUCKET}"),
            _direct_get(shared_bucket.BUCKET, switches.SWITCHES_KEY),
            f"$KV.{shared_bucket.BUCKET}.{switches.SWITCHES_KEY}",
            *([] if session_key else stored_key),
        ),
        subscribe=(_REPLIES, replica_statistics.STATS_SUBJECT),
    )
    return own.union(quota_permissions()) if quotas else own


def dead_letter_permissions(options: DurableOptions, stream: str) -> Permissions:
    """Return the permissions of `deadletters`, including `--abandoned` and `replay`."""
    return Permissions(
        publish=(
            f"{_API}.STREAM.NAMES",
            f"{_API}.CONSUMER.INFO.{stream}.{options.name}",
            f"{_API}.STREAM.MSG.GET.{stream}",
            f"{_API}.STREAM.MSG.GET.{dead_letters.STREAM}",
            f"{_API}.STREAM.MSG.DELETE.{dead_letters.STREAM}",
            options.filter_subject,
        )
    )


def inspect_permissions(options: DurableOptions, stream: str) -> Permissions:
    """Return the permissions of `inspect` and `usage`.

    `inspect` reads the command stream, the dead letters and the leases; `usage` reads the accounts of budgets.
    """
    return Permissions(
        publish=(
            f"{_API}.STREAM.NAMES",
            f"{_API}.CONSUMER.INFO.{stream}.{options.name}",
            f"{_API}.STREAM.MSG.GET.{stream}",
            f"{_API}.STREAM.MSG.GET.{dead_letters.STREAM}",
            f"{_API}.STREAM.INFO.KV_{leases.BUCKET}",
            _direct_get(leases.BUCKET, leases.KEYS),
            f"{_API}.STREAM.MSG.GET.KV_{leases.BUCKET}",
            *_read(BUDGETS.bucket.stream),
            _direct_get(BUDGETS.bucket.name, BUDGETS.keys),
            replica_statistics.STATS_SUBJECT,
        ),
        subscribe=(_REPLIES, replica_statistics.STATS_REPLIES),
    )


def handover_permissions(options: DurableOptions, stream: str) -> Permissions:
    """Return the permissions of `nats durable`, including `--restore`."""
    return Permissions(
        publish=(
            f"{_API}.STREAM.NAMES",
            f"{_API}.CONSUMER.INFO.{stream}.{options.name}",
            f"{_API}.CONSUMER.CREATE.{stream}.{options.name}.{options.filter_subject}",
            f"{_API}.STREAM.MSG.GET.{stream}",
            f"$JS.ACK.{stream}.{options.name}.>",
            replica_statistics.STATS_SUBJECT,
        ),
        subscribe=(_REPLIES, replica_statistics.STATS_REPLIES),
    )


def _created_stream(stream: str) -> tuple[str, ...]:
    """Return the subjects to look up a stream and to create it if it is missing."""
    return f"{_API}.STREAM.INFO.{stream}", f"{_API}.STREAM.CREATE.{stream}"


def _read(stream: str) -> tuple[str, ...]:
    """Return the subjects to read a stream."""
    return f"{_API}.STREAM.INFO.{stream}", f"{_API}.STREAM.MSG.GET.{stream}"


def _direct_get(bucket: str, key: str) -> str:
    """Return the subject to read a key of a bucket, or the keys of a pattern, and no others."""
    return f"{_API}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}"


def _listed_bucket(bucket: str, keys: str) -> tuple[str, ...]:
    """Return the subjects of a bucket whose records are read in batches."""
    return (*_bucket(bucket, keys), f"{_API}.DIRECT.GET.KV_{bucket}")


def _bucket(bucket: str, *keys: str) -> tuple[str, ...]:
    """Return the subjects to create, read and write a bucket.

    A bucket that an operator created may forbid direct gets, so the other way to read it is permitted, too.
    """
    return (
        *_created_stream(f"KV_{bucket}"),
        *(_direct_get(bucket, key) for key in keys),
        f"{_API}.STREAM.MSG.GET.KV_{bucket}",
        *(f"$KV.{bucket}.{key}" for key in keys),
    )


SWITCH_PERMISSIONS = Permissions(
    publish=(
        f"{_API}.STREAM.INFO.KV_{shared_bucket.BUCKET}",
        # Not STREAM.MSG.GET: by that request every key of the bucket can be read, also the session key. Not
        # STREAM.CREATE: the creator of a bucket can have the server republish every key that is written to it.
        _direct_get(shared_bucket.BUCKET, switches.SWITCHES_KEY),
        f"$KV.{shared_bucket.BUCKET}.{switches.SWITCHES_KEY}",
    )
)
"""Permissions of `tools disable`, `enable` and `disabled`."""

TOP_PERMISSIONS = Permissions(
    publish=(replica_statistics.STATS_SUBJECT,), subscribe=(_REPLIES, replica_statistics.STATS_REPLIES)
)
"""Permissions of `top`, and of `limits` and `budgets` for the running executors."""
