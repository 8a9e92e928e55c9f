"""Functions that worker processes run, by name.

Such a process (`isolation/`) does work that may be slow or unsafe: what it reads comes from models or web pages. It has
no connections and no secrets, so this module imports only code that needs neither. A task and its result are payloads:
a JSON object with texts beside it (`protocol/payload.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from openapi_tool.isolation.child import Function
from openapi_tool.jina.response_task import READ_RESPONSE, run_response_task
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.payload import Payload, pack
from openapi_tool.tools.argument_check import ArgumentCheck, check_arguments
from openapi_tool.tools.definition_check import check_definition
from openapi_tool.tools.stored_search import SEARCH_TEXT, run_search_task


def _check_arguments(task: Payload) -> bytes:
    """Check arguments against a definition's schema; `misconfigured` is the answer if the schema is unusable."""
    check = ArgumentCheck.of_text(task.blobs[0])
    try:
        return pack({}, [check_arguments(check).as_text()])
    except ToolMisconfigured as unusable:
        return pack({"misconfigured": unusable.message})


def _check_definition(task: Payload) -> bytes:
    """Check a stored definition: its columns `parameters` and `options` as one JSON array."""
    parameters, options = json.loads(bytes(task.blobs[0]))
    return pack(check_definition(parameters, options).as_json())


TASKS: Mapping[str, Function] = {
    "check_arguments": _check_arguments,
    "check_definition": _check_definition,
    READ_RESPONSE: run_response_task,
    SEARCH_TEXT: run_search_task,
}
