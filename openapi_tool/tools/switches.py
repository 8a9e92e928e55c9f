"""Tools that an operator has disabled (tool-design section 4).

`openapi-tool tools disable` stores a *switch* in the shared state, which every process of this service follows. A
switch has a *scope*: one project or all, and one tool or all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import orjson

from openapi_tool.protocol.errors import ToolNotAvailable

ALL = "*"
MAX_SWITCHES = 1_000
MAX_TEXT_CHARS = 300
_MAX_ENABLINGS = 20  # the newest; each process logs them once, soon after they are written


@dataclass(frozen=True, slots=True)
class Switch:
    """Record that an operator disabled a tool or enabled it again; `ALL` as project or tool means every one.

    `by` is the operator, `at` the time in ISO 8601, UTC.
    """

    project_id: str
    tool_name: str
    reason: str
    by: str
    at: str

    @property
    def scope(self) -> tuple[str, str]:
        """Project and tool."""
        return self.project_id, self.tool_name


class SwitchRecordInvalid(Exception):
    """The stored record is not a record of switches."""


class Switches:
    """Disabled tools, one switch per scope.

    `enablings` are the last records that a tool was enabled again. From them the log says who enabled it.
    """

    def __init__(self, switches: Iterable[Switch] = (), enablings: Iterable[Switch] = ()) -> None:
        self._by_scope: Mapping[tuple[str, str], Switch] = {switch.scope: switch for switch in switches}
        self.enablings = tuple(enablings)[-_MAX_ENABLINGS:]

    @classmethod
    def decode(cls, record: bytes) -> Switches:
        """Decode a stored record. Raises SwitchRecordInvalid."""
        try:
            stored = orjson.loads(record)
            return cls(map(_switch, stored["disabled"]), map(_switch, stored["enabled"]))
        except (ValueError, TypeError, KeyError) as error:
            raise SwitchRecordInvalid(f"it is not a record of disabled tools: {type(error).__name__}") from error

    def encode(self) -> bytes:
        """Return the record to store."""
        disabled = [asdict(switch) for switch in self.all]
        enabled = [asdict(switch) for switch in self.enablings]
        return orjson.dumps({"version": 1, "disabled": disabled, "enabled": enabled})

    @property
    def all(self) -> list[Switch]:
        """All switches, by project and tool."""
        return [self._by_scope[scope] for scope in sorted(self._by_scope)]

    def check(self, project_id: str, tool_name: str) -> None:
        """Raise ToolNotAvailable if a tool is disabled for a project."""
        if not self._by_scope:
            return
        for scope in ((project_id, tool_name), (project_id, ALL), (ALL, tool_name), (ALL, ALL)):
            switch = self._by_scope.get(scope)
            if switch is not None:
                raise ToolNotAvailable(
                    f"An operator disabled this tool: {switch.reason} Do not call it again; continue without it."
                )

    def with_disabled(self, switch: Switch) -> Switches:
        """Return the switches with one more, which replaces that of the same scope."""
        by_scope = {**self._by_scope, switch.scope: switch}
        return Switches(by_scope.values(), self.enablings)

    def with_enabled(self, switch: Switch) -> Switches:
        """Return the switches without that of the scope of `switch`, which records who enabled the tool and why.

        Return the same switches if there is none of this scope.
        """
        if switch.scope not in self._by_scope:
            return self
        remaining = [each for each in self.all if each.scope != switch.scope]
        return Switches(remaining, (*self.enablings, switch))


class UnreadSwitches(Switches):
    """Stands for a record that could not be read yet: no tool may run."""

    def check(self, project_id: str, tool_name: str) -> None:
        """Raise ToolNotAvailable."""
        del project_id, tool_name
        raise ToolNotAvailable(
            "No tool may run, as it cannot be read which ones an operator disabled; the log names the remedy. "
            "Do not call it again; continue without it."
        )


def _switch(row: Mapping[str, object]) -> Switch:
    return Switch(**{name: str(row[name]) for name in ("project_id", "tool_name", "reason", "by", "at")})
