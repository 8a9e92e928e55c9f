"""Generated documents and parts of documents, and the chart's schema.

`python -m scripts.docs` writes them; `--check` fails if one is out of date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.parameters import Parameter
from openapi_tool.jina.remarks import WARNINGS
from openapi_tool.jina.url_policy import INTERNAL_SUFFIXES
from openapi_tool.protocol.errors import ToolError
from openapi_tool.settings import PREFIX, SHORT_NAMES, Settings
from openapi_tool.settings.sections import fields_of
from openapi_tool.telemetry.log_writer import FLUSH_S, MAX_QUEUED_BYTES, PAUSE_S
from openapi_tool.telemetry.logs import MAX_LINES, MESSAGE_CHARS, UNLIMITED, WINDOW_S
from openapi_tool.telemetry.metrics import ALL, Described
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.declaration import Args, Definition, Options, Upstream, json_schema
from openapi_tool.tools.declaration_schema import Schema
from openapi_tool.tools.declaration_section import Section
from openapi_tool.tools.stored_rows import as_yaml, registration
from scripts.packages import PAGE as DEPENDENCIES
from scripts.packages import dependencies_page
from tests.requirements import REQUIREMENTS

CHART = Path(__file__).parent.parent / "helm" / "openapi-tool"
VALUES = CHART / "values.yaml"
CHART_README = CHART / "README.md"
_MARK = "@schema "
_TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_MAX = 2**31 - 1
"""Maximum of Kubernetes' 32-bit integers."""

_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_LABEL = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
_VOLUME_TYPES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)


