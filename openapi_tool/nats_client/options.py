"""Settings of the connections to NATS, and what its clients are given; imports no driver.

Classes that end in `Options` and are `validated` are sections of the settings; the others, at the end, are made from
them. A *durable* is JetStream's record of which commands are delivered and acknowledged, which all replicas share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.section import File, Options, Seconds, split
from openapi_tool.tools.secret_variables import Secret
from openapi_tool.urls import NATS_SCHEMES, ServerUrl, parse_url

INBOX = "_INBOX.openapi_tool"
"""Prefix of reply subjects. nats-py's `_INBOX` would need permission for `_INBOX.>`, so for replies to all users."""

MAX_ACK_PENDING = 1_000_000  # the largest that a durable may have
_NAME = r"^[A-Za-z0-9_-]+$"


def _check_server_url(url: str) -> str:
    try:
        parsed = parse_url(url, NATS_SCHEMES)
    except ValueError as problem:
        raise ValueError(
            f"{problem}; must look like nats://host:4222, with an IPv6 address in brackets; set a user or password "
            "with one of / ? # @ : [ ] as nats.user and nats.password"
        ) from None
    if parsed.path or parsed.query:
        raise ValueError("must end with the host or its port: nats://host:4222")
    return url


@validated(frozen=True)
class FairnessOptions(Options):
    """Weights of projects that compete for slots, places among the waiting commands, and permits of `limits`."""

    weights: Annotated[
        dict[str, Annotated[float, Field(ge=0.01, le=100)]],
        Field(
            max_length=10_000,
            description="Project id to weight, 0.01 to 100, by default 1: while both have commands waiting, a project "
            "of weight 2 gets twice the upstream requests of a project of weight 1.",
        ),
    ] = field(default_factory=dict)


@validated(frozen=True)
class NatsConnection(Options):
    """NATS connection, with at most one login; files are read for each attempt to connect."""

    servers: Annotated[
        tuple[Annotated[str, AfterValidator(_check_server_url)], ...],
        Field(min_length=1, description="Server URLs; comma-separated in the environment."),
        NoDecode,
        BeforeValidator(split),
    ] = field(default=("nats://127.0.0.1:4222",), repr=False)
    tls: Annotated[
        bool, Field(description="Require TLS. A `tls://` or `wss://` server, or a `ca_file`, also requires it.")
    ] = False
    tls_check_hostname: Annotated[bool, Field(description="Verify the server's hostname.")] = True
    ca_file: Annotated[File | None, Field(description="CA (PEM) that signed the server's certificate.")] = None
    cert_file: Annotated[File | None, Field(description="Client certificate (PEM); needs `key_file`.")] = None
    key_file: Annotated[File | None, Field(description="Key of the client certificate (PEM).")] = None
    user: Annotated[str | None, Field(description="User name; needs `password`.")] = None
    password: Annotated[Secret | None, Field(description="Password of `user`.")] = None
    password_file: Annotated[File | None, Field(description="File with the password of `user`.")] = None
    token: Annotated[Secret | None, Field(description="Token.")] = None
    token_file: Annotated[File | None, Field(description="File with the token.")] = None
    credentials_file: Annotated[File | None, Field(description="Credentials file of a NATS account (`.creds`).")] = None
    nkey_seed_file: Annotated[File | None, Field(description="File with an nkey seed.")] = None
    jetstream_domain: Annotated[
        str | None,
        Field(
            pattern=_NAME,
            description="JetStream domain of the streams; needed if executors connect to a leaf node.",
        ),
    ] = None
    inbox_prefix: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$",
            description="Prefix of the subjects on which the executor receives replies and commands; `quotas.nats` "
            "and commands for operators append their name, as `_INBOX.openapi_tool_inspect`.",
        ),
    ] = INBOX
    replicas: Annotated[
        int | None,
        Field(
            ge=1,
            le=5,
            description="Replicas of the streams and buckets that the executor creates; by default the command "
            "stream's, without a command stream 1.",
        ),
    ] = None

    @field_validator("servers")
    @classmethod
    def _use_one_transport(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        if len({url.lower().startswith("ws") for url in servers}) > 1:
            raise ValueError("must be all nats:// and tls://, or all ws:// and wss://")
        return servers

    @model_validator(mode="after")
    def _fits_together(self) -> NatsConnection:
        logins = (self.user, self.token, self.token_file, self.credentials_file, self.nkey_seed_file)
        if sum(login is not None for login in logins) > 1:
            raise ValueError(
                "only one of user, token, token_file, credentials_file and nkey_seed_file may be set; unset the others"
            )
        if self.password is not None and self.password_file is not None:
            raise ValueError("only one of password and password_file may be set; unset the other")
        password = self.password if self.password_file is None else self.password_file
        pairs = (("user", self.user, "password", password), ("cert_file", self.cert_file, "key_file", self.key_file))
        for first_name, first, second_name, second in pairs:
            if (first is None) != (second is None):
                raise ValueError(f"{first_name} and {second_name} go together; set both, or neither")
        return self

    @property
    def parsed(self) -> list[ServerUrl]:
        """Return the parsed server URLs."""
        return [parse_url(url, NATS_SCHEMES) for url in self.servers]

    @property
    def requires_tls(self) -> bool:
        """Return whether the login is sent over TLS or not at all."""
        return self.tls or self.ca_file is not None or any(url.scheme in ("tls", "wss") for url in self.parsed)


@validated(frozen=True)
class NatsOptions(NatsConnection):
    """NATS of the kernel. Set at most one login: user and password, token, credentials file or nkey seed.

    Files are read for each attempt to connect, so they may be replaced at any time.
    """

    durable: Annotated[
        str | None,
        Field(
            pattern=_NAME,
            description="Durable consumer that all replicas share; by default that of the kernel's own executor.",
        ),
    ] = None
    ack_wait_s: Annotated[
        Seconds, Field(description="Seconds without a heartbeat until NATS redelivers a command (AckWait).")
    ] = 6
    max_ack_pending: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_ACK_PENDING,
            description="Maximum unacknowledged commands of all replicas; raised to up to 1,000,000 in a backlog.",
        ),
    ] = 100_000
    create_stream: Annotated[
        bool,
        Field(description="Create the command stream if no stream captures its subjects; false if only others may."),
    ] = True


