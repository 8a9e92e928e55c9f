"""MCP over standard input and output: one JSON message per line, of bounded size, as fast as the client reads.

Not `mcp.server.stdio`: its lines have no limit, and it does not say which answers were written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from io import BufferedReader
from types import TracebackType
from typing import Any, Self

import anyio
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from openapi_tool.gateway.call import Answer
from openapi_tool.mcp.messages import problem_of

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**20
"""Largest message: four times the largest arguments.

The size is bounded since a message is parsed in the event loop, and its values take many times its size in memory.
"""

MAX_UNANSWERED = 256
"""So many requests may be without an answer. Then nothing more is read, until the client has read some answers."""


_STDIN, _STDOUT, _STDERR = 0, 1, 2  # file descriptors


class StdioTransport:
    """Streams for `Server.run` of the SDK.

    It reads lines from `source` and writes to the file descriptor `sink`. `untaken` gets the answers that could not be
    written, or were not sent because the client had cancelled the call.
    """

    def __init__(self, source: BufferedReader, sink: int, untaken: Callable[[Answer], None]) -> None:
        self._source = source
        self._sink = sink
        self._untaken = untaken
        # Each has its own thread, which the client may block until the process ends.
        self._reader = ThreadPoolExecutor(1, "stdin")
        self._writer = ThreadPoolExecutor(1, "stdout")
        self._unanswered = asyncio.Semaphore(MAX_UNANSWERED)  # one permit for each request without an answer
        self._answers: dict[RequestId, Answer] = {}  # to be written, of those that may be stored
        self._failed = asyncio.Event()  # a write failed: the client has closed its end

    def on_answer(self, request_id: RequestId, answer: Answer) -> None:
        """Remember an answer until it is written."""
        if answer.result_name is not None:
            self._answers[request_id] = answer

    @asynccontextmanager
    async def streams(self, stop: asyncio.Event) -> AsyncIterator[tuple[Any, _Output]]:
        """Yield the stream of the client's messages and the stream for the server's.

        The first one ends with the input, after a failed write, or once `stop` is set.
        """
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        reading = asyncio.create_task(self._read(send), name="stdin")
        ending = [asyncio.create_task(event.wait()) for event in (stop, self._failed)]

        async def end() -> None:
            await asyncio.wait([reading, *ending], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await send.aclose()

        closing = asyncio.create_task(end(), name="end of stdin")
        try:
            yield receive, _Output(self)
        finally:
            for task in (reading, closing, *ending):
                task.cancel()
            send.close()
            for answer in self._answers.values():
                self._untaken(answer)

    async def _read(self, send: Any) -> None:
        """Pass the client's messages to the stream `send` until the input ends."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(self._reader, self._line):
            message = await self._parsed(line)
            if message is None:
                continue
            metadata = None
            if isinstance(message, JSONRPCRequest):
                await self._unanswered.acquire()
                metadata = ServerMessageMetadata(on_request_unanswered=partial(self._on_unanswered, message.id))
            try:
                await send.send(SessionMessage(message, metadata))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    def _line(self) -> bytes:
        """Return the next line, empty at the end of the input.

        Of a line that is too long return the beginning, with more than `MAX_LINE_BYTES`, and skip the rest.
        """
        line = self._source.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            self._skip_line()
        return line

    def _skip_line(self) -> None:
        """Read to the end of the line, or of the input."""
        while True:
            part = self._source.readline(MAX_LINE_BYTES)
            if not part or part.endswith(b"\n"):
                return

    async def _parsed(self, line: bytes) -> Any:
        """Return the message of a line. A line that is no message is answered here; then return None."""
        if not line.strip():
            return None
        if len(line) > MAX_LINE_BYTES:
            await self._refuse(INVALID_REQUEST, f"the message is larger than {MAX_LINE_BYTES:,} bytes; send less")
            return None
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError as error:
            is_json = error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid"
            code = INVALID_REQUEST if is_json else PARSE_ERROR
            problem = "the line is no JSON-RPC message" if is_json else "the line is no JSON"
            await self._refuse(code, f"{problem}; send one JSON object per line")
            return None
        if isinstance(message, JSONRPCNotification) and (problem := problem_of(line)):
            await self._refuse(INVALID_REQUEST, problem)
            return None
        return message

    async def _refuse(self, code: int, problem: str) -> None:
        """Answer a line that is no message. The answer has no id: one in the line may be of another request."""
        log.warning("refused a message of the client: %s", problem, extra={"action": "mcp.message_refused"})
        error = ErrorData(code=code, message=problem)
        await self.write(JSONRPCError(jsonrpc="2.0", id=None, error=error))

    async def _on_unanswered(self, request_id: RequestId) -> None:
        """Take note that the SDK will send no answer, since the client has cancelled the request."""
        self._unanswered.release()
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._untaken(answer)

    async def write(self, message: Any) -> None:
        """Write a message. Raises anyio.BrokenResourceError if the client has closed its end."""
        # An error may have the id null. `exclude_unset` keeps it in the message, as `exclude_none` would not.
        data = message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write, data)
        except OSError as error:
            self._failed.set()
            raise anyio.BrokenResourceError from error

    def _write(self, data: bytes) -> None:
        """Write all bytes; blocks while the client does not read. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]

    async def send(self, item: SessionMessage) -> None:
        """Write a message of the server. An answer that has been written counts as taken."""
        message = item.message
        if not isinstance(message, JSONRPCResponse | JSONRPCError):
            await self.write(message)
            return
        try:
            await self.write(message)
        finally:
            self._unanswered.release()
        if message.id is not None:
            self._answers.pop(message.id, None)


class _Output:
    """Stream to which the SDK's server writes its messages."""

    def __init__(self, transport: StdioTransport) -> None:
        self._transport = transport

    async def send(self, item: SessionMessage, /) -> None:
        await self._transport.send(item)

    async def aclose(self) -> None:
        """Do nothing: the process ends soon."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing."""


def claim_standard_streams() -> tuple[BufferedReader, int]:
    """Return the client's pipes: a file to read from, and a file descriptor to write to.

    Whatever else in this process reads standard input then finds it empty, and prints to standard error: only messages
    reach the client.
    """
    source = os.dup(sys.stdin.fileno())
    sink = os.dup(sys.stdout.fileno())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)
    os.dup2(_STDERR, _STDOUT)
    for descriptor in (source, sink):
        os.set_blocking(descriptor, True)
    return os.fdopen(source, "rb"), sink
