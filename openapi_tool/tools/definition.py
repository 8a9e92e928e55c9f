"""A tool definition as the executor uses it, and how a row or file is read as one (protocol sections 4 and 5).

`definition_parser.py` makes a `ToolDefinition` from the row of `resource.tools` that describes the tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.options.budgets import BudgetLimits
from openapi_tool.protocol.command import AFTER_EXECUTION, AfterExecution
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonValue, object_at
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.catalogue import BuiltInTool
from openapi_tool.tools.inline_bounds import SchemaSize
from openapi_tool.tools.operations import Operation
from openapi_tool.tools.wording import short

Method = Literal["GET", "POST"]
ResultFormat = Literal["text", "object"]


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """Tool of a project.

    The tool:

    - `built_in`: what runs it.
    - `after_execution`: whether the turn goes on after the result; None if the command says it.

    The arguments of a call:

    - `schema`: JSON Schema of the model's arguments.
    - `defaults` and `fixed`: arguments that the definition sets. Their texts may have placeholders.
    - `envs`: maps arguments to names of variables with secrets.

    The upstream request:

    - `method` and `path`.
    - `auth_env`: name of the variable with the API key, if `envs` names none.
    - `upstream_params` and `headers`: parameters of the upstream that the definition sets.

    The limits:

    - `timeout_s`: time limit of a call. `suspend_timeout_s`: how long the kernel's worker waits for the result.
    - `result_format` and `max_result_tokens`: form and size of a result.
    - `budget`: applies beside the budgets of the settings.

    Computed from the row:

    - `schema_size`: None if the schema is too costly to validate in the event loop.
    - `digest`: identifies the content of the row.
    """

    tool_name: str
    built_in: BuiltInTool
    method: Method
    path: str
    auth_env: str = DEFAULT_AUTH_ENV
    after_execution: AfterExecution | None = None
    schema: Mapping[str, JsonValue] = field(default_factory=dict)
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    fixed: Mapping[str, JsonValue] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    upstream_params: Mapping[str, JsonValue] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    suspend_timeout_s: float | None = None
    result_format: ResultFormat = "text"
    max_result_tokens: int | None = None
    budget: BudgetLimits | None = None
    schema_size: SchemaSize | None = None
    digest: bytes = b""

    @property
    def hidden(self) -> frozenset[str]:
        """Return the arguments that are never shown to the model."""
        return frozenset(self.fixed) | frozenset(self.envs)

    @property
    def takes_other_arguments(self) -> bool:
        """Return whether `schema` allows arguments that it does not declare."""
        return self.schema.get("additionalProperties") is not False

    @property
    def model_arguments(self) -> frozenset[str]:
        """Return the arguments that a model may give."""
        names = set(object_at(self.schema, "properties"))
        if self.takes_other_arguments:
            names |= self.built_in.arguments.model_fields.keys()
        if not self.hidden:
            return frozenset(names)
        hidden = {fold(name) for name in self.hidden}
        return frozenset(name for name in names if fold(name) not in hidden)

    @property
    def operation(self) -> Operation:
        """Return the only operation that this tool may call."""
        return self.built_in.operation


def unusable(tool_name: str, problems: list[str]) -> ToolMisconfigured:
    """Return a new error. Never cache it: an exception keeps the frames of every call that raised it."""
    message = (
        f"The definition of {short(tool_name)!r} is not usable; an operator must correct it: {'; '.join(problems)}."
    )
    return ToolMisconfigured(message, detail={"problems": problems})


def stored_record(row: Mapping[str, JsonValue]) -> DefinitionRecord:
    """Return a row, or the document of a file, as the record that the executor would load."""
    name = row.get("tool_name", row.get("name"))  # a file may call it `name`, as the kernel's management API allows
    return DefinitionRecord(str(name), row.get("after_execution"), row.get("parameters"), row.get("options"))


def stored_after_execution(record: DefinitionRecord | None) -> AfterExecution | None:
    """Return the definition's `after_execution` if valid; it overrides the command's."""
    value = record.after_execution if record else None
    return cast("AfterExecution", value) if value in AFTER_EXECUTION else None


def upstream_path(options: Mapping[str, JsonValue]) -> tuple[str, str]:
    """Return the path of the options for the upstream: `options.jina`, in old definitions `options.openapi`."""
    is_old = not options.get("jina") and options.get("openapi")
    return ("options", "openapi" if is_old else "jina")