def _closed(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that may have no other properties."""
    return {"type": "object", "required": [*required], "additionalProperties": False, "properties": properties}


_STRING, _BOOLEAN, _OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
_VARIABLE = {"type": "string", "pattern": r"^[A-Za-z_][A-Za-z0-9_.-]*$"}
_ID = {"type": "integer", "minimum": 0}
_SECURITY = {
    "runAsNonRoot": _BOOLEAN,
    "runAsUser": _ID,
    "runAsGroup": _ID,
    **dict.fromkeys(("seLinuxOptions", "seccompProfile", "appArmorProfile", "windowsOptions"), _OBJECT),
}
_NAMED: Mapping[str, dict[str, Any]] = {
    "labels": {
        "additionalProperties": {"type": "string", "maxLength": 63, "pattern": _LABEL},
        "propertyNames": {"pattern": _LABEL_KEY},
    },
    "annotations": {"additionalProperties": _STRING, "propertyNames": {"pattern": _LABEL_KEY}},
    "name": {"maxLength": 253, "pattern": _NAME},
    "key": {"maxLength": 253, "pattern": r"^[-._A-Za-z0-9]*$"},
    "quantity": {
        "type": ["string", "number"],
        "minimum": 0,
        "pattern": r"^([0-9]+([.][0-9]+)?(m|k|[MGTP]|[KMGTP]i)?)?$",
    },
    "affinity": {
        "additionalProperties": False,
        "properties": dict.fromkeys(("nodeAffinity", "podAffinity", "podAntiAffinity"), _OBJECT),
    },
    "tolerations": {
        "items": _closed(
            (), key=_STRING, operator=_STRING, value=_STRING, effect=_STRING, tolerationSeconds={"type": "integer"}
        )
    },
    "spread": {"items": {"type": "object", "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"]}},
    "peers": {
        "items": {**_closed((), podSelector=_OBJECT, namespaceSelector=_OBJECT, ipBlock=_OBJECT), "minProperties": 1}
    },
    "egress": {"items": _closed((), ports={"type": "array"}, to={"type": "array"})},
    "count": {"type": ["integer", "string"], "minimum": 0, "pattern": r"^[0-9]{1,3}%$"},
    "variables": {"items": _closed(("name",), name=_VARIABLE, value=_STRING, valueFrom=_OBJECT)},
    "variable-sources": {"items": _closed((), prefix=_STRING, configMapRef=_OBJECT, secretRef=_OBJECT)},
    "volumes": {
        "items": _closed(
            ("name",),
            name={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"},
            **dict.fromkeys(_VOLUME_TYPES, _OBJECT),
        )
    },
    "containers": {"items": {"type": "object", "required": ["name", "image"]}},
    "dns": {
        "additionalProperties": False,
        "properties": {
            "nameservers": {"type": "array", "items": _STRING},
            "searches": {"type": "array", "items": _STRING},
            "options": {"type": "array", "items": _closed(("name",), name=_STRING, value=_STRING)},
        },
    },
    "tls": {"items": _closed((), secretName=_STRING, hosts={"type": "array", "items": _STRING})},
    "hosts": {
        "items": _closed(("ip", "hostnames"), ip=_STRING, hostnames={"type": "array", "minItems": 1, "items": _STRING})
    },
    "pod-security": {
        **_closed(
            (),
            **_SECURITY,
            fsGroup=_ID,
            supplementalGroups={"type": "array", "items": _ID},
            sysctls={"type": "array", "items": _closed(("name", "value"), name=_STRING, value=_STRING)},
            **dict.fromkeys(("fsGroupChangePolicy", "seLinuxChangePolicy", "supplementalGroupsPolicy"), _STRING),
        ),
        "type": ["object", "null"],
    },
    "container-security": {
        **_closed(
            (),
            **_SECURITY,
            **dict.fromkeys(("allowPrivilegeEscalation", "privileged", "readOnlyRootFilesystem"), _BOOLEAN),
            capabilities=_OBJECT,
            procMount=_STRING,
        ),
        "type": ["object", "null"],
    },
    "mounts": {
        "items": _closed(
            ("name", "mountPath"),
            name=_STRING,
            mountPath={"type": "string", "pattern": r"^/[^:]+$"},
            subPath=_STRING,
            readOnly=_BOOLEAN,
        )
    },
}
"""Constraints by the names that `@schema` lines of values.yaml use."""

_COPIED_KEYWORDS = ("type", "enum", "const", "items", "pattern", "anyOf", "additionalProperties", "minItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml; `constraints` come from its `@schema` lines, `children` are the keys of its object.

    An object that has constraints has no children: its keys are not listed.
    """

    path: str
    default: Any
    description: str
    constraints: dict[str, Any]
    children: tuple[Value, ...]

    @property
    def key(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]


def values() -> tuple[Value, ...]:
    """Return the keys of values.yaml in their order."""
    text = VALUES.read_text(encoding="utf-8")
    return tuple(_values(yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text), text.splitlines(), ""))


def _values(node: Any, defaults: Mapping[str, Any], lines: list[str], prefix: str) -> Iterator[Value]:
    for key, child in node.value:
        default, path = defaults[key.value], f"{prefix}{key.value}"
        words, marks = _comment(lines, key.start_mark.line)
        constraints: dict[str, Any] = {}
        for mark in map(yaml.safe_load, marks):
            constraints.update(_named(mark) if isinstance(mark, str) else mark)
        nested = isinstance(default, dict) and default and not constraints
        inner = tuple(_values(child, default, lines, f"{path}.")) if nested else ()
        yield Value(path, default, " ".join(words), constraints, inner)


def _comment(lines: list[str], at: int) -> tuple[list[str], list[str]]:
    """Return the words and the `@schema` lines of the comment that ends above line `at`."""
    comment: list[str] = []
    while at > 0 and lines[at - 1].lstrip().startswith("#"):
        at -= 1
        comment.insert(0, lines[at].strip().removeprefix("#").strip())
    marks = [line.removeprefix(_MARK) for line in comment if line.startswith(_MARK)]
    return [line for line in comment if not line.startswith(_MARK)], marks