_KERNEL_NAME_CHARS = 40


@validated(frozen=True)
class QuotaOptions(Options):
    """Records of limits, refused keys and budgets, where executors of several kernels share them."""

    nats: Annotated[
        NatsConnection | None,
        Field(
            description="NATS that holds the records, with the keys of the connection in `nats`; by default the "
            "kernel's own. Needs `kernel`.",
        ),
    ] = None
    kernel: Annotated[
        str | None,
        Field(
            pattern=_NAME,
            max_length=_KERNEL_NAME_CHARS,
            description="Name of this kernel in the records, which precedes the ids of its projects, so that equal ids "
            "of two kernels share no budget; by default empty for v1r4, `v1r3` for v1r3.",
        ),
    ] = None

    @model_validator(mode="after")
    def _names_the_kernel(self) -> QuotaOptions:
        if self.nats is not None and self.kernel is None:
            raise ValueError(
                "kernel must be set beside nats: a name that no other kernel has whose executors share these records, "
                "or projects of equal ids would share their budgets"
            )
        return self


@dataclass(frozen=True, slots=True)
class BusOptions:
    """What a connection to a NATS (a *bus*) needs.

    - `nats`: its settings; `name`: that of the client, which the server shows.
    - `once`: make a single connection attempt, for CLI commands, and log only denials that no request raises.
    - `listed_by`: the command that prints the needed permissions, for error messages; empty for the kernel's own login.
    - `setting`: the setting that lists the servers, and its variable, for error messages.
    - `on_trouble` is called with the reason of every failed attempt until the first connection.
    - `on_login` is called with the secrets of each login, which may be new ones.
    """

    nats: NatsConnection = field(default_factory=NatsOptions)
    name: str = ""
    once: bool = False
    listed_by: str = "openapi-tool nats permissions"
    setting: str = "nats.servers (NATS_SERVERS)"
    on_trouble: Callable[[str], None] | None = None
    on_login: Callable[[Iterable[str]], None] | None = None

    @property
    def denial_remedy(self) -> str:
        """Return what to do about a denied permission."""
        if self.listed_by:
            return f"grant what `{self.listed_by}` lists to the NATS user"
        return f"log in as the kernel does: check the login in {self.setting}, or {self.section}.user"

    @property
    def section(self) -> str:
        """Return the name of the settings of this connection."""
        return self.setting.partition(".servers (")[0]

    @property
    def where(self) -> str:
        """Return hosts and ports."""
        return ", ".join(url.where for url in self.nats.parsed)


@dataclass(frozen=True, slots=True)
class DurableOptions:
    """Name and subjects of the durable; `nats` has its settings."""

    version: str
    name: str
    filter_subject: str
    nats: NatsOptions = field(default_factory=NatsOptions)


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Options of the consumer. A call that runs longer than `max_run_s` seconds is cancelled."""

    durable: DurableOptions
    executor: ExecutorOptions
    max_run_s: float
    replicas: int = 1
    fairness: FairnessOptions = field(default_factory=FairnessOptions)
