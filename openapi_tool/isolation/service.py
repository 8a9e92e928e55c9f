"""Parsing of definitions and validation of arguments: in this process if that is cheap, else in a worker process.

*Inline* means in this process. The bounds of what is cheap are in `tools/inline_bounds.py`.
"""

from __future__ import annotations

import json

from openapi_tool.concurrency.fair_semaphore import FairSemaphore
from openapi_tool.isolation.pool import PoolBusy, TaskKilled, WorkerPool
from openapi_tool.protocol.errors import ToolMisconfigured, ToolTimeout
from openapi_tool.protocol.payload import Payload, pack
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.argument_check import ArgumentCheck, CheckedArguments, check_arguments
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_check import CheckedDefinition, check_definition
from openapi_tool.tools.definition_parser import find_definition
from openapi_tool.tools.inline_bounds import MAX_DEFINITION_BYTES, fits_inline, schema_size
from openapi_tool.tools.wording import short

# Names of tasks (`worker_tasks.py`).
CHECK_ARGUMENTS = "check_arguments"
CHECK_DEFINITION = "check_definition"

_MAX_SEARCHES = 4
"""Searches at once: each holds a whole text, up to `egress.max_response_bytes`, and a window of it in the driver."""


class Isolation:
    """Runs what a tenant can make costly. Without a pool all of it runs inline: the command line, tests of tools.

    `searches` limits the searches of stored texts in this process.
    """

    def __init__(self, pool: WorkerPool | None = None) -> None:
        self.pool = pool
        self.searches = FairSemaphore(_MAX_SEARCHES)

    async def parse_definition(self, record: DefinitionRecord, project: str, wait_s: float) -> ToolDefinition:
        """Parse a stored definition, cached by content. Raises ToolMisconfigured with every problem, ToolTimeout."""
        found = find_definition(record)
        if isinstance(found, ToolDefinition):  # from the cache
            return found
        parameters, options = record.parameters, record.options
        is_small = len(found.content) <= MAX_DEFINITION_BYTES
        if self.pool is None or (is_small and _has_small_schema(parameters)):
            return found.parse(check_definition(parameters, options))
        text = json.dumps([parameters, options]).encode()  # orjson would change infinite numbers
        checked = await self._run(self.pool, CHECK_DEFINITION, text, record.tool_name, project, found.digest, wait_s)
        return found.parse(CheckedDefinition.of_json(checked.value))

    async def check_arguments(
        self, definition: ToolDefinition, check: ArgumentCheck, project: str, wait_s: float
    ) -> CheckedArguments:
        """Validate and repair arguments. Raises ToolMisconfigured, ToolTimeout."""
        size = definition.schema_size
        if self.pool is None or (size and fits_inline(size, definition.schema, {**check.defaults, **check.given})):
            return check_arguments(check)
        name, digest = definition.tool_name, definition.digest
        checked = await self._run(self.pool, CHECK_ARGUMENTS, check.as_text(), name, project, digest, wait_s)
        return CheckedArguments.of_text(checked.blobs[0])

    async def _run(
        self, pool: WorkerPool, task: str, text: bytes, tool_name: str, project: str, digest: bytes, wait_s: float
    ) -> Payload:
        """Run a task whose subject is the definition with this digest; translate its errors into those of the call."""
        try:
            result = await pool.run(task, [pack({}, [text])], project=project, subject=digest, wait_s=wait_s)
        except TaskKilled:
            raise ToolMisconfigured(
                f"The definition of {short(tool_name)!r} is not usable; an operator must correct it: parameters: take "
                "too much time or memory to check; replace allOf, contains, uniqueItems and long enum lists"
            ) from None
        except PoolBusy:
            raise ToolTimeout("The tool executor is too busy to check this call's arguments; call again.") from None
        if "misconfigured" in result.value:
            raise ToolMisconfigured(str(result.value["misconfigured"]))
        return result


def _has_small_schema(parameters: object) -> bool:
    """Return whether the schema of a definition's arguments, if it has one, may be compiled inline."""
    return not isinstance(parameters, dict) or schema_size(parameters) is not None