def values_schema() -> str:
    """Return values.schema.json."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_object(values())}
    schema["properties"] = {"global": {"type": "object"}, **schema["properties"]}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _object(children: tuple[Value, ...]) -> dict[str, Any]:
    """Return the schema of an object. Set to null, Helm removes a key; keys that may be null or empty are optional."""
    properties = {value.key: _property(value) for value in children}
    required = [value.key for value in children if not _is_optional(value)]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _is_optional(value: Value) -> bool:
    return value.default in ("", [], {}, None) or "null" in value.constraints.get("type", ())


def _property(value: Value) -> dict[str, Any]:
    described = {"description": value.description}
    if isinstance(value.default, dict):
        return {**described, **(_object(value.children) if value.children else {"type": "object"}), **value.constraints}
    kind: dict[str, Any] = {} if "enum" in value.constraints else {"type": _TYPES.get(type(value.default), "string")}
    if kind == {"type": "integer"}:
        kind["maximum"] = _MAX
    return {**described, **kind, **value.constraints}


def _named(name: str) -> dict[str, Any]:
    """Return the constraints that an `@schema` line names."""
    return settings_schema() if name == "settings" else _NAMED[name]


def settings_schema() -> dict[str, Any]:
    """Return the schema of `config`: that of the settings, without `required` and references."""
    root = Settings.model_json_schema()
    schema: dict[str, Any] = _inlined(root, root["$defs"])
    return schema


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    inlined = {name: schema[name] for name in (*_COPIED_KEYWORDS, *_BOUNDS) if name in schema}
    if "properties" in schema:
        inlined["properties"] = {name: _inlined(inner, definitions) for name, inner in schema["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(inlined.get(name), dict):
            inlined[name] = _inlined(inlined[name], definitions)
    if "anyOf" in inlined:  # an optional setting; without `null`, which TOML lacks
        (inlined,) = (_inlined(inner, definitions) for inner in inlined["anyOf"] if inner != {"type": "null"})
    return inlined


def _chart_values() -> str:
    rows = (row for value in values() for row in _rows(value))
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def _rows(value: Value) -> Iterator[str]:
    if value.children:
        yield f"| **`{value.path}`** | | {value.description} |"
        for child in value.children:
            yield from _rows(child)
    else:
        shown = json.dumps(value.default, ensure_ascii=False)
        choices = value.constraints.get("enum", ())
        among = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        yield f"| `{value.path}` | `{shown}` | {value.description}{among} |"


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "openapi_tool"
OPERATIONS_PAGE = ROOT / "docs" / "operations.md"

MEANINGS = {
    "budget.unreadable": "The record of a budget cannot be read: it is damaged, or of a later version. Warning: its "
    "last known state replaces it. Error: this replica remembers none of its uses, so its count begins anew at zero.",
    "call.broken": "A defect of the executor, with traceback; report it.",
    "call.denied": "The policy or a hook denied a call; the message says which, and why.",
    "call.finished": "The result is committed and the doorbell published. With cost (`requests` are those that got a "
    "connection), status and times: `queue_ms` in "
    "the stream, `permit_ms` for a rate limit, `upstream_ms`, `turn_ms` for the worker and other results of the turn.",
    "call.handed_back": "A command that waited or was cancelled was handed back; at debug level: an evicted one.",
    "command.requeued": "A command could not be answered now and was handed back; the message has the reason.",
    "call.redelivered": "A command was redelivered; at debug level: one that a replica had handed back without a run.",
    "call.running": "A call begins, after its arguments were accepted.",
    "clock.offset": "The local clock differs from that of NATS, whose time the executor uses; synchronize the clock.",
    "consumer.started": "The durable is found or created; commands are fetched from now on.",
    "dead_letters.unlimited": "The stream of dead letters lacks a limit, so one project can evict the dead letters of "
    "others or fill the disk; the message has the command that adds it.",
    "drain.finished": "All calls of a kernel ended or were handed back; with the number of those that were cancelled.",
    "drain.started": "Nothing is fetched any more; running calls get `grace_s` seconds.",
    "egress.address_refused": "A host of the upstream resolves to an address that is not public; nothing was sent.",
    "gateway.serving": "The HTTP door listens; with its address and the number of tokens.",
    "health.changed": "A dependency became available, or is unavailable; the message says why, again every minute.",
    "health.serving": "The health server listens.",
    "key.blocked": "An endpoint refuses a key: its requests use another key of the pool or fail. Tried later.",
    "key.not_shared": "Cannot share which keys are blocked; this replica uses the outcomes of its own calls.",
    "limits.not_followed": "Cannot subscribe to changes of the shared records of limits or budgets.",
    "limits.not_shared": "Cannot share a limit of a key with other replicas; this replica uses its part of the limit.",
    "limits.paused": "The upstream answered 429: requests with this key to this endpoint wait for a while.",
    "log.dropped": "`lines` lines were dropped before this one: standard error could not be written, or its reader was "
    "too slow.",
    "log": "A line of a library, or one without an action of its own.",
    "nats.denied": "NATS denies a subject; `openapi-tool nats permissions` prints what is needed.",
    "call.unsettled": "Cannot settle a command or hand it back; the server redelivers it after AckWait.",
    "nats.error": "An error that NATS reports, such as a refused login.",
    "open_files.exhausted": "The process may open no further file: calls that need a connection wait until their "
    "deadline. At most once a minute.",
    "open_files.short": "The limit of open files is too low for the settings; the message says how many connections "
    "are opened instead.",
    "result.parked": "A paid result could not be committed; the message says whether the next delivery finds it.",
    "service.configured": "The settings in effect, with masked credentials, and which keys are set.",
    "service.killed": "A second signal ends the process at once.",
    "service.cut_off": "`executor.drain_timeout_s` is over, and the process ends. `steps` names the unfinished steps, "
    "`running` is the number of calls whose commands are redelivered after AckWait.",
    "service.started": "The service fetches commands from now on.",
    "service.step_done": "A step of the end is done: `step`, after `seconds`.",
    "service.stopped": "Every step is done; the process ends.",
    "service.stopping": "A signal asks the service to stop, or without `signal` a part of it failed. The process ends "
    "in `within_s` seconds at the latest.",
    "setting.changed": "A setting was changed or ignored; the message says which.",
    "storage.created": "A missing stream or bucket of the executor was created; the message names it.",
    "storage.replicas": "A stream or bucket has fewer replicas than the command stream: if its servers fail, "
    "redelivered calls wait. The message has the command that adds replicas.",
    "storage.unrestricted": "The bucket with the session key was created by an earlier version, so that users who may "
    "disable tools can read or remove it; the message has the command that prevents this.",
    "limits.unreadable": "The record of a limit of a key cannot be read: it is damaged, or of another version, whose "
    "replicas must be stopped. The last known record replaces it; if none is known, its count begins anew.",
    "turn.unknown": "Cannot read other results of the step; the deadline of the call is unchanged.",
    "upstream.response": "A response of the upstream, with its status and size.",
    "upstream.unreachable": "A request got no response: the name was not resolved, or the connection failed or broke.",
    "token.refused": "Refused a wrong token, or a revoked or expired one, whose id the message has.",
}
"""Meanings of actions whose message alone is not clear; others are described by their message."""

_LEVELS = {"exception": "error", "log": "info, warning", "critical": "critical", "makeRecord": "warning"}
_OTHER = "any"  # an action in a dictionary whose log call, and level, are elsewhere


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
    text = re.sub(r"(?<=\w)…$", "", text)  # a last argument without a blank before it may be empty
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
    "With `health.page` the health server serves a page at `/` that shows what `top` shows, for this replica only.",
    "`openapi-tool dev` always serves such a page, which also lists what the model read of the last calls. The page at",
    "the end of the same run:",
    "",
    "![The page of a replica](pictures/page.png)",
)


def operations_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Operations: log lines and metrics",
        "",
        "Written by `make docs` from the code. `openapi-tool inspect` shows what happened to one call,",
        "`openapi-tool top` what all replicas do. [ARCHITECTURE.md](../ARCHITECTURE.md#terms) explains the terms.",
        "",
        "## Log lines",
        "",
        "Each line is a JSON object with `time`, `level`, `logger`, `message` and `action`. Search by `action`: it is",
        "part of the public interface, the message is not. A line of a call also has `project_id`, `agent_id`,",
        "`agent_turn_id`, `tool_call_id`, `trace_id` and `protocol`, the protocol version of its kernel. Spans of",
        "calls have that version as `openapi_tool.protocol`. Lines about the connections, the durable and the commands",
        "have `protocol`, too.",
        "",
        "No project can flood the log. Of the lines with a `project_id` each project gets at most",
        f"{MAX_LINES} of each action within {WINDOW_S:.0f} s. Further ones are dropped and counted",
        "(`openapi_tool_log_lines_limited_total`); the next one of the action and project has their number as",
        f"`dropped`. Their messages are cut after {MESSAGE_CHARS} characters. The lines of each `logger` of a library",
        "have the same limit, as anyone who reaches a port can cause them with bytes that are no HTTP. Never dropped",
        f"are lines at debug level, and {', '.join(f'`{name}`' for name in sorted(UNLIMITED))}:",
        "the record of each call, and of what operators disabled.",
        "",
        f"A thread writes the lines of `serve` to standard error, from a queue of {MAX_QUEUED_BYTES // 2**20} MB. No",
        "reader that stops reading and no write that fails (closed pipe, full disk) delays or ends a call: lines that",
        "cannot be queued or written are dropped and counted (`openapi_tool_log_lines_dropped_total`), and the next",
        "line that is written follows a line `log.dropped` with their number. At its end the process waits for the",
        f"queued lines for at most {FLUSH_S:.0f} s; SIGKILL loses them. A line may wait {PAUSE_S:g} s there, so that",
        "the thread writes those of many calls together.",
        "",
        "In the table `…` stands for a value.",
        "",
        "| action | level | meaning |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {level} | {_escaped(meaning)} |" for name, (level, meaning) in actions().items()),
        "",
        *_SPANS,
        "",
        "## Metrics",
        "",
        "`/metrics` (Prometheus) and OTLP have the same metrics. Over OTLP some names differ: counters have no",
        "`_total`, `error_code` is `error.type`, `host` is `server.address`, `project` is `commonground.project.id`",
        "and `tool` is `openapi_tool.built_in`. An empty label is omitted. A metric that has no value yet is not sent",
        "over OTLP.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
        *map(_row, ALL),
        *_PICTURES,
    ]
    return "\n".join(lines) + "\n"


_SPANS = """\
## Spans

