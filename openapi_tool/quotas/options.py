"""Section `limits` of the settings: limits of the upstream per key, plans, and pools of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import TERABYTE, VARIABLE, Options

RequestsPerMinute = Annotated[
    int | None, Field(ge=1, le=1_000_000, description="Maximum upstream requests of one key in any 60 s.")
]
TokensPerMinute = Annotated[
    int | None,
    Field(ge=1, le=TERABYTE, description="Maximum tokens of one key in any 60 s, estimated before each request."),
]
SearchTokensPerMinute = Annotated[
    int | None,
    Field(
        ge=10_000,
        le=TERABYTE,
        description="Maximum tokens of one key in any 60 s, estimated before each request: 10,000 or more per search.",
    ),
]
Concurrent = Annotated[
    int | None, Field(ge=1, le=100_000, description="Maximum concurrent upstream requests of one key.")
]

Plan = Literal["free", "paid", "premium"]
"""Plan of a key at the upstream."""

PLANS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "free": {"search_requests_per_minute": 100, "reader_requests_per_minute": 500},
        "paid": {"search_requests_per_minute": 100, "reader_requests_per_minute": 500},
        "premium": {"search_requests_per_minute": 1_000, "reader_requests_per_minute": 5_000},
    }
)
"""Public limits of each plan, by the name of the setting."""


@validated(frozen=True)
class KeyLimits(Options):
    """Limits of one key. A limit that is not set is that of the plan; without a plan, it does not apply."""

    plan: Annotated[
        Plan | None,
        Field(
            description="Plan of the key, whose public limits apply where no other is set: free and paid 100 searches "
            "and 500 other requests a minute, premium 1,000 and 5,000."
        ),
    ] = None
    search_requests_per_minute: RequestsPerMinute = None
    search_tokens_per_minute: SearchTokensPerMinute = None
    search_concurrent: Concurrent = None
    reader_requests_per_minute: RequestsPerMinute = None
    reader_tokens_per_minute: TokensPerMinute = None
    reader_concurrent: Concurrent = None


@validated(frozen=True)
class KeyPool(Options):
    """Keys that share the load of one variable of definitions."""

    keys: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
        Field(min_length=1, max_length=100, description="Variables that contain the keys."),
    ]

    @field_validator("keys")
    @classmethod
    def _are_different(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if len({key.upper() for key in keys}) < len(keys):
            raise ValueError("names a variable twice; name each once")
        return keys

    def contains(self, variable: str) -> bool:
        """Return whether a variable contains one of the keys; its case does not matter."""
        return variable.upper() in (key.upper() for key in self.keys)


@validated(frozen=True)
class LimitOptions(KeyLimits):
    """Limits of the upstream per key, shared by all replicas; if none is set, 429s teach one."""

    keys: Annotated[
        dict[str, KeyLimits],
        Field(
            description="Limits of single keys by variable (case-insensitive); unset limits are those of this section."
        ),
    ] = field(default_factory=dict)
    pools: Annotated[
        dict[str, KeyPool],
        Field(
            description="Pools of keys that share the load: variable in definitions to `{keys = [VARIABLE, …]}`. "
            "A definition that names a key of the pool also uses the whole pool."
        ),
    ] = field(default_factory=dict)
    max_wait_share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="A call that would wait longer than this part of its remaining time for a permit is refused "
            "at once, with the time. One that waits is refused once its wait is certain to be half as long again. It "
            "also waits no longer than this part for a budget that requests which have not ended hold.",
        ),
    ] = 1 / 3
    dry_run: Annotated[
        bool, Field(description="Count requests above the limits (`limits` shows them), but let no call wait or fail.")
    ] = False

    @model_validator(mode="after")
    def _check_names(self) -> LimitOptions:
        for name in (*self.keys, *self.pools):
            if not VARIABLE.fullmatch(name):
                raise ValueError("keys and pools must be names of environment variables; correct the others")
        for names in (self.keys, self.pools):
            if len({name.upper() for name in names}) < len(names):
                raise ValueError("keys and pools are matched without regard to case; name each once")
        self._check_pools()
        return self

    def _check_pools(self) -> None:
        variables = [variable.upper() for variable in self.pooled]
        for variable in variables:
            if variables.count(variable) > 1:
                raise ValueError(f"pools: {variable} is in two of them; a key belongs to one")
        for name, pool in self.pools.items():
            if name.upper() in variables and not pool.contains(name):
                raise ValueError(f"pools.{name}: is a key of another pool; name it otherwise, or list its own key")

    def pool_name(self, variable: str) -> str | None:
        """Return the name of the pool that a key is in; None if it is in none."""
        for name, pool in self.pools.items():
            if pool.contains(variable):
                return name
        return None

    @property
    def pooled(self) -> tuple[str, ...]:
        """Return the variables of the keys of all pools."""
        return tuple(key for pool in self.pools.values() for key in pool.keys)

    @property
    def pool_of(self) -> dict[str, tuple[str, ...]]:
        """Map the name of each pool, and each of its variables, in upper case, to all variables of the pool."""
        found = {}
        for pool_name, pool in self.pools.items():
            for name in (pool_name, *pool.keys):
                found[name.upper()] = pool.keys
        return found

    def of(self, variable: str) -> KeyLimits:
        """Return the limits of the key in a variable: its own, and those of the section that it does not set."""
        own: KeyLimits | None = None
        for name, limits in self.keys.items():
            if name.upper() == variable.upper():
                own = limits
        if own is None:
            return KeyLimits(**_set_limits(self))
        return KeyLimits(**{**_set_limits(self), **_set_limits(own)})


def _set_limits(limits: KeyLimits) -> dict[str, Any]:
    """Return the limits that are set, and those of the plan that are not, by the name of the setting."""
    found = {limit.name: getattr(limits, limit.name) for limit in fields(KeyLimits)}
    plan = found.pop("plan")
    set_limits = {name: value for name, value in found.items() if value is not None}
    return {**PLANS.get(plan or "", {}), **set_limits}
