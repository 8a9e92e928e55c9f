"""Errors of a call, as one tree; ARCHITECTURE.md ("Errors") lists their effects."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeVar

from openapi_tool.protocol.abridging import abridged
from openapi_tool.protocol.printable import printable_lines
from openapi_tool.protocol.result_objects import ErrorObject

E = TypeVar("E", bound=BaseException)

Status = Literal["success", "failed", "timeout"]
_MAX_MESSAGE_CHARS = 6_000
"""Characters of a message: `tools/problems.py` lists 20 problems of 200 characters."""

_IN_MESSAGE = frozenset({"problems", "results"})
"""Members of `detail` whose texts are also in the message.

`as_error` leaves them out: a model that reads the whole error object would read them twice.
"""


class ExecutorError(Exception):
    """Base of the expected errors."""


class ToolError(ExecutorError):
    """Failed call that gets a result card (protocol section 8).

    In the result card:

    - `code`, `status`: kind of error, and status of the result.
    - `message`: what happened and what to do instead. The model sees only this (protocol section 7).
    - `detail`: further facts, as JSON.
    - `retryable`: whether the same request may work later.
    - `http_status`: the HTTP status of the upstream's response.

    For the executor itself:

    - `retry_after`: seconds after which a retry may work; `max_retries` limits the retries within the call.
    - `timed_out`: whether more time might have helped.
    - `tokens`, `requests`: the cost upstream.
    - `upstream_status`: the five-digit status in the body of the upstream's response.
    - `key_variable`: the settings variable of the key that the upstream has blocked.
    - `is_concurrency`: whether a 429 says that too many requests are open, rather than that too many were sent.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[Status] = "failed"
    retryable = False
    timed_out = False
    tokens = 0
    requests = 0
    upstream_status: int | None = None
    key_variable: str | None = None
    is_concurrency = False

    def __init__(
        self,
        message: str,
        *,
        detail: object = None,
        retryable: bool | None = None,
        retry_after: float | None = None,
        max_retries: int = 0,
        http_status: int | None = None,
    ) -> None:
        super().__init__(_shown(message))
        self.detail = detail
        if retryable is not None:
            self.retryable = retryable
        self.retry_after = retry_after
        self.max_retries = max_retries
        self.http_status = http_status

    @property
    def message(self) -> str:
        """What the model sees, of bounded length. To set another message also changes `str(error)`."""
        return str(self.args[0])

    @message.setter
    def message(self, message: str) -> None:
        self.args = (_shown(message),)

    def as_error(self) -> ErrorObject:
        """Return the `error` object of a tool.result card."""
        error = ErrorObject(code=self.code, message=self.message, source="tool", retryable=self.retryable)
        detail = self.detail
        if isinstance(detail, dict):
            detail = {name: value for name, value in detail.items() if name not in _IN_MESSAGE} or None
        if detail is not None:
            error["detail"] = detail
        if self.http_status is not None:
            error["http_status"] = self.http_status
        return error


class BadRequest(ToolError):
    """The call is malformed; the message names every offending field and the remedy."""

    code = "bad_request"


class NotFound(ToolError):
    """The call names an object that does not exist in its project."""

    code = "not_found"


class ToolMisconfigured(ToolError):
    """The stored definition or the executor's environment does not allow the call."""

    code = "tool_misconfigured"


class ToolNotAvailable(ToolError):
    """The project may not use the tool, an operator disabled the tool, or a hook denied the call."""

    code = "tool_not_available"


class AuthFailed(ToolError):
    """The upstream refused the key (401, 403) or the plan behind it (402)."""

    code = "auth_failed"


class RateLimited(ToolError):
    """The upstream's rate limit was hit (429), or a limit of this service is reached."""

    code = "rate_limited"
    retryable = True


class BudgetExceeded(ToolError):
    """One of this service's budgets, a token budget (409 with status 40904) or the balance (402) is used up."""

    code = "budget_exceeded"


class TargetRefused(ToolError):
    """The upstream will not read the target: private address, law, robots.txt, blocked domain."""

    code = "target_refused"


class UpstreamRejected(ToolError):
    """The upstream could not do what the request asks; a retry would not help."""

    code = "upstream_rejected"


class UpstreamUnavailable(ToolError):
    """The upstream is unavailable, or failed temporarily."""

    code = "upstream_unavailable"
    retryable = True


class ResponseTooLarge(ToolError):
    """The upstream's response is larger than `egress.max_response_bytes`, or has more JSON values than are parsed."""

    code = "response_too_large"


class ToolTimeout(ToolError):
    """The call's deadline has passed (protocol section 7)."""

    code = "tool_timeout"
    status = "timeout"
    retryable = True
    timed_out = True


class InternalError(ToolError):
    """A defect of this executor; the log line with the same tool_call_id has the details."""

    code = "internal_error"


class Unanswerable(ExecutorError):
    """No result can reach a turn (protocol section 2), so the command becomes a dead letter.

    `reason` is a stable name of the cause. With `terminate` the command's message is terminated, else acknowledged.
    """

    terminate: ClassVar[bool] = True

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class ReportRefused(Unanswerable):
    """A rule of the report refuses the result (protocol section 6)."""

    terminate = False


class Unavailable(ExecutorError):
    """PostgreSQL or NATS is unavailable; `problem` is the message without the remedy.

    A command of the kernel is then handed back. A gateway answers its calls nevertheless: it logs what it could not
    store, and takes what it could not look up for absent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.problem = message.partition("; check ")[0]


class TurnBusy(ExecutorError):
    """Another result of the turn is unread, so nothing was written; try again soon."""


class NotStored(Unavailable):
    """JetStream stores no message, such as a doorbell; no command is fetched until it does."""


class NeedsOperator(Unavailable):
    """The database is unusable until an operator acts as `remedy` says."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}")
        self.problem = problem
        self.remedy = remedy


def _shown(message: str) -> str:
    """Return a message of bounded length, in which no name or value that it quotes can forge output."""
    return abridged(printable_lines(message), _MAX_MESSAGE_CHARS)


def without_traceback(error: E) -> E:
    """Remove the tracebacks and causes of an error, and return it.

    Their frames keep the upstream's response alive, and form a reference cycle with the task. The garbage collection of
    many such responses at once would block the event loop for most of a second.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        cause = link.__cause__ or link.__context__
        link.__cause__ = link.__context__ = None
        link = cause
    return error
