"""Double of the kernel's management API, and the world of these tests."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import orjson
import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from tests.wire.conftest import World, open_world


@pytest.fixture
async def world_without_executor(stack: EmbeddedStack, caller: Caller, database: str) -> AsyncIterator[World]:
    """World without the executor."""
    async with open_world(stack, caller, database) as world:
        yield world


RESERVED = {"delegate_async", "launch_principal", "ask_expert", "fork_join", "provision_agent"}
COLUMNS = "project_id, tool_name, description, parameters, target_subject, after_execution, options"
SELECT = f"select {COLUMNS} from resource.tools where project_id = $1"  # noqa: S608 - constants only
UPSERT = f"""
insert into resource.tools ({COLUMNS}) values ($1, $2, $3, $4, $5, $6, $7)
on conflict (project_id, tool_name) do update set description = excluded.description,
parameters = excluded.parameters, target_subject = excluded.target_subject,
after_execution = excluded.after_execution, options = excluded.options returning *
"""  # noqa: S608 - constants only
Handler = Callable[[asyncpg.Connection, Request], Awaitable[Response]]


def refused(status: int, code: str, message: str) -> Response:
    return JSONResponse({"detail": {"error_code": code, "error_message": message}}, status)


def array_without_items(schema: Any) -> bool:
    if isinstance(schema, dict):
        return (schema.get("type") == "array" and "items" not in schema) or any(
            map(array_without_items, schema.values())
        )
    return isinstance(schema, list) and any(map(array_without_items, schema))


def problem_of(tool: dict[str, Any]) -> str | None:
    subject = tool.get("target_subject") or ""
    if tool.get("tool_name") in RESERVED:
        return "tool_name is reserved"
    if tool.get("after_execution") not in ("suspend", "terminate"):
        return "after_execution must be suspend or terminate"
    if ".cmd.tool." not in subject or ".cmd.sys." in subject:
        return "target_subject must contain .cmd.tool."
    return "arrays need items" if array_without_items(tool.get("parameters")) else None


async def post(database: asyncpg.Connection, request: Request) -> Response:
    async with request.form() as form:
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            missing = {"loc": ["body", "file"], "msg": "Field required", "type": "missing"}
            return JSONResponse({"detail": [missing]}, 422)
        tool = yaml.safe_load(await upload.read())
    tool.setdefault("tool_name", tool.pop("name", None))
    problem = problem_of(tool)
    if problem:
        return refused(400, "bad_request", problem)
    row = await database.fetchrow(
        UPSERT,
        request.path_params["project"],
        tool["tool_name"],
        tool.get("description"),
        tool.get("parameters") or {},
        tool["target_subject"],
        tool["after_execution"],
        tool.get("options") or {},
    )
    return JSONResponse(dict(row), 201)


async def get_all(database: asyncpg.Connection, request: Request) -> Response:
    limit, offset = int(request.query_params.get("limit", 50)), int(request.query_params.get("offset", 0))
    rows = await database.fetch(
        f"{SELECT} order by tool_name limit $2 offset $3",
        request.path_params["project"],
        limit,
        offset,
    )
    return JSONResponse([dict(row) for row in rows])


async def get_one(database: asyncpg.Connection, request: Request) -> Response:
    row = await _row(database, request)
    return JSONResponse(dict(row)) if row else refused(404, "not_found", "tool not found")


async def delete(database: asyncpg.Connection, request: Request) -> Response:
    row = await _row(database, request)
    if request.path_params["tool"] in RESERVED or (row and ".cmd.tool." not in row["target_subject"]):
        return refused(400, "bad_request", "not an external tool")
    if row is None:
        return refused(404, "not_found", "tool not found")
    await database.execute(
        "delete from resource.tools where project_id = $1 and tool_name = $2", row["project_id"], row["tool_name"]
    )
    return Response(status_code=204)


async def _row(database: asyncpg.Connection, request: Request) -> Any:
    return await database.fetchrow(
        f"{SELECT} and tool_name = $2",
        request.path_params["project"],
        request.path_params["tool"],
    )


def application(dsn: str) -> Starlette:
    def connected(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            database = await asyncpg.connect(dsn)
            try:
                await database.set_type_codec(
                    "jsonb", schema="pg_catalog", encoder=lambda v: orjson.dumps(v).decode(), decoder=orjson.loads
                )
                project = request.path_params["project"]
                if project == "proj_broken":
                    return refused(500, "internal_error", "something broke")
                if not await database.fetchval("select true from public.projects where project_id = $1", project):
                    return refused(404, "not_found", "project not found")
                return await handler(database, request)
            finally:
                await database.close()

        return handle

    one, every = "/projects/{project}/tools/{tool}", "/projects/{project}/tools"
    return Starlette(
        routes=[
            Route(every, connected(post), methods=["POST"]),
            Route(every, connected(get_all), methods=["GET"]),
            Route(one, connected(get_one), methods=["GET"]),
            Route(one, connected(delete), methods=["DELETE"]),
        ]
    )


@contextmanager
def served(dsn: str) -> Iterator[str]:
    """Serve the API in a thread, and yield its URL."""
    server = uvicorn.Server(
        uvicorn.Config(application(dsn), port=0, log_config=None, access_log=False, lifespan="off", ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
