"""Which subjects a NATS user must be able to publish and to listen on, one by one, and nothing more."""

from __future__ import annotations

import json
from dataclasses import dataclass

from openapi_tool.bus import dead_letters, leases, shared
from openapi_tool.bus.client import INBOX
from openapi_tool.bus.streams import DurableOptions
from openapi_tool.protocol.subject import command_stream

_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects, with the bus's wildcards, that a user may publish to and listen on."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...] = (f"{INBOX}.>",)

    def as_object(self) -> dict[str, dict[str, list[str]]]:
        """In the shape of a user's `permissions` in NATS."""
        return {"publish": {"allow": list(self.publish)}, "subscribe": {"allow": list(self.subscribe)}}

    def server_config(self) -> str:
        """The block for a user in the server's configuration file."""
        blocks = (("publish", self.publish), ("subscribe", self.subscribe))
        return f"permissions: {{\n{''.join(_block(*block) for block in blocks)}}}"


def _block(name: str, subjects: tuple[str, ...]) -> str:
    lines = "".join(f"      {json.dumps(subject)}\n" for subject in subjects)
    return f"  {name}: {{\n    allow: [\n{lines}    ]\n  }}\n"


def executor_permissions(options: DurableOptions, *, stream: str | None, session_key: bool) -> Permissions:
    """What `serve` needs.

    `stream` is the command stream's name, by default the kernel's; `session_key` says that the key is
    configured, so that none is kept in NATS.
    """
    stream = stream or command_stream(options.version)[0]
    return Permissions(
        (
            f"{_API}.STREAM.NAMES",
            f"{_API}.STREAM.CREATE.{stream}",
            f"{_API}.CONSUMER.INFO.{stream}.{options.name}",
            f"{_API}.CONSUMER.CREATE.{stream}.{options.name}.{options.filter_subject}",
            f"{_API}.CONSUMER.MSG.NEXT.{stream}.{options.name}",
            f"$JS.ACK.{stream}.{options.name}.>",
            _doorbells(options),
            dead_letters.SUBJECT,
            *_stream_made(dead_letters.STREAM),
            *_bucket(leases.BUCKET, leases.KEYS),
            *(() if session_key else _bucket(shared.BUCKET, shared.SESSION_KEY)),
        )
    )


def dead_letter_permissions(options: DurableOptions, *, stream: str | None) -> Permissions:
    """What `deadletters` needs, `--abandoned` and `replay` included."""
    stream = stream or command_stream(options.version)[0]
    return Permissions(
        (
            f"{_API}.STREAM.NAMES",
            f"{_API}.CONSUMER.INFO.{stream}.*",
            *_read(stream, options.filter_subject),
            f"{_API}.CONSUMER.INFO.{dead_letters.STREAM}.*",
            *_read(dead_letters.STREAM, dead_letters.SUBJECT),
            f"{_API}.STREAM.MSG.DELETE.{dead_letters.STREAM}",
            options.filter_subject,
        )
    )


def _doorbells(options: DurableOptions) -> str:
    """In any channel: it is that of the waiting turn, which need not be the command's."""
    project = options.filter_subject.split(".")[2]
    return f"cg.{options.version}.{project}.*.cmd.agent.*.wakeup"


def _stream_made(stream: str) -> tuple[str, ...]:
    return f"{_API}.STREAM.INFO.{stream}", f"{_API}.STREAM.CREATE.{stream}"


def _bucket(bucket: str, keys: str) -> tuple[str, ...]:
    """One that was made elsewhere may not allow direct reads, so both ways to read are here."""
    subject = f"$KV.{bucket}.{keys}"
    stream = f"KV_{bucket}"
    return (
        *_stream_made(stream),
        f"{_API}.DIRECT.GET.{stream}.{subject}",
        f"{_API}.STREAM.MSG.GET.{stream}",
        subject,
    )


def _read(stream: str, subject: str) -> tuple[str, ...]:
    """For a consumer of a name of its own."""
    return f"{_API}.CONSUMER.CREATE.{stream}.*.{subject}", f"{_API}.CONSUMER.MSG.NEXT.{stream}.*"
