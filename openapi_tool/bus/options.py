"""Options of the components; imports no driver."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openapi_tool.options import ExecutorOptions, FairnessOptions

INBOX = "_INBOX.openapi_tool"
"""Prefix of reply subjects. nats-py's `_INBOX` would need permission for `_INBOX.>`, so for replies to all users."""


@dataclass(frozen=True, slots=True)
class BusOptions:
    """Servers and authentication; `login` holds options of nats-py.

    With `tls` the client logs in over TLS only. JetStream requests go to `domain`, by default the server's own. `once`
    makes a single connection attempt, for CLI commands, and logs denials only. Errors contain `listed_by` (the command
    that prints the needed permissions), `where` (hosts and ports) and `setting` (that lists the servers). `on_trouble`
    takes the reason of every failed attempt until the first connection.
    """

    servers: Sequence[str] = field(default=(), repr=False)
    name: str = ""
    tls: ssl.SSLContext | None = None
    login: Mapping[str, str] = field(default_factory=dict, repr=False)
    domain: str | None = None
    inbox: str = INBOX
    once: bool = False
    listed_by: str = "openapi-tool nats permissions"
    where: str = ""
    setting: str = "nats.servers (NATS_SERVERS)"
    on_trouble: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class DurableOptions:
    """Name and settings of the durable; `replicas` of created streams and buckets: None as the command stream."""

    version: str
    name: str
    filter_subject: str
    ack_wait_s: float
    max_ack_pending: int
    replicas: int | None = None
    create_stream: bool = True


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of the consumer. A call that runs longer than `max_run_s` seconds is cancelled."""

    durable: DurableOptions
    executor: ExecutorOptions
    max_run_s: float
    replicas: int = 1
    fairness: FairnessOptions = field(default_factory=FairnessOptions)
