"""Write docs/operations.md: every action of the log and every metric, read from the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from openapi_tool.telemetry.metrics import ALL, Metric

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "openapi_tool"
PAGE = ROOT / "docs" / "operations.md"

MEANINGS = {
    "call.answered": "The result is committed and the doorbell published. With times, cost and status.",
    "call.broken": "A defect of the executor, with traceback; report it.",
    "call.denied": "The policy or a hook denied a call; the message says which, and why.",
    "call.handed_back": "A command that waited or was cancelled was handed back; at debug level also an evicted one.",
    "call.redelivered": "A command was redelivered; at debug level also one that was handed back here without a run.",
    "call.running": "A call begins, after its arguments were accepted.",
    "clock.offset": "The local clock is ahead of or behind that of NATS, which is used; synchronize the local clock.",
    "consumer.started": "The durable is found or created; commands are fetched from now on.",
    "dead_letters.unlimited": "The stream of dead letters lacks a limit, so one project can evict the dead letters of "
    "others or fill the disk; the message has the command that adds it.",
    "drain.finished": "All calls ended or were handed back after SIGTERM.",
    "drain.started": "SIGTERM: nothing is fetched any more; running calls get `executor.drain_timeout_s`.",
    "egress.address_refused": "A host of the upstream resolves to an address that is not public; nothing was sent.",
    "health.changed": "A dependency became available or unavailable; the message says why.",
    "health.serving": "The health server listens.",
    "key.blocked": "A key is invalid or exhausted: its calls use another key of its pool or fail. It is retried later.",
    "key.not_shared": "Cannot share which keys are blocked; this replica uses the outcomes of its own calls.",
    "limits.not_followed": "Cannot subscribe to changes of the shared records of limits or budgets.",
    "limits.not_shared": "Cannot share a limit of a key; this replica uses a part of it.",
    "limits.paused": "The upstream answered 429: requests with this key to this endpoint wait for a while.",
    "log": "A line of a library, or one without an action of its own.",
    "nats.denied": "NATS denies a subject; `openapi-tool nats permissions` prints what is needed.",
    "call.unsettled": "Cannot settle a command or hand it back; the server redelivers it after AckWait.",
    "nats.error": "An error that NATS reports, such as a refused login.",
    "open_files.short": "The limit of open files is too low for the settings.",
    "result.parked": "A paid result could not be committed; the message says whether the next delivery finds it.",
    "service.configured": "The settings in effect, credentials masked, and which keys are set.",
    "service.killed": "A second signal ends the process at once.",
    "service.started": "The service fetches commands from now on.",
    "service.stopped": "The process ends.",
    "service.stopping": "A signal asks the service to stop.",
    "service.waiting": "The start still waits for a dependency; the message says why.",
    "setting.changed": "A setting was changed or ignored; the message says which.",
    "storage.created": "A missing stream or bucket of the executor was created; the message names it.",
    "storage.replicas": "A stream or bucket has fewer replicas than the command stream: if its servers fail, "
    "redelivered calls wait. The message has the command that adds replicas.",
    "turn.unknown": "Cannot read other results of the step; the deadline of the call is unchanged.",
    "upstream.response": "A response of the upstream, with its status and size.",
}
"""Meanings of actions whose message alone is not clear; others are described by their message."""

_LEVELS = {"exception": "error", "log": "info, warning", "critical": "critical"}
_OTHER = "any"


def actions() -> dict[str, tuple[str, str]]:
    """Return level and meaning of each action, by its name."""
    result: dict[str, tuple[str, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name, level, message in _of_module(ast.parse(path.read_text(encoding="utf-8"))):
            known = result.get(name, (_OTHER, ""))
            levels = known[0] if level in (_OTHER, *known[0].split(", ")) else f"{known[0]}, {level}"
            levels = levels.removeprefix(f"{_OTHER}, ")
            result[name] = (levels, MEANINGS.get(name) or known[1] or _sentence(message))
    return dict(sorted(result.items()))


def _of_module(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield name, level and message of every action, first those in a log call, then those in any other dictionary."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    for call in calls:
        of_log = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        if of_log and call.func.value.id == "log":  # type: ignore[attr-defined]
            yield from ((name, _level(call), _message(call)) for name in _actions_in(call))
    yield from ((name, _OTHER, "") for name in _actions_in(module))


def _actions_in(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Dict):
            for key, value in zip(child.keys, child.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "action" and isinstance(value, ast.Constant):
                    yield str(value.value)


def _level(call: ast.Call) -> str:
    name = str(getattr(call.func, "attr", ""))
    return _LEVELS.get(name, name)


def _message(call: ast.Call) -> str:
    texts = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return texts[0] if texts else ""


def _sentence(message: str) -> str:
    text = re.sub(r"%(?:\.\d+)?[sdf]", "…", message).removesuffix(": …")
    text = text.replace("%%", "%")
    text = re.sub(r"(?<=\w)…$", "", text)  # an addition that may be empty
    begins_with_a_setting = "." in text.partition(" ")[0]
    start = text[:1] if begins_with_a_setting else text[:1].upper()
    return f"{start}{text[1:].rstrip('.')}." if text else ""


_PICTURES = (
    "",
    "## Dashboard",
    "",
    "The chart has a dashboard for Grafana (`monitoring.dashboard`). Its panels, drawn by `make pictures` from a run",
    "of 100 s on the embedded stack, during which the upstream fails for 15 s:",
    "",
    "![Panels of the dashboard](pictures/dashboard.png)",
    "",
    "## Page of a replica",
    "",
    "With `health.page` the health server's `/` shows what `top` shows, of this replica. `openapi-tool dev` always has",
    "such a page, which also lists what the model read of the last calls. At the end of the same run:",
    "",
    "![The page of a replica](pictures/page.png)",
)


def operations_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Operations: log lines and metrics",
        "",
        "Written by `make docs` from the code. `openapi-tool inspect` follows one call, `openapi-tool top` shows all",
        "replicas.",
        "",
        "## Log lines",
        "",
        "Each line is a JSON object with `time`, `level`, `logger`, `message` and one stable `action`. A line of a",
        "call also has `project_id`, `agent_id`, `agent_turn_id`, `tool_call_id`, `trace_id` and `protocol`, the",
        "version of its kernel; spans of calls have it as `openapi_tool.protocol`. Other lines of a kernel, about its",
        "connections, its durable and its commands, have `protocol`, too.",
        "",
        "| action | level | meaning |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {level} | {_escaped(meaning)} |" for name, (level, meaning) in actions().items()),
        "",
        *_SPANS,
        "",
        "## Metrics",
        "",
        "The same on `/metrics` (Prometheus) and over OTLP, where counters have no `_total`, `error_code` is",
        "`error.type`, `host` is `server.address`, `project` is `commonground.project.id` and `tool` is",
        "`openapi_tool.built_in`. An empty label is left out. A metric without a value yet is not sent over OTLP.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
        *map(_row, ALL),
        *_PICTURES,
    ]
    return "\n".join(lines) + "\n"


_SPANS = """\
## Spans

