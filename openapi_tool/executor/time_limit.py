"""How long one call may take, so that its result comes before the worker gives up (section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from openapi_tool.protocol.errors import ToolTimeout
from openapi_tool.tools.deadline import Deadline


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds: what the worker waits by default, what we keep back for the commit, and our own maximum.

    `default_s` is for calls whose definition says nothing of time; None gives them all that the worker waits.
    """

    worker_default_s: float
    margin_s: float
    maximum_s: float
    default_s: float | None = None

    def deadline(
        self, published_at: datetime, suspend_timeout_s: float | None, timeout_s: float | None = None
    ) -> Deadline:
        """When a call must be done, counted from its command's arrival in the stream.

        Raises ToolTimeout when that time has come already: nothing is begun that cannot end in time.
        """
        age_s = max(0.0, (datetime.now(UTC) - published_at).total_seconds())
        patience_s = max(self.worker_default_s, suspend_timeout_s or 0.0) - self.margin_s
        left_s = min(patience_s, self.maximum_s) - age_s
        if left_s <= 0:
            raise ToolTimeout(
                f"The tool executor got to this call only after {age_s:.0f} s, too late to run it; call again."
            )
        unsaid = suspend_timeout_s is None and timeout_s is None
        return Deadline.after(left_s).shortened(self.default_s if unsaid else None)
