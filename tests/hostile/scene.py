"""What an attacker can do: one project's commands, calls and definitions; and what it can be seen to have done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Any

import orjson
from nats.js.errors import NotFoundError

from openapi_tool.bus.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import STREAM, Answer, Caller, PlacedCall
from openapi_tool.protocol.subject import default_durable
from tests.hostile.stage import Stage

PROJECT, AGENT = "proj_attacker", "agent_attacker"
DURABLE = default_durable("v1r4", "jina")
SUBJECT = f"cg.v1r4.{PROJECT}.public.cmd.tool.jina.search"
ANSWER_S = 20.0
_POLL_S = 0.01
_NUMBERS = count()
_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"protocol":1,"lang":"raw","version":"0"}\r\n'


def hpub(subject: bytes, headers: bytes | None, data: bytes = b"{}") -> bytes:
    """A frame of the NATS protocol, whatever is in it; with `headers` None it has none."""
    if headers is None:
        return b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(headers), len(headers) + len(data), headers, data)


class Scene:
    """One attacker beside the stage; `name` makes what it defines its own."""

    def __init__(self, stage: Stage, caller: Caller) -> None:
        self.stage = stage
        self.caller = caller
        self._letters_from = 0

    @classmethod
    async def open(cls, stage: Stage, caller: Caller) -> Scene:
        """An attacker with a project, and everything forgotten that was before."""
        await caller.furnish(PROJECT, AGENT, [])
        await caller.listen(f"cg.v1r4.{PROJECT}.*.cmd.agent.*.wakeup")
        scene = cls(stage, caller)
        scene._letters_from = await scene.last_letter()
        stage.begin()
        return scene

    # Definitions and calls

    async def define(self, options: Any = None, parameters: Any = None, name: str = "") -> str:
        """Store a definition, past the linter; its name."""
        name = name or f"tool_{next(_NUMBERS)}"
        tool = {
            "tool_name": name,
            "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.x",
            "options": {"jina": {"mode": "search"}} if options is None else options,
            "parameters": {} if parameters is None else parameters,
        }
        await self.caller.add_tool(PROJECT, tool)
        return name

    async def define_text(self, options: str | None = None, parameters: str = "{}") -> str:
        """The same from JSON texts, which may hold what no library would write."""
        name = await self.define()
        await self.caller.database.execute(
            "update resource.tools set options = coalesce($3::text::jsonb, options), parameters = $4::text::jsonb "
            "where project_id = $1 and tool_name = $2",
            PROJECT,
            name,
            options,
            parameters,
        )
        return name

    async def place(self, tool: str, arguments: Any, **changes: Any) -> PlacedCall:
        """Rows and command of a call."""
        return await self.caller.place(PROJECT, AGENT, tool, arguments, **changes)

    async def call_text(self, tool: str, arguments: str) -> Answer:
        """A call whose arguments are a JSON text, answered."""
        call = await self.place(tool, {}, publish=False)
        await self.caller.database.execute(
            "update cards set content = jsonb_set(content, '{arguments}', $2::text::jsonb) where card_id = $1",
            call.card_id,
            arguments,
        )
        await self.caller.publish(call)
        return await self.caller.answer(call, ANSWER_S)

    async def call(self, tool: str, arguments: Any, answer_s: float = ANSWER_S, **changes: Any) -> Answer:
        """A call, answered. Raises TimeoutError."""
        return await self.caller.answer(await self.place(tool, arguments, **changes), answer_s)

    async def calls(self, number: int, tool: str, arguments: Any, answer_s: float = ANSWER_S) -> list[Answer]:
        """So many calls at once; `{n}` in a text argument is each one's own number."""
        return await asyncio.gather(*(self.call(tool, _numbered(arguments), answer_s) for _ in range(number)))

    async def search(self, query: str, **jina: Any) -> Answer:
        """A call of a search tool of its own."""
        tool = await self.define({"jina": {"mode": "search", **jina}})
        return await self.call(tool, {"query": query})

    async def read(self, arguments: Mapping[str, Any] | str, **options: Any) -> Answer:
        """A call of a reader tool of its own."""
        given = {"url": arguments} if isinstance(arguments, str) else dict(arguments)
        many = {"tool": "jina.read_many"} if "urls" in given else {}
        tool = await self.define({"jina": {"mode": "reader", **many}, **options})
        return await self.call(tool, given)

    # Raw frames

    async def publish_raw(self, *frames: bytes) -> bytes:
        """Send frames as they are; what the server says until it has read all of them (an -ERR closes)."""
        host, _, port = self.stage.stack.nats.url.removeprefix("nats://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        said = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                await reader.readline()
                writer.write(_CONNECT)
                for frame in frames:
                    writer.write(frame)
                    await writer.drain()
                writer.write(b"PING\r\n")
                while not said.endswith(b"PONG\r\n") and (line := await reader.readline()):
                    said += line
        finally:
            writer.close()
        return said

    # What there is to see

    async def settled(self) -> None:
        """Wait until no command is left of those that are there now. Raises TimeoutError."""
        jetstream = self.caller.client.jetstream()
        last = (await jetstream.stream_info(STREAM)).state.last_seq
        async with asyncio.timeout(ANSWER_S):
            while True:
                info = await jetstream.consumer_info(STREAM, DURABLE)
                if not info.num_pending and not info.num_ack_pending:
                    return
                if info.ack_floor and info.ack_floor.stream_seq >= last:  # others go on sending
                    return
                await asyncio.sleep(_POLL_S)

    async def letters(self, at_least: int = 1) -> list[dict[str, Any]]:
        """The records of dead letters that have come, once there are `at_least` so many. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while (last := await self.last_letter()) < self._letters_from + at_least:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_POLL_S)
        jetstream = self.caller.client.jetstream()
        messages = [await jetstream.get_msg(DEAD_LETTERS, n) for n in range(self._letters_from + 1, last + 1)]
        return [orjson.loads(message.data or b"") for message in messages]

    async def last_letter(self) -> int:
        """The place of the last record; 0 where there is none."""
        try:
            return int((await self.caller.client.jetstream().stream_info(DEAD_LETTERS)).state.last_seq)
        except NotFoundError:
            return 0

    def sent(self) -> bytes:
        """What the upstream has received of attackers."""
        return self.stage.received()

    def log(self) -> str:
        """What the executor has logged."""
        return self.stage.log_text()


def _numbered(arguments: Any) -> Any:
    number = str(next(_NUMBERS))
    if not isinstance(arguments, dict):
        return arguments
    return {name: text.replace("{n}", number) if isinstance(text, str) else text for name, text in arguments.items()}


def content_of(answer: Answer) -> Mapping[str, Any]:
    """The content of an answer's card."""
    content: Mapping[str, Any] = answer.card["content"]
    return content


def assert_failed(answer: Answer, *codes: str) -> str:
    """The message of a typed failure, which is short enough for a model."""
    content = content_of(answer)
    assert content["status"] != "success", content
    error = content["error"]
    assert error["code"] in codes, error
    assert len(error["message"]) < 6_000, len(error["message"])
    assert len(orjson.dumps(content)) < 64_000, len(orjson.dumps(content))
    return str(error["message"])


def assert_succeeded(answer: Answer) -> str:
    """The text of a success."""
    content = content_of(answer)
    assert content["status"] == "success", content["error"]
    return str(content["result"])
