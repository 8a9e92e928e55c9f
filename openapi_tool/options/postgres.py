"""Section `postgres` of the settings, and the options of a connection pool."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.dsn import Dsn, parse_dsn
from openapi_tool.options.section import Options, Seconds
from openapi_tool.tools.secret_variables import Secret

DSN_SETTING = "postgres.dsn (PG_DSN)"
"""The setting and its variable, as messages name them."""


@validated(frozen=True)
class PostgresOptions(Options):
    """The kernel's database."""

    dsn: Annotated[
        Secret,
        Field(
            description="Connection string. For TLS add `?sslmode=verify-full&sslrootcert=…`; for several hosts "
            "`target_session_attrs=read-write`. Never shown."
        ),
    ]
    pool_size: Annotated[int, Field(ge=1, le=100, description="Size of the connection pool of one process.")] = 8
    timeout_s: Annotated[Seconds, Field(description="Seconds to wait for a connection or a statement.")] = 5
    prepared_statements: Annotated[
        bool, Field(description="Use prepared statements; false behind PgBouncer in transaction mode.")
    ] = True

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: Secret) -> Secret:
        parse_dsn(dsn.get_secret_value())
        return dsn

    @property
    def parsed(self) -> Dsn:
        """Return the parsed connection string."""
        return parse_dsn(self.dsn.get_secret_value())


@validated(frozen=True)
class PoolOptions:
    """What a connection pool needs.

    - `version`: the version of the kernel's protocol, on which the tables depend, such as `v1r4`.
    - `inspect_on_connect`: refuse a database in which calls cannot be committed. Commands that only read do not need
      that.
    """

    version: str
    postgres: PostgresOptions
    inspect_on_connect: bool = True

    @property
    def dsn(self) -> str:
        """Return the connection string, with its password."""
        return self.postgres.dsn.get_secret_value()

    @property
    def where(self) -> str:
        """Return hosts, ports and database, as messages name them."""
        return self.postgres.parsed.where
