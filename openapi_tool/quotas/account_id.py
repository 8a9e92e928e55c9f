"""What an account is for: whose use it counts, and in which period its record counts it."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple

from openapi_tool.quotas.periods import Period


class AccountId(NamedTuple):
    """What an account is for.

    `scope` is one of `SCOPES` in `options/budgets.py`. `owner` is an agent or a session, empty for a project. `tool` is
    the tool whose definition sets the budget, empty for a budget of the settings. `project` is named as in the records
    (`quota_project`).
    """

    scope: str
    project: str
    owner: str = ""
    tool: str = ""

    def labels(self) -> dict[str, str]:
        """Return the fields for display."""
        owner = f"{self.owner[:12]}…" if self.scope == "session" else self.owner
        return {"scope": self.scope, "project": self.project, "who": owner, "tool": self.tool}

    def record_name(self, period: Period) -> str:
        """Return the name of the record: a hash, because ids may contain any characters."""
        name = json.dumps((*self, period.name)).encode()
        return f"budget.{hashlib.blake2b(name, digest_size=20).hexdigest()}"