If `telemetry.otlp_endpoint` is set, spans are exported there, named by OpenTelemetry's conventions. All of them belong
to the trace that the kernel began.

| span | kind | what it is, and its attributes |
| --- | --- | --- |
| `execute_tool NAME` | consumer | the call, from the command's arrival on; child of the kernel's span; {call} |
| `queue` | consumer | from the arrival to the beginning of the run; {queue} |
| `load`, `commit` | client | the two SQL statements of a call; `db.system.name` |
| `wait for permit` | internal | each wait for a permit of `limits` |
| `GET`, `POST` | client | each upstream request; {request}; no `url.full`, which would contain the query or the page |
| `send wakeup` | producer | the doorbell; {doorbell} |

All other spans are children of `execute_tool`. A command that is dead-lettered before its rows were loaded has no span;
`openapi-tool inspect` shows it.""".format(
    call="`gen_ai.operation.name`, `gen_ai.tool.name`, `gen_ai.tool.type`, `gen_ai.tool.call.id`, `gen_ai.agent.id`, "
    "`commonground.project.id`, `commonground.turn.id`, `openapi_tool.built_in`, `openapi_tool.status`, "
    "`openapi_tool.tokens`, `openapi_tool.requests`, `openapi_tool.cached`, `openapi_tool.truncated`, "
    "`openapi_tool.delivery_attempt`, `error.type`",
    queue="`messaging.system`, `messaging.operation.name`, `messaging.operation.type`, "
    "`messaging.destination.template`",
    request="`http.request.method`, `server.address`, `server.port`, `url.scheme`, `http.response.status_code`, "
    "`http.request.resend_count`, `error.type`",
    doorbell="`messaging.system`, `messaging.operation.name`, `messaging.operation.type`, `messaging.destination.name`",
).splitlines()


def _row(metric: Described) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    return f"| `{name}` | {metric.kind} | {_labels(metric.labels)} | {_escaped(metric.text)} |"


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


TOOLS_PAGE = Path(__file__).parent.parent / "docs" / "tools.md"
_LIMITS = (("minLength", "maxLength", "characters"), ("minItems", "maxItems", "items"), ("minimum", "maximum", ""))


def with_parts(path: Path) -> str:
    """Return a document with its generated parts updated. Raises ValueError if the marks of a part are missing."""
    text = path.read_text(encoding="utf-8")
    for name, make in PARTS[path].items():
        head, begin, rest = text.partition(f"<!-- make docs: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"{path.relative_to(ROOT)} lacks the marks of its generated part {name}")
        text = f"{head}{begin}\n{make().strip()}\n\n{end}{tail}"
    return text


def _tools() -> str:
    return "\n\n".join(map(_tool, CATALOGUE.values()))


def _tool(tool: BuiltInTool) -> str:
    schema: Any = tool.schema()
    rows = [_argument(tool, name, rule, schema) for name, rule in schema["properties"].items()]
    tags = ", ".join(f"`{tag}`" for tag in sorted(tool.tags))
    return "\n".join(
        [
            f"### `{tool.name}`",
            "",
            tool.description,
            "",
            f"Tags: {tags}. Suggested `suspend_timeout_seconds`: {tool.suspend_timeout_s}.",
            "",
            "| argument | value | upstream | text for the model |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


def _argument(tool: BuiltInTool, name: str, rule: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    parameter = ENDPOINTS[tool.operation.name].find(name)
    upstream = f"`{parameter.name}`" if parameter and name != "timeout" else "-"
    if parameter and parameter.separator:
        upstream = f"in `{tool.operation.main_parameter}`"
    required = ", required" if name in schema.get("required", ()) else ""
    return f"| `{name}` | {_value(rule)}{required} | {upstream} | {rule['description']} |"


def _value(rule: Mapping[str, Any]) -> str:
    if "enum" in rule:
        return ", ".join(f"`{choice}`" for choice in rule["enum"])
    kind = f"array of {rule['items']['type']}" if rule["type"] == "array" else str(rule["type"])
    if "exclusiveMinimum" in rule:
        return f"{kind}, above {rule['exclusiveMinimum']:g}, at most {rule['maximum']:,.0f}"
    for low, high, unit in _LIMITS:
        if high in rule:
            least = rule[low]
            span = f"{least:,} to {rule[high]:,}" if least != rule[high] else str(least)
            return f"{kind}, {span} {unit}".rstrip()
    return f"{kind}, at least {rule['minimum']:,}" if "minimum" in rule else kind


def _operator() -> str:
    rows = [f"| `{entry.name}` | {_header(entry)} | {_hosts(entry)} |" for entry in _operator_parameters()]
    return "\n".join(["| parameter | header | operation |", "| --- | --- | --- |", *rows])


def _operator_parameters() -> Iterator[Parameter]:
    seen = set()
    for entry in (entry for endpoint in ENDPOINTS.values() for entry in endpoint.parameters):
        if not entry.model and entry.name not in seen:
            seen.add(entry.name)
            yield entry


def _header(entry: Parameter) -> str:
    return f"`{entry.header}`" if entry.header else "-"


def _hosts(entry: Parameter) -> str:
    return ", ".join(
        name for name, endpoint in ENDPOINTS.items() if entry.name in {e.name for e in endpoint.parameters}
    )


def _errors() -> str:
    kinds = sorted(_kinds(ToolError), key=lambda kind: kind.code)
    rows = [f"| `{kind.code}` | {(kind.__doc__ or '').split(chr(10))[0]} |" for kind in kinds]
    return "\n".join(["| code | means |", "| --- | --- |", *dict.fromkeys(rows)])


def _kinds(kind: type[ToolError]) -> Iterator[type[ToolError]]:
    for child in kind.__subclasses__():
        if "code" in vars(child):
            yield child
        yield from _kinds(child)


def _suffixes() -> str:
    return "\n".join(textwrap.wrap(", ".join(f"`{suffix}`" for suffix in INTERNAL_SUFFIXES), 120))


def _warnings() -> str:
    rows = [f"| `{kind}` | {text} |" for kind, text in WARNINGS.items()]
    return "\n".join(["| type | text for the model |", "| --- | --- |", *rows])


REGISTERING_PAGE = ROOT / "docs" / "registering-tools.md"
_SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("", Definition),
    ("options.", Options),
    ("options.args.", Args),
    ("options.jina.", Upstream),
)


def _keys() -> str:
    rows = [
        f"| `{place}{name}` | {'yes' if field.is_required() else ''} | {field.description} |"
        for place, section in _SECTIONS
        for name, field in section.model_fields.items()
    ]
    return "\n".join(["| key | required | meaning |", "| --- | --- | --- |", *rows])


def _keywords() -> str:
    rows = [f"| `{name}` | {field.description} |" for name, field in Schema.model_fields.items()]
    return "\n".join(["| keyword | meaning |", "| --- | --- |", *rows])


def tool_schema() -> str:
    """Return the JSON Schema of a definition's file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


