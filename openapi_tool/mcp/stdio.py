"""MCP over standard input and output: one JSON message per line, of bounded size, as fast as the client reads.

The SDK's own `mcp.server.stdio` is not used: its lines have no limit, and it does not say which answers were written.
That matters for *untaken* answers: a result that was paid for is stored if its client did not get it.
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
        self._unanswered = asyncio.Semaphore(MAX_UNANSWERED)  # each request without an answer holds a permit
        self._unwritten: dict[RequestId, Answer] = {}  # answers that are stored if they cannot be written
        self._write_failed = asyncio.Event()  # the client has closed its end

    def on_answer(self, request_id: RequestId, answer: Answer) -> None:
        """Remember an answer until it is written."""
        if answer.result_name is not None:  # else it must not be stored, or cost nothing
            self._unwritten[request_id] = answer

    @asynccontextmanager
    async def streams(self, stop: asyncio.Event) -> AsyncIterator[tuple[Any, _Output]]:
        """Yield the stream of the client's messages and the stream for the server's.

        The first one ends with the input, after a failed write, or once `stop` is set.
        """
        send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        reading = asyncio.create_task(self._read(send), name="stdin")
        stopped = asyncio.create_task(stop.wait())
        write_failed = asyncio.create_task(self._write_failed.wait())

        async def close_at_end() -> None:
            await asyncio.wait([reading, stopped, write_failed], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await send.aclose()

        closing = asyncio.create_task(close_at_end(), name="end of stdin")
        try:
            yield receive, _Output(self)
        finally:
            for task in (reading, closing, stopped, write_failed):
                task.cancel()
            send.close()
            for answer in self._unwritten.values():
                self._untaken(answer)

    async def _read(self, send: Any) -> None:
        """Pass the client's messages to the stream `send` until the input ends."""
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(self._reader, self._next_line):
            message = await self._parsed(line)
            if message is None:
                continue
            metadata = None
            if isinstance(message, JSONRPCRequest):
                await self._unanswered.acquire()
                # The SDK calls this if it will send no answer.
                metadata = ServerMessageMetadata(on_request_unanswered=partial(self._on_unanswered, message.id))
            try:
                await send.send(SessionMessage(message, metadata))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # the server has ended
                return

    def _next_line(self) -> bytes:
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
            first, *_ = error.errors(include_url=False, include_input=False)
            code, problem = INVALID_REQUEST, "the line is no JSON-RPC message"
            if first["type"] == "json_invalid":
                code, problem = PARSE_ERROR, "the line is no JSON"
            await self._refuse(code, f"{problem}; send one JSON object per line")
            return None
        # A request whose id is wrong is parsed as a notification.
        problem = problem_of(line) if isinstance(message, JSONRPCNotification) else ""
        if problem:
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
        answer = self._unwritten.pop(request_id, None)
        if answer is not None:
            self._untaken(answer)

    async def write(self, message: Any) -> None:
        """Write a message. Raises anyio.BrokenResourceError if the client has closed its end."""
        # An error may have the id null. `exclude_unset` keeps it in the message, as `exclude_none` would not.
        data = message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write, data)
        except OSError as error:
            self._write_failed.set()
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
            self._unwritten.pop(message.id, None)


class _Output:
    """Stream to which the SDK's server writes its messages, with the methods that the SDK calls."""

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
    os.dup2(null, _STDIN)  # standard input is empty now
    os.close(null)
    os.dup2(_STDERR, _STDOUT)  # what is printed goes to standard error
    for descriptor in (source, sink):  # the client may have made its pipes non-blocking
        os.set_blocking(descriptor, True)
    return os.fdopen(source, "rb"), sink
