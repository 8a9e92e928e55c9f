"""Settings sections that components take as their options, beside those in `bus`, `jina` and `tools`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Annotated, Any, ClassVar
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.files import MAX_CERTIFICATES_BYTES, check_regular_file
from openapi_tool.tools.meta_schema import BUDGETS
from openapi_tool.tools.placeholders import Secret
from openapi_tool.urls import Dsn, parse_dsn

_UNUSABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_CHARS = 16_000
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

DSN_SETTING = "postgres.dsn (PG_DSN)"
MIN_MAX_TOKENS = 500
TERABYTE = 1_000_000_000_000
Seconds = Annotated[float, Field(gt=0, le=86_400)]
CallSeconds = Annotated[float, Field(ge=1, le=86_400)]
_MAX_HAND_BACK_S = 3.0


def _check_file(path: Path) -> Path:
    try:
        check_regular_file(path, MAX_CERTIFICATES_BYTES)
    except OSError:
        raise ValueError("names no file that can be read; correct the path, or mount the file") from None
    return path


File = Annotated[Path, AfterValidator(_check_file)]


def check_one_line(value: Any) -> Any:
    """Return a value with its text stripped.

    Raises ValueError for over 16,000 characters, control characters and invalid UTF-8: drivers would send them, or show
    the value in an error.
    """
    value = value.strip() if isinstance(value, str) else value
    if any(len(text) > _MAX_CHARS for text in _texts(value)):
        raise ValueError(f"is longer than {_MAX_CHARS} characters")
    if any(map(_UNUSABLE.search, _texts(value))):
        raise ValueError("contains a line break, another control character or invalid UTF-8; remove it")
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str | SecretStr):
        yield value if isinstance(value, str) else value.get_secret_value()
    elif isinstance(value, Mapping | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(item)


def split(value: object) -> object:
    """Split a comma-separated text; return any other value unchanged. Raises ValueError for a JSON list."""
    if isinstance(value, str) and value.lstrip().startswith(('["', "['")):
        raise ValueError("must be comma-separated in the environment, such as A,B; it is JSON")
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Options:
    """Base class of these sections: refuses unknown keys and unusable texts."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", hide_input_in_errors=True)

    _is_one_line = field_validator("*", mode="before")(check_one_line)


@validated(frozen=True)
class ExecutorOptions(Options):
    """Execution of calls."""

    concurrency: Annotated[
        int,
        Field(ge=1, le=512, description="Maximum concurrent calls (slots); if projects compete, one gets at most 7/8."),
    ] = 64
    max_held: Annotated[
        int, Field(ge=1, le=10_000, description="Maximum commands that wait in one process for a free slot.")
    ] = 512
    max_paused: Annotated[
        int,
        Field(ge=0, le=10_000, description="Maximum paused calls: they wait for a permit or a retry without a slot."),
    ] = 256
    min_result_delay_s: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Minimum seconds from a step's newest command to a result: a worker needs them to suspend the "
            "turn; 0 is off.",
        ),
    ] = 0.06
    worker_timeout_s: Annotated[Seconds, Field(description="Minimum seconds that a worker waits for a result.")] = 30
    commit_margin_s: Annotated[Seconds, Field(description="Seconds of the worker's wait reserved for the commit.")] = 3
    requeue_delay_s: Annotated[Seconds, Field(description="Seconds until a requeued command is delivered again.")] = 2
    commit_retry_timeout_s: Annotated[Seconds, Field(description="Seconds for which a failed commit is retried.")] = 60
    max_lost_runs: Annotated[
        int, Field(ge=1, le=100, description="Lost runs after which a command gets a failed result without a run.")
    ] = 3
    drain_timeout_s: Annotated[
        float,
        Field(
            ge=1,
            le=86_400,
            description="Seconds from SIGTERM to the end of the process, whatever blocks; running calls may finish in "
            "all but the last 3 (or half of a shorter time), in which the others are handed back.",
        ),
    ] = 25

    @property
    def hand_back_s(self) -> float:
        """Last seconds of a drain, in which no call runs any more (`shutdown.py`)."""
        return min(_MAX_HAND_BACK_S, self.drain_timeout_s / 2)

    @model_validator(mode="after")
    def _leaves_time_to_run(self) -> ExecutorOptions:
        if self.commit_margin_s >= self.worker_timeout_s:
            raise ValueError("commit_margin_s must be less than worker_timeout_s, or no call has time to run")
        return self