PARTS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    REGISTERING_PAGE: {"keys": _keys, "keywords": _keywords},
    CHART_README: {"values": _chart_values},
    TOOLS_PAGE: {
        "tools": _tools,
        "operator": _operator,
        "errors": _errors,
        "suffixes": _suffixes,
        "warnings": _warnings,
    },
}
"""Generated parts of documents, by the names in their marks."""


TESTS = ROOT / "tests"


def claims() -> Iterator[tuple[str, str]]:
    """Yield every (requirement, test) pair that the suite claims, read from its sources."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "requirement":
                        where = f"{path.relative_to(TESTS)}::{node.name}"
                        yield from ((ast.literal_eval(argument), where) for argument in decorator.args)


def conformance() -> str:
    """Return each requirement with its source and its test modules, as Markdown."""
    modules = defaultdict(set)
    for claimed, test in claims():
        modules[claimed].add(test.partition("::")[0])
    lines = [
        "# Conformance",
        "",
        "Every requirement, and the test modules below `tests/` that show it; the tests carry its id. The headings",
        "are the sources: the kernel's protocol, Jina's API and the design of the tools for models (tool-design),",
        "each with its section, or else the design of this service. Written by `make docs` from",
        "`tests/requirements.py`; the suite fails for a requirement without a test and for a test of an unknown",
        "requirement.",
    ]
    source = ""
    for requirement in sorted(REQUIREMENTS, key=lambda requirement: requirement.source):
        if requirement.source != source:
            source = requirement.source
            lines += [
                "",
                f"## {source[0].upper()}{source[1:]}",
                "",
                "| id | requirement | tests |",
                "| --- | --- | --- |",
            ]
        tests = ", ".join(f"`{module}`" for module in sorted(modules[requirement.id]))
        lines.append(f"| `{requirement.id}` | {requirement.text} | {tests} |")
    return "\n".join(lines) + "\n"


def settings_reference() -> str:
    """Return every setting with its variable, default and meaning, as Markdown."""
    short = {target: name for name, target in SHORT_NAMES.items()}
    lines = [
        "# Settings",
        "",
        "Sources in ascending precedence: defaults, the kernel's own `config.toml` (`CG_CONFIG_TOML`), a",
        "TOML file (`OPENAPI_TOOL_CONFIG`, [sample](../config/openapi-tool.toml)), the environment, flags",
        "(`openapi-tool serve --help`). Written by `make docs` from the models.",
        "",
        "Keys of the upstream are not settings: they are environment variables that tool definitions name",
        "(`JINA_API_KEY`, and those in `secrets.allowed_env`). Instead of `NAME`, `NAME_FILE` may name a mounted file",
        "that contains the value; white space around the value and a byte order mark are ignored. It is an error to",
        "set both, or to use a character beyond ASCII. Variables are read at the start, files also when they change.",
        "`SSL_CERT_FILE` adds a CA for the upstream.",
        "",
        "The connection string of PostgreSQL may use every form that the driver, asyncpg, accepts: several hosts with",
        "ports, sockets, `[::1]`, everything in the query. Percent-encode names and passwords (`%` as `%25`, `/` as",
        "`%2F`, `?` as `%3F`, `#` as `%23`, `@` as `%40`, `[` as `%5B`, `]` as `%5D`). An ambiguous string is refused;",
        "the error contains no part of it. The variables and files that the driver also reads (`PGPORT`, `PGSSLMODE`,",
        "…, a service file, TLS files) are checked, too. Percent-encode the URLs of proxy and collector like the",
        "connection string.",
        "The NATS client decodes nothing: set a user and password with such characters as `nats.user` and",
        "`nats.password`.",
    ]
    for name, field in Settings.model_fields.items():
        section: Any = field.annotation
        lines += [
            "",
            f"## {name}",
            "",
            inspect.cleandoc(section.__doc__),
            "",
            "| key | environment | default | meaning |",
        ]
        lines.append("| --- | --- | --- | --- |")
        for key, detail in fields_of(section).items():
            variable = f"`{PREFIX}{name.upper()}__{key.upper()}`"
            if (name, key) in short:
                variable += f", `{short[name, key]}`"
            lines.append(f"| `{key}` | {variable} | {_default(detail)} | {detail.description} |")
    return "\n".join(lines) + "\n"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}) or is_dataclass(value):
        return "-"
    if isinstance(value, tuple):
        return f"`{', '.join(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def shipped_definition(tool: BuiltInTool) -> str:
    """Return the definition of a built-in tool for `config/tools`."""
    return (
        "# yaml-language-server: $schema=../tool.schema.json\n"
        f"# Written by `make docs` from openapi_tool/tools/catalogue.py.\n{as_yaml(registration(tool))}"
    )


SHIPPED = {
    ROOT / "config" / "tools" / f"{registration(tool)['tool_name']}.yaml": partial(shipped_definition, tool)
    for tool in CATALOGUE.values()
}
DOCUMENTS: dict[Path, Callable[[], str]] = {
    **SHIPPED,
    DEPENDENCIES: dependencies_page,
    CHART / "values.schema.json": values_schema,
    ROOT / "config" / "tool.schema.json": tool_schema,
    ROOT / "docs" / "internal" / "protocol-conformance.md": conformance,
    ROOT / "docs" / "settings.md": settings_reference,
    OPERATIONS_PAGE: operations_page,
    **{path: partial(with_parts, path) for path in PARTS},
}


def main() -> int:
    """Write or check every document; return 1 if a checked one is out of date."""
    stale = [
        path for path, make in DOCUMENTS.items() if not path.exists() or path.read_text(encoding="utf-8") != make()
    ]
    if "--check" in sys.argv:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(ROOT)} is stale: make docs\n")
        return int(bool(stale))
    for path in stale:
        path.write_text(DOCUMENTS[path](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
