"""Section `tools` of the settings: limits of calls. The secrets of tools are in `tools/secret_variables.py`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from openapi_tool.options.section import CallSeconds, Options

MIN_MAX_TOKENS = 500  # least limit of the tokens of a page, also for the parameter `maxTokens` (`jina/parameters.py`)


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
