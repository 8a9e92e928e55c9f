"""Settings of the connections to a kernel: NATS and its database."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from openapi_tool.options import MAX_ACK_PENDING, Seconds, split
from openapi_tool.settings.dsn import Dsn, parse_dsn
from openapi_tool.settings.section import File, Section
from openapi_tool.settings.urls import parse_url
from openapi_tool.tools.secrets import Secret

_TCP, _WEB_SOCKET, _HTTP = ("nats", "tls"), ("ws", "wss"), ("http", "https")
SCHEMES = (*_TCP, *_WEB_SOCKET, *_HTTP)
"""Schemes of all URLs in the settings except the database's."""


def _check_server_url(url: str) -> str:
    try:
        parsed = parse_url(url, (*_TCP, *_WEB_SOCKET))
    except ValueError as problem:
        raise ValueError(
            f"{problem}; must look like nats://host:4222, with an IPv6 address in brackets; set a user or password "
            "with one of / ? # @ : [ ] as nats.user and nats.password"
        ) from None
    if parsed.path or parsed.query:
        raise ValueError("must end with the host or its port: nats://host:4222")
    return url


NatsUrl = Annotated[str, AfterValidator(_check_server_url)]


class NatsSettings(Section):
    """NATS connection. At most one way to authenticate: user and password, token, credentials file or nkey seed."""

    servers: Annotated[tuple[NatsUrl, ...], NoDecode, BeforeValidator(split)] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="Server URLs; comma-separated in the environment."
    )
    tls: bool = Field(
        default=False, description="Require TLS; a `tls://` or `wss://` server and `ca_file` require it, too."
    )
    tls_check_hostname: bool = Field(default=True, description="Verify the server's hostname.")
    ca_file: File | None = Field(None, description="CA (PEM) that signed the server's certificate.")
    cert_file: File | None = Field(None, description="Client certificate (PEM); needs `key_file`.")
    key_file: File | None = Field(None, description="Key of the client certificate (PEM).")
    user: str | None = Field(None, description="User name; needs `password`.")
    password: Secret | None = Field(None, description="Password of `user`.")
    token: Secret | None = Field(None, description="Token.")
    credentials_file: File | None = Field(None, description="Credentials file of a NATS account (`.creds`).")
    nkey_seed_file: File | None = Field(None, description="File with an nkey seed.")
    durable: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Durable consumer shared by all replicas; by default the kernel executor's own name.",
    )
    ack_wait_s: Seconds = Field(6, description="Seconds without a heartbeat until a command is delivered again.")
    max_ack_pending: int = Field(
        100_000,
        ge=1,
        le=MAX_ACK_PENDING,
        description="Commands in flight over all replicas; raised up to 1,000,000 while a backlog fills it.",
    )
    create_stream: bool = Field(
        default=True,
        description="Create the command stream if no stream captures its subjects; off if only others may create it.",
    )
    jetstream_domain: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="JetStream domain of the kernel; needed if executors connect to a leaf node.",
    )
    inbox_prefix: str = Field(
        "_INBOX.openapi_tool",
        pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$",
        description="Prefix of the subjects on which replies are received.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        le=5,
        description="Replicas of the streams and buckets that the executor creates; by default the command stream's.",
    )

    @field_validator("servers")
    @classmethod
    def _use_one_transport(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        if len({url.lower().startswith(tuple(f"{scheme}:" for scheme in _WEB_SOCKET)) for url in servers}) > 1:
            raise ValueError("must be all nats:// and tls://, or all ws:// and wss://")
        return servers

    @model_validator(mode="after")
    def _fits_together(self) -> NatsSettings:
        ways = (self.user, self.token, self.credentials_file, self.nkey_seed_file)
        if sum(way is not None for way in ways) > 1:
            raise ValueError(
                "only one of user, token, credentials_file and nkey_seed_file may be set; unset the others"
            )
        for first, second in (("user", "password"), ("cert_file", "key_file")):
            if (getattr(self, first) is None) != (getattr(self, second) is None):
                raise ValueError(f"{first} and {second} go together; set both, or neither")
        return self


class PostgresSettings(Section):
    """The kernel's database."""

    dsn: Secret = Field(
        description="Connection string (`PG_DSN`); TLS by `?sslmode=verify-full&sslrootcert=…`; with several hosts "
        "`target_session_attrs=read-write`. Never shown."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Size of the connection pool of one process.")
    timeout_s: Seconds = Field(5, description="Seconds to wait for a connection or a statement.")
    prepared_statements: bool = Field(default=True, description="Switch off behind PgBouncer in transaction mode.")

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: Secret) -> Secret:
        parse_dsn(dsn.get_secret_value())
        return dsn

    @property
    def parsed(self) -> Dsn:
        """Return the parsed connection string."""
        return parse_dsn(self.dsn.get_secret_value())
