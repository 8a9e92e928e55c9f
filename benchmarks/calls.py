"""Rows and commands of calls as the kernel makes them, created in bulk before the measurement."""

from __future__ import annotations

import itertools
import secrets
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import asyncpg
import orjson

from benchmarks.double import unique_query
from openapi_tool.local.caller import WORKER_TARGET
from openapi_tool.local.placed_call import SENDER, VERSION

Tool = Literal["search", "reader"]
NAMES: dict[Tool, str] = {"search": "jina_search", "reader": "jina_reader"}
AGENT, CHANNEL = "agent_bench", "public"
SUSPEND_TIMEOUT_S = 900
_NUMBERS = itertools.count()
_COLUMNS = {
    "cards": ("card_id", "tenant_id", "content", "tool_call_id", "metadata"),
    "agent_inbox": (
        *("inbox_id", "project_id", "agent_id", "channel_id", "message_type", "enqueue_mode", "correlation_id"),
        *("agent_turn_id", "turn_epoch", "context_headers", "payload", "status"),
    ),
    "execution_edges": (
        *("edge_id", "project_id", "channel_id", "primitive", "edge_phase", "source_agent_id"),
        *("source_agent_turn_id", "source_step_id", "target_agent_id", "target_agent_turn_id", "correlation_id"),
        *("recursion_depth", "trace_id"),
    ),
}
_SCHEMAS = {"cards": "public", "agent_inbox": "state", "execution_edges": "state"}


@dataclass(frozen=True, slots=True)
class Ask:
    """Kind of calls: tool, delay in milliseconds and size in bytes of the upstream's response, and their projects.

    `projects` is the number of projects, `first` the number of the first one.
    """

    tool: Tool = "search"
    delay_ms: int = 50
    size: int = 2_000
    projects: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """One command to be published; its doorbell carries `turn_id`."""

    turn_id: str
    subject: str
    headers: dict[str, str]
    data: bytes


async def set_up_projects(database: asyncpg.Connection, projects: int) -> None:
    """Add projects, each with its own agent, search tool and reader tool."""
    ids = [project_id(number) for number in range(projects)]
    await database.executemany(
        "insert into public.projects (project_id, title, owner_id) values ($1, $1, 'owner') on conflict do nothing",
        [(project,) for project in ids],
    )
    await database.executemany(
        "insert into resource.project_agents (project_id, agent_id, profile_box_id, worker_target) "
        "values ($1, $2, $3, $4) on conflict do nothing",
        [(project, AGENT, uuid.uuid4(), WORKER_TARGET) for project in ids],
    )
    await database.executemany(
        "insert into resource.tools (project_id, tool_name, description, parameters, target_subject, "
        "after_execution, options) values ($1, $2, $3, $4, $5, 'suspend', $6) on conflict do nothing",
        [definition for project in ids for definition in _definitions(project)],
    )


def project_id(number: int) -> str:
    """Return the name of a project."""
    return f"proj_bench_{number}"


def _definitions(project: str) -> Iterator[tuple[Any, ...]]:
    """Return both tools' definitions, with schema, default and time limit."""
    arguments: dict[Tool, Any] = {
        "search": {"query": {"type": "string"}, "count": {"type": "integer", "minimum": 1, "maximum": 20}},
        "reader": {"url": {"type": "string"}},
    }
    for mode, properties in arguments.items():
        schema = {"type": "object", "additionalProperties": False, "properties": properties}
        schema["required"] = [next(iter(properties))]
        defaults = {"count": 5} if mode == "search" else {}
        options = {"jina": {"mode": mode}, "args": {"defaults": defaults}, "suspend_timeout_seconds": SUSPEND_TIMEOUT_S}
        subject = f"cg.{VERSION}.{{project_id}}.{{channel_id}}.cmd.tool.jina.{mode}"
        yield project, NAMES[mode], f"The {mode} tool of {project}.", schema, subject, options


async def place(
    database: asyncpg.Connection, ask: Ask, count: int, target: str, *, analyze: bool = True
) -> list[Command]:
    """Write the rows of calls for the executor of `target`; return their commands, not yet published.

    `analyze` updates the planner's statistics, which takes longer the more rows there are.
    """
    calls = [_Call(ask, number, target) for number in range(count)]
    rows: dict[str, Sequence[tuple[Any, ...]]] = {
        "cards": [call.card() for call in calls],
        "agent_inbox": [call.anchor() for call in calls],
        "execution_edges": [call.edge() for call in calls],
    }
    for table, records in rows.items():
        await database.copy_records_to_table(
            table, schema_name=_SCHEMAS[table], columns=_COLUMNS[table], records=records
        )
        if analyze:
            await database.execute(f"analyze {_SCHEMAS[table]}.{table}")
    return [call.command() for call in calls]


class _Call:
    """One call, before its rows and command are created."""

    def __init__(self, ask: Ask, number: int, target: str) -> None:
        query = unique_query(ask.delay_ms, ask.size, next(_NUMBERS))
        self.project = project_id(ask.first + number % ask.projects)
        self.arguments = {"query": query} if ask.tool == "search" else {"url": f"https://example.com/{query}"}
        self.tool = NAMES[ask.tool]
        self.subject = f"cg.{VERSION}.{self.project}.{CHANNEL}.cmd.tool.{target}.{ask.tool}"
        self.card_id, self.trace_id = uuid.uuid4().hex, secrets.token_hex(16)
        self.turn_id, self.step_id, self.call_id = (f"{kind}_{uuid.uuid4().hex}" for kind in ("turn", "step", "tc"))
        self.context = {
            "CG-Project-Id": self.project,
            "CG-Channel-Id": CHANNEL,
            "CG-Agent-Id": AGENT,
            "CG-Turn-Id": self.turn_id,
            "CG-Turn-Epoch": "1",
            "CG-Step-Id": self.step_id,
            "CG-Tool-Call-Id": self.call_id,
            "CG-Recursion-Depth": "0",
            "traceparent": f"00-{self.trace_id}-{secrets.token_hex(8)}-01",
        }

    def command(self) -> Command:
        publisher = {"CG-Timestamp": "0", "CG-Version": VERSION, "CG-Msg-Type": "dict", "CG-Sender": SENDER}
        body = {"tool_call_card_id": self.card_id, "tool_name": self.tool, "after_execution": "suspend"}
        return Command(self.turn_id, self.subject, self.context | publisher, orjson.dumps(body))

    def card(self) -> tuple[Any, ...]:
        content = {
            "__type__": "ToolCallContent",
            "status": "called",
            "tool_name": self.tool,
            "arguments": self.arguments,
            "target_subject": self.subject,
        }
        metadata = {
            "type": "tool.call",
            "project_id": self.project,
            "author_id": AGENT,
            "created_at": "2026-01-01T00:00:00+00:00",
            "agent_turn_id": self.turn_id,
            "tool_call_id": self.call_id,
            "step_id": self.step_id,
            "trace_id": self.trace_id,
        }
        return self.card_id, self.project, content, self.call_id, metadata

    def anchor(self) -> tuple[Any, ...]:
        payload = {"kind": "command_anchor", "subject": self.subject, "correlation_id": self.call_id}
        row = (f"inbox_{uuid.uuid4().hex}", self.project, AGENT, CHANNEL, "command_anchor", "call", self.call_id)
        return *row, self.turn_id, 1, self.context, payload, "consumed"

    def edge(self) -> tuple[Any, ...]:
        row = (f"edge_{uuid.uuid4().hex}", self.project, CHANNEL, "tool_call", "request", AGENT, self.turn_id)
        return *row, self.step_id, AGENT, self.turn_id, self.call_id, 0, self.trace_id
