"""Protocol versions: their common interface `Dialect`, and their implementations by version.

`claimed_identity` reads the ids of a command of any version, for logs and dead letters. A new version is added to
`ProtocolVersion` and `_DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Protocol

from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.identity import CallIdentity, ClaimedIdentity
from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.protocol.records import CallRecords, ResultContent
from openapi_tool.protocol.report import Acceptance, Doorbell, Report
from openapi_tool.protocol.subjects import CommandSubject
from openapi_tool.protocol.tracing import SpanContext
from openapi_tool.protocol.v1r3 import V1r3
from openapi_tool.protocol.v1r4 import V1r4


class ProtocolVersion(StrEnum):
    """Version of the kernel's protocol: the second token of its subjects."""

    V1R4 = "v1r4"
    V1R3 = "v1r3"


DEFAULT_VERSION = ProtocolVersion.V1R4


class Dialect(Protocol):
    """One version of the protocol, as the pipeline uses it; `actor_id` is the author of its reports.

    `namespace` keeps projects and sessions of this version apart from those of other versions with the same ids. It is
    empty for one of the versions (v1r4).
    """

    namespace: ClassVar[str]

    def __init__(self, actor_id: str) -> None: ...

    @property
    def version(self) -> str:
        """Name of the version: the second token of its subjects."""

    def decode(self, delivery: Delivery) -> Command:
        """Decode a delivery. Raises Unanswerable only for a subject that is no tool command's."""

    @staticmethod
    def claimed_identity(subject: CommandSubject, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:
        """Return the ids in subject, headers and body, unverified; empty or None if unknown. Raises nothing."""

    def accept(self, identity: CallIdentity, records: CallRecords) -> Acceptance:
        """Check, before anything is billed, that the kernel will take the report; return what the report needs.

        Raises ReportRefused.
        """

    def report(
        self, acceptance: Acceptance, span: SpanContext, tracestate: str | None, card_id: str, content: ResultContent
    ) -> Report:
        """Build the report of a result card, with its doorbell."""

    def doorbell(
        self, project_id: str, worker_target: str | None, context_headers: Mapping[str, JsonValue]
    ) -> Doorbell | None:
        """Build the doorbell from the headers of a report's row.

        Return None if no worker can be addressed: then only the kernel's scan of the inbox finds the result.
        """


_DIALECTS: Mapping[str, type[Dialect]] = {ProtocolVersion.V1R4: V1r4, ProtocolVersion.V1R3: V1r3}


def dialect_of(version: ProtocolVersion, actor_id: str) -> Dialect:
    """Return the dialect of a version."""
    return _DIALECTS[version](actor_id)


def namespace_of(version: ProtocolVersion) -> str:
    """Return the namespace of a version, which keeps its projects apart from those of other versions."""
    return _DIALECTS[version].namespace


def claimed_identity(subject: str, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:
    """Return the ids that a command of any version claims, unverified; empty or None if unknown. Raises nothing.

    The subject may be that of no command: missing tokens are empty, and an unknown version is read as v1r4.
    """
    _, version, project_id, channel_id, *_ = [*subject.split(".", 4), "", "", "", ""]
    parsed = CommandSubject(version, project_id, channel_id, target="", suffix="")
    return _DIALECTS.get(parsed.version, V1r4).claimed_identity(parsed, headers, data)