@validated(frozen=True)
class ToolOptions(Options):
    """Limits of tool calls."""

    default_timeout_s: Annotated[
        CallSeconds | None,
        Field(description="Time limit in seconds of calls whose definition sets none; by default the worker's wait."),
    ] = None
    max_timeout_s: Annotated[CallSeconds, Field(description="Maximum time limit of any call, in seconds.")] = 120
    max_batch_items: Annotated[int, Field(ge=1, le=100, description="Maximum items of a batch call.")] = 10
    default_max_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=2_000_000,
            description="Tokens at which the upstream cuts each page, and so its charge, unless the definition or the "
            "call sets another limit; 0 for no limit, else at least 500.",
        ),
    ] = 20_000
    cost_note_tokens: Annotated[
        int, Field(ge=0, le=1_000_000_000, description="A result names its cost in tokens if it is above this number.")
    ] = 10_000
    max_result_tokens: Annotated[
        int,
        Field(
            ge=500,
            le=2_500_000,
            description="Maximum estimated tokens of a result, unless its definition sets another limit.",
        ),
    ] = 10_000
    max_result_chars: Annotated[
        int,
        Field(
            ge=2_000,
            le=10_000_000,
            description="Maximum characters of a result; the model reads further parts by cursor.",
        ),
    ] = 40_000
    max_uncontinued_chars: Annotated[
        int | None,
        Field(
            ge=2_000,
            le=10_000_000,
            description="The same if the definition's schema forbids `cursor`; by default twice `max_result_chars`.",
        ),
    ] = None
    artifact_ttl_s: Annotated[
        int,
        Field(ge=60, le=31_536_000, description="Seconds for which the whole text of a truncated result is stored."),
    ] = 604_800

    @model_validator(mode="after")
    def _fits_together(self) -> ToolOptions:
        if self.default_timeout_s is not None and self.default_timeout_s > self.max_timeout_s:
            raise ValueError("default_timeout_s must not be more than max_timeout_s")
        if 0 < self.default_max_tokens < MIN_MAX_TOKENS:
            raise ValueError(f"default_max_tokens must be 0 or at least {MIN_MAX_TOKENS}")
        if self.max_uncontinued_chars is not None and self.max_uncontinued_chars < self.max_result_chars:
            raise ValueError("max_uncontinued_chars must not be less than max_result_chars")
        return self


BudgetRequests = Annotated[int | None, Field(ge=0, le=1_000_000_000, description="Maximum upstream requests.")]
BudgetTokens = Annotated[
    int | None, Field(ge=0, le=TERABYTE, description="Maximum tokens, estimated before a request.")
]


@validated(frozen=True)
class BudgetLimits(Options):
    """Budgets of one project or of all; an unset budget does not apply."""

    session_requests: BudgetRequests = None
    session_tokens: BudgetTokens = None
    agent_day_requests: BudgetRequests = None
    agent_day_tokens: BudgetTokens = None
    project_day_requests: BudgetRequests = None
    project_day_tokens: BudgetTokens = None
    project_month_requests: BudgetRequests = None
    project_month_tokens: BudgetTokens = None

    def of(self, scope: str) -> tuple[int | None, int | None]:
        """Return requests and tokens of a scope such as `agent_day`."""
        return getattr(self, f"{scope}_requests"), getattr(self, f"{scope}_tokens")

    @property
    def limited(self) -> bool:
        """Return whether any budget is set."""
        return any(getattr(self, name) is not None for name in BUDGETS)


def time_zone(name: str) -> tzinfo:
    """Return a time zone. Raises ValueError for one that this system does not have."""
    if name == "UTC":  # also if the system has no database
        return UTC
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise ValueError("must be a time zone that this system knows, such as UTC or Europe/Berlin") from None


@validated(frozen=True)
class BudgetOptions(BudgetLimits):
    """Budgets of sessions, agents and projects in upstream requests and tokens, shared by all replicas."""

    time_zone: Annotated[
        str, Field(max_length=64, description="Time zone of days and months, such as `Europe/Berlin`.")
    ] = "UTC"
    projects: Annotated[
        dict[str, BudgetLimits],
        Field(max_length=10_000, description="Budgets of single projects; unset ones are those of this section."),
    ] = field(default_factory=dict)

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        time_zone(name)
        return name

    def for_project(self, project_id: str) -> BudgetLimits:
        """Return the budgets of a project."""
        own = self.projects.get(project_id)
        if own is None:
            return self
        budgets = {name: getattr(own, name) for name in BUDGETS}
        return BudgetLimits(**{name: getattr(self, name) if mine is None else mine for name, mine in budgets.items()})


@validated(frozen=True)
class IsolationOptions(Options):
    """Worker processes for what a tenant can make costly, such as a large schema."""

    workers: Annotated[
        int,
        Field(
            ge=1,
            le=16,
            description="Worker processes, of at most 271 MiB each (by egress.max_response_bytes); of two, one is "
            "always left to other projects.",
        ),
    ] = 2


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
    """Database of a kernel of this version; errors contain the name of the `setting` with the connection string."""

    version: str
    postgres: PostgresOptions
    inspect_on_connect: bool = True  # refuse a database in which calls cannot be committed; not for read-only commands
    setting: str = DSN_SETTING

    @property
    def dsn(self) -> str:
        """Return the connection string, with its password."""
        return self.postgres.dsn.get_secret_value()

    @property
    def where(self) -> str:
        """Return hosts, ports and database."""
        return self.postgres.parsed.where