With `telemetry.otlp_endpoint`, by OpenTelemetry's conventions. All belong to the trace that the kernel began.

| span | kind | what it is, and its attributes |
| --- | --- | --- |
| `execute_tool NAME` | consumer | the call, from the command's arrival on; child of the kernel's span; {call} |
| `queue` | consumer | from the arrival to the beginning of the run; {queue} |
| `load`, `commit` | client | the two statements; `db.system.name` |
| `GET`, `POST` | client | each upstream request; {request}; no `url.full`: it has the query or the page |
| `send wakeup` | producer | {wakeup} |

The others are children of `execute_tool`. A command that is dead-lettered before it was loaded has no span;
`openapi-tool inspect` shows it.""".format(
    call="`gen_ai.operation.name`, `gen_ai.tool.name`, `gen_ai.tool.type`, `gen_ai.tool.call.id`, `gen_ai.agent.id`, "
    "`commonground.project.id`, `commonground.turn.id`, `openapi_tool.built_in`, `openapi_tool.status`, "
    "`openapi_tool.tokens`, `openapi_tool.requests`, `openapi_tool.cached`, `openapi_tool.truncated`, "
    "`openapi_tool.delivery_attempt`, `error.type`",
    queue="`messaging.system`, `messaging.operation.name`, `messaging.operation.type`, "
    "`messaging.destination.template`",
    request="`http.request.method`, `server.address`, `server.port`, `url.scheme`, `http.response.status_code`, "
    "`http.request.resend_count`, `error.type`",
    wakeup="`messaging.system`, `messaging.operation.name`, `messaging.operation.type`, `messaging.destination.name`",
).splitlines()


def _row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    return f"| `{name}` | {metric.kind} | {_labels(metric.label_names)} | {_escaped(metric.text)} |"


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")
