"""What an account says of its budget: errors and a note for the model, and lines of the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from openapi_tool.protocol.errors import BudgetExceeded
from openapi_tool.quotas.account_id import AccountId
from openapi_tool.quotas.account_record import WARN_PERCENT, AccountLimit, reaches
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.periods import Period

log = logging.getLogger(__name__)

_OWNER_TEXT = {  # by scope
    "session": "of this session",
    "agent_day": "of this agent for today",
    "project_day": "of this project for today",
    "project_month": "of this project for this month",
}


class BudgetUse(NamedTuple):
    """How much of a budget is used at one moment.

    `charged` is what no later settlement reduces. `taken` is that, and what requests that have not ended have reserved.
    """

    limit: AccountLimit
    charged: Amount
    taken: Amount

    def lacking(self, need: Amount) -> str:
        """Return the resource of which too little is left for `need`; if that is so of both, `requests`."""
        limit = self.limit
        exceeds_requests = limit.requests is not None and self.taken.requests + need.requests > limit.requests
        return "requests" if exceeds_requests or limit.tokens is None else "tokens"

    def left(self) -> dict[str, int]:
        """Return limit and rest of each limited resource, for example `{"requests": 100, "requests_left": 40}`."""
        found: dict[str, int] = {}
        for kind, limit, taken in zip(AccountLimit._fields, self.limit, self.taken, strict=True):
            if limit is not None:
                found[kind] = limit
                found[f"{kind}_left"] = max(0, limit - taken)
        return found


@dataclass(frozen=True, slots=True)
class AccountMessages:
    """Messages about the account `id` in one period."""

    id: AccountId
    period: Period

    # For the model.

    def nearly_used_up(self, use: BudgetUse) -> str:
        """Return the note that a result gets when little or nothing is left."""
        left = use.left()
        limited = [kind for kind in AccountLimit._fields if kind in left]
        rests = " and ".join(f"{left[f'{kind}_left']:,} of {left[kind]:,} {kind}" for kind in limited)
        renews = f"; it renews at {self.period.renews}" if self.period.renews else ""
        nearly = "nearly " if all(left[f"{kind}_left"] for kind in limited) else ""
        return f"[The budget {self._owner_text} is {nearly}used up: {rests} are left{renews}.]"

    def held(self, use: BudgetUse, need: Amount, retry_after_s: int) -> BudgetExceeded:
        """Return the error of a request for which too little is left until others have ended."""
        kind = use.lacking(need)
        maximum = getattr(use.limit, kind)
        used = getattr(use.charged, kind)
        reserved = getattr(use.taken, kind) - used
        needed = getattr(need, kind)
        return BudgetExceeded(
            f"The budget {self._owner_text} is held by requests that have not ended, so nothing was sent: {used:,} of "
            f"{maximum:,} {kind} are used, {reserved:,} are reserved for them, and this call needs {needed:,}. "
            f"Call again in {retry_after_s} s: what has not ended by then counts as used.",
            detail={
                "budget": f"{self.id.scope}_{kind}",
                "limit": maximum,
                "used": used,
                "reserved": reserved,
                "needed": needed,
                "retry_after_s": retry_after_s,
            },
            retryable=True,
            retry_after=float(retry_after_s),
        )

    def used_up(self, use: BudgetUse, need: Amount) -> BudgetExceeded:
        """Return the error of a request that what is left of the budget does not cover."""
        detail = self._used_up_detail(use, need)
        renews = f"It renews at {self.period.renews}." if self.period.renews else "It does not renew."
        until = "before that" if self.period.renews else "in this session"
        return BudgetExceeded(
            f"The budget {self._owner_text} does not cover this call, so nothing was sent: {detail['used']:,} of "
            f"{detail['limit']:,} {use.lacking(need)} are used or reserved, and it needs {detail['needed']:,}. "
            f"{renews} Do not call again {until}; continue with what you have.",
            detail=detail,
        )

    def _used_up_detail(self, use: BudgetUse, need: Amount) -> dict[str, Any]:
        kind = use.lacking(need)
        return {
            "budget": f"{self.id.scope}_{kind}",
            "limit": getattr(use.limit, kind),
            "used": getattr(use.taken, kind),
            "needed": getattr(need, kind),
            "renews_at": self.period.renews or None,
        }

    # For the log.

    def log_used_up(self, use: BudgetUse, need: Amount) -> None:
        """Log that the budget is used up, with what the error of the refused request says."""
        detail = self._used_up_detail(use, need)
        log.warning(
            "the budget %s%s of project %s is used up",
            detail["budget"],
            self._tool_text,
            self.id.project,
            extra={"action": "budget.exceeded", **self._log_fields(), **detail},
        )

    def log_low(self, use: BudgetUse, renews: dict[str, str]) -> None:
        """Log that `WARN_PERCENT` of the budget are used."""
        low = [
            kind
            for kind in AccountLimit._fields
            if reaches(getattr(use.limit, kind), getattr(use.charged, kind), WARN_PERCENT)
        ]
        budget = " and ".join(f"{self.id.scope}_{kind}" for kind in low)
        log.warning(
            "80 %% of the budget %s%s of project %s are used",  # WARN_PERCENT; docs/operations.md shows this text
            budget,
            self._tool_text,
            self.id.project,
            extra={"action": "budget.low", **self._log_fields(), **use.left(), **renews, "budget": budget},
        )

    def log_unreadable(self, record_name: str, *, is_remembered: bool) -> None:
        """Log that the stored record cannot be read; `is_remembered` says whether an earlier one replaces it."""
        fields = {**self._log_fields(), "key": record_name}
        if is_remembered:
            log.warning(
                "the record of a budget of project %s cannot be read; its last known state is used",
                self.id.project,
                extra={"action": "budget.unreadable", **fields},
            )
        else:
            log.error(
                "the record of a budget of project %s cannot be read: it is damaged or of a later version; this "
                "replica remembers none of its uses, so its count begins anew at zero",
                self.id.project,
                extra={"action": "budget.unreadable", **fields},
            )

    @property
    def _owner_text(self) -> str:
        return _OWNER_TEXT[self.id.scope] + (" with this tool" if self.id.tool else "")

    @property
    def _tool_text(self) -> str:
        return f" for the tool {self.id.tool}" if self.id.tool else ""

    def _log_fields(self) -> dict[str, str]:
        scope, project, owner, tool = self.id
        agent = {"agent_id": owner} if scope == "agent_day" else {}
        return {"scope": scope, "project_id": project, **agent, "tool_name": tool}
