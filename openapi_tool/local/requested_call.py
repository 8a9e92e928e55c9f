"""The call of `openapi-tool call`: checked against what the kernel has stored, and saved as the kernel would.

The kernel is the simulated one of `dev`, or a real one, whose workers would get the doorbell of the call. `dev` marks
its database and its stream, so that the two can be told apart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nats.js.errors import NoStreamResponseError, NotFoundError

from openapi_tool.local.caller import Caller
from openapi_tool.local.dev import AGENT, MARK, PROJECT, STREAM_MARK, mark_of
from openapi_tool.local.dev_state import DevError
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.nats_client.connection import outage_as_unavailable
from openapi_tool.protocol.errors import Unanswerable, Unavailable
from openapi_tool.protocol.subjects import doorbell_subject, parse_command_subject
from openapi_tool.tools.wording import first_of, short

# cg.v1r4.proj_dev.public.cmd.tool.jina.search, without wildcards and without placeholders such as {project_id}
_SUBJECT = re.compile(r"[^\s.*>{}]+(\.[^\s.*>{}]+)+")
_NAMES_SHOWN = 20
_NOT_OF_DEV = (
    "the {} was not created by `openapi-tool dev`: the call would write a card, an edge and inbox rows there, "
    "and real workers would get its doorbell; add --yes to allow it"
)


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool, and who calls it: without `project_id` or `agent_id` those of `dev`.

    `real_kernel_allowed` says that the data of the servers need not be created by `dev`.
    """

    tool_name: str
    project_id: str | None
    agent_id: str | None
    channel_id: str
    real_kernel_allowed: bool


async def save_call(caller: Caller, requested: RequestedCall, arguments: Any, nats_address: str) -> PlacedCall:
    """Subscribe to the doorbell of a call, and save the call unpublished; `nats_address` is for messages.

    Raises Unavailable if NATS refuses a request, DevError if project, agent, tool or stream do not exist; it names the
    existing ones.
    """
    created_by_dev = await mark_of(caller) == MARK
    if not created_by_dev:
        _check_for_real_kernel(requested)
    project_id, agent_id = requested.project_id or PROJECT, requested.agent_id or AGENT
    tool = await _tool(caller, project_id, requested.tool_name)
    worker_target = await _worker_target(caller, project_id, agent_id)
    ids: dict[str, Any] = {"project_id": project_id, "channel_id": requested.channel_id, "agent_id": agent_id}
    subject = _subject(caller.version, tool, ids)
    with outage_as_unavailable(nats_address):
        await _check_stream(caller, subject, real_kernel_allowed=requested.real_kernel_allowed)
    try:
        doorbell = doorbell_subject(caller.version, project_id, requested.channel_id, worker_target)
    except ValueError as error:
        raise DevError(str(error)) from None
    await caller.listen(doorbell)
    async with caller.database.transaction():  # rolled back if the database refuses anything
        return await caller.place(
            **ids,
            tool_name=requested.tool_name,
            arguments=arguments,
            subject=subject,
            after_execution=tool["after_execution"] or "suspend",
            publish=False,
        )


def _check_for_real_kernel(requested: RequestedCall) -> None:
    """Raise DevError if a call of a real kernel is not allowed, or does not say who calls."""
    if not requested.real_kernel_allowed:
        raise DevError(_NOT_OF_DEV.format("database"))
    for option, value in (("--project", requested.project_id), ("--agent", requested.agent_id)):
        if not value:
            raise DevError(f"{option} is needed, because this database was not created by `openapi-tool dev`")


async def publish_call(caller: Caller, call: PlacedCall, nats_address: str) -> None:
    """Publish the command of a saved call. Raises Unavailable if no stream stores it."""
    try:
        with outage_as_unavailable(nats_address):
            await caller.publish(call)
    except Unavailable as error:
        if isinstance(error.__cause__, NoStreamResponseError):
            raise Unavailable(f"no stream captures {call.subject}") from None
        raise


async def tools_of(caller: Caller, project_id: str) -> dict[str, Mapping[str, Any]]:
    """Return `target_subject` and `after_execution` of a project's tools, by name."""
    rows = await caller.database.fetch(
        "select tool_name, target_subject, after_execution from resource.tools where project_id = $1", project_id
    )
    return {row["tool_name"]: dict(row) for row in rows}


async def _tool(caller: Caller, project_id: str, tool_name: str) -> Mapping[str, Any]:
    tools = await tools_of(caller, project_id)
    if not tools:
        rows = await caller.database.fetch("select distinct project_id from resource.tools")
        known = _listed(row["project_id"] for row in rows)
        raise DevError(f"there is no project {short(project_id)!r} with tools; projects with tools: {known}")
    _require("tool", tool_name, project_id, tools)
    return tools[tool_name]


async def _worker_target(caller: Caller, project_id: str, agent_id: str) -> str:
    rows = await caller.database.fetch(
        "select agent_id, worker_target from resource.project_agents where project_id = $1", project_id
    )
    agents: dict[str, str] = {row["agent_id"]: row["worker_target"] for row in rows}
    _require("agent", agent_id, project_id, agents)
    return agents[agent_id]


def _require(kind: str, name: str, project_id: str, known: Collection[str]) -> None:
    if name not in known:
        raise DevError(f"project {short(project_id)!r} has no {kind} {short(name)!r}; its {kind}s: {_listed(known)}")


def _listed(names: Iterable[str]) -> str:
    return first_of(sorted(names), _NAMES_SHOWN) or "none"


def _subject(version: str, tool: Mapping[str, Any], ids: Mapping[str, str]) -> str:
    """Return the tool's subject with ids in place of the placeholders, such as {project_id}. Raises DevError."""
    subject = str(tool["target_subject"] or "")
    for name, value in ids.items():
        subject = subject.replace(f"{{{name}}}", value)
    try:
        version_of_subject = parse_command_subject(subject).version
    except Unanswerable:
        version_of_subject = None
    if version_of_subject != version or not _SUBJECT.fullmatch(subject):
        name = short(tool["tool_name"])
        raise DevError(f"{name!r} cannot be called: {short(subject)!r} is no subject of a {version} tool command")
    return subject


async def _check_stream(caller: Caller, subject: str, *, real_kernel_allowed: bool) -> None:
    jetstream = caller.client.jetstream()
    try:
        name = await jetstream.find_stream_name_by_subject(subject)
    except NotFoundError:
        raise DevError(
            f"no stream captures {short(subject)}; the kernel or an executor creates it at its start: "
            "openapi-tool top shows which executors run, openapi-tool check what they lack"
        ) from None
    if not real_kernel_allowed:
        info = await jetstream.stream_info(name)
        has_mark = STREAM_MARK.items() <= (info.config.metadata or {}).items()
        if not has_mark:
            raise DevError(_NOT_OF_DEV.format("stream"))
