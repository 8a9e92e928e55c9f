"""Tools that an operator disabled, for one project or for all; shared by all replicas as one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import orjson

from openapi_tool.protocol.errors import ToolNotAvailable

ALL = "*"
MAX_SWITCHES = 1_000
_MAX_ENABLED = 20
MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Switch:
    """Record of disabling or enabling a tool of a project: by whom, when and why. `ALL` means every project or tool.

    `at` is ISO 8601 in UTC.
    """

    project_id: str
    tool_name: str
    reason: str
    by: str
    at: str

    @property
    def scope(self) -> tuple[str, str]:
        """Return project and tool."""
        return self.project_id, self.tool_name


class SwitchRecordInvalid(Exception):
    """The stored record is not a record of switches."""


class Switches:
    """Set of disabled tools, one switch per scope; `enablings` are the latest that were enabled again, for the log."""

    def __init__(self, switches: Iterable[Switch] = (), enablings: Iterable[Switch] = ()) -> None:
        self._by_scope: Mapping[tuple[str, str], Switch] = {switch.scope: switch for switch in switches}
        self.enablings = tuple(enablings)[-_MAX_ENABLED:]

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
        enabled = [asdict(switch) for switch in self.enablings]
        return orjson.dumps({"version": 1, "disabled": [asdict(switch) for switch in self.all], "enabled": enabled})

    @property
    def all(self) -> list[Switch]:
        """All switches, by project and tool."""
        return [self._by_scope[scope] for scope in sorted(self._by_scope)]

    def check(self, project_id: str, tool_name: str) -> None:
        """Raise ToolNotAvailable if a tool is disabled for a project."""
        if not self._by_scope:
            return
        for scope in ((project_id, tool_name), (project_id, ALL), (ALL, tool_name), (ALL, ALL)):
            if (switch := self._by_scope.get(scope)) is not None:
                raise ToolNotAvailable(
                    f"An operator disabled this tool: {switch.reason} Do not call it again; continue without it."
                )

    def disabled(self, switch: Switch) -> Switches:
        """Return the set with a further switch, which replaces one of the same scope."""
        return Switches({**self._by_scope, switch.scope: switch}.values(), self.enablings)

    def enabled(self, switch: Switch) -> Switches:
        """Return the set without the switch of the same scope; the same set if there is none."""
        if switch.scope not in self._by_scope:
            return self
        return Switches((each for each in self.all if each.scope != switch.scope), (*self.enablings, switch))


def _switch(row: Mapping[str, object]) -> Switch:
    return Switch(**{name: str(row[name]) for name in ("project_id", "tool_name", "reason", "by", "at")})
