"""What a gateway answers to a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.tools.result import ResultFields


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call, with the id by which `inspect` finds it.

    `key` is the name under which it may be stored if nobody takes it, None if it may not. `may_store`: nothing in the
    call says "do not track".
    """

    fields: ResultFields
    call_id: str | None = None
    key: str | None = None
    may_store: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the result beside its text, wherever its `result_format` has it."""
        result = self.fields.result if isinstance(self.fields.result, dict) and not self.fields.error else {}
        return {**(self.fields.tool_output or {}), **result}
