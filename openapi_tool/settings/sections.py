"""Sections of the settings: connections to a kernel, secrets of tools."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from openapi_tool.jina.parameters import is_documented, secret_problem
from openapi_tool.options import MAX_ACK_PENDING, Seconds, one_line, split
from openapi_tool.settings.urls import Dsn, ServerUrl, parse_dsn, parse_url
from openapi_tool.tools.arguments import API_KEY
from openapi_tool.tools.placeholders import Secret, is_executors_own


def _check_file(path: Path) -> Path:
    try:
        if path.is_file():
            return path
    except OSError:  # such as a name that is too long
        pass
    raise ValueError("names no file that can be read; correct the path, or mount the file")


File = Annotated[Path, AfterValidator(_check_file)]

TARGET = "{target}"  # in an actor id


def _without_unknown_placeholders(actor_id: str) -> str:
    if set("{}") & set(actor_id.replace(TARGET, "")):
        raise ValueError(f"holds an unknown placeholder or a lone brace; the only placeholder is {TARGET}")
    return actor_id


ActorId = Annotated[str, AfterValidator(_without_unknown_placeholders)]


class Section(BaseModel):
    """Base class of sections that no component takes as options; its rules are those of `Options`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    _is_one_line = field_validator("*", mode="before")(one_line)


def fields_of(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section: an (optional) model or a dataclass; for another type none."""
    kind = next((part for part in get_args(kind) if hasattr(part, "model_fields")), kind)
    is_dataclass = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    return _fields_of_dataclass(kind) if is_dataclass else getattr(kind, "model_fields", {})


@cache
def _fields_of_dataclass(kind: type[Any]) -> Mapping[str, FieldInfo]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field) for field in dataclasses.fields(kind)
    }


_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _is_not_the_executors_own(variable: str) -> str:
    if is_executors_own(variable):
        raise ValueError(f"{variable} is one of the executor's own settings, which tools are never given; remove it")
    return variable


VariableName = Annotated[str, Field(pattern=_VARIABLE), AfterValidator(_is_not_the_executors_own)]


def _may_take_a_secret(name: str) -> str:
    if not _PARAMETER.fullmatch(name):
        raise ValueError("must be the name of one upstream parameter: letters, digits, '_' and '-'")
    if name != API_KEY and (problem := secret_problem(name)):
        shown = f"{name} " if is_documented(name) else ""  # an unknown name may be a secret that was pasted here
        raise ValueError(f"{shown}{problem}; remove it")
    return name


def _all_may_take_a_secret(envs: dict[str, str]) -> dict[str, str]:
    for name in envs:
        _may_take_a_secret(name)
    return envs


EnvParameter = Annotated[str, AfterValidator(_may_take_a_secret)]
Envs = Annotated[dict[str, VariableName], AfterValidator(_all_may_take_a_secret)]


class ServiceEnvs(Section):
    """Service-side `envs` of one target, which the kernel's settings call a service."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable name.")


class JinaToolSettings(Section):
    """Service-side settings of the Jina tools; they override a definition's own."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable, for all targets.")
    services: dict[str, ServiceEnvs] = Field(
        default_factory=dict, description="The same for single targets, which overrides `envs`."
    )

    def envs_of(self, target: str) -> dict[str, str]:
        """Map argument names to variable names for one target."""
        service = self.services.get(target)
        return {**self.envs, **(service.envs if service else {})}


class SecretsSettings(Section):
    """Variables that definitions may name, and arguments that may take their values.

    Instead of a variable `NAME`, `NAME_FILE` may name a file that contains the value.
    """

    allowed_env: Annotated[tuple[VariableName, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Variables that definitions may name, beside JINA_API_KEY and those in `tools.jina`; "
        "comma-separated in the environment.",
    )
    env_parameters: Annotated[tuple[EnvParameter, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        description="Body members of your own, named `tenant_…`, that a definition's `envs` may fill, beside `api_key` "
        "and those in `tools.jina`; comma-separated in the environment.",
    )


_TCP, _WEB_SOCKET, _HTTP = ("nats", "tls"), ("ws", "wss"), ("http", "https")
SCHEMES = (*_TCP, *_WEB_SOCKET, *_HTTP)
"""Schemes of all URLs but the database's."""


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
    """NATS connection. Set at most one login: user and password, token, credentials file or nkey seed."""

    servers: Annotated[tuple[NatsUrl, ...], NoDecode, BeforeValidator(split)] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="Server URLs; comma-separated in the environment."
    )
    tls: bool = Field(
        default=False, description="Require TLS. A `tls://` or `wss://` server, or a `ca_file`, also requires it."
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
        description="Durable consumer that all replicas share; by default that of the kernel's own executor.",
    )
    ack_wait_s: Seconds = Field(6, description="Seconds without a heartbeat until NATS redelivers a command (AckWait).")
    max_ack_pending: int = Field(
        100_000,
        ge=1,
        le=MAX_ACK_PENDING,
        description="Maximum unacknowledged commands of all replicas; raised to up to 1,000,000 in a backlog.",
    )
    create_stream: bool = Field(
        default=True,
        description="Create the command stream if no stream captures its subjects; false if only others may.",
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
        if len({url.lower().startswith("ws") for url in servers}) > 1:
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

    @property
    def parsed(self) -> list[ServerUrl]:
        """Return the parsed server URLs."""
        return [parse_url(url, SCHEMES) for url in self.servers]


class PostgresSettings(Section):
    """The kernel's database."""

    dsn: Secret = Field(
        description="Connection string. For TLS add `?sslmode=verify-full&sslrootcert=…`; for several hosts "
        "`target_session_attrs=read-write`. Never shown."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Size of the connection pool of one process.")
    timeout_s: Seconds = Field(5, description="Seconds to wait for a connection or a statement.")
    prepared_statements: bool = Field(
        default=True, description="Use prepared statements; false behind PgBouncer in transaction mode."
    )

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: Secret) -> Secret:
        parse_dsn(dsn.get_secret_value())
        return dsn

    @property
    def parsed(self) -> Dsn:
        """Return the parsed connection string."""
        return parse_dsn(self.dsn.get_secret_value())
