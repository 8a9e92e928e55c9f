"""An upstream that answers with prepared bytes, as a process: HTTPS on loopback for both hosts.

A request that contains `attack-NAME` gets the bytes of the file NAME in its folder: a complete HTTP response, sent
unchanged. Then follow the contents of NAME.late after a moment, of NAME.endless repeatedly, and of NAME.drip once a
second, until the client disconnects. A request that contains `victim-MS` gets a normal response after that many
milliseconds, any other one at once. Attackers' requests, Authorization included, are appended to the file `received`,
and a line after each late response.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import ssl
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import orjson

from openapi_tool.local.recordings import load_recordings

RECEIVED, LATE = "received", b"(something late was sent)"
_NAMED = re.compile(rb"attack-([a-z0-9_]+)")
_DELAY = re.compile(rb"victim-(\d+)")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"\r\n\r\n"
_SLICE_BYTES = 256 * 1024
_LATE_S = 0.05
_DRIP_S = 1.0
_HEAD_BYTES = 64 * 1024
_RECORDINGS = {True: "s-post-json", False: "r-ok-json"}  # by whether the request is a search


def response(body: bytes, status: int = 200, headers: str = "", *, chunked: bool = False) -> bytes:
    """Return a complete HTTP response; `headers` are lines ending with CRLF."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\n{length}\r\n{headers}\r\n".encode()
    return head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


@cache
def ordinary(*, search: bool) -> bytes:
    """Return a recorded response."""
    body = orjson.loads(load_recordings()[_RECORDINGS[search]].body)
    return response(orjson.dumps(body))


class _Upstream:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}
        self._late: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client disconnects."""
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(_END)
                length = _LENGTH.search(head)
                request = head + await reader.readexactly(int(length[1]) if length else 0)
                await self._answer(request, writer)
        writer.close()

    async def _answer(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        named, delay = _NAMED.search(request), _DELAY.search(request)
        if delay is None:
            self._note(request)
        await asyncio.sleep(int(delay[1]) / 1000 if delay else 0)
        whole = self._file(named[1].decode()) if named else ordinary(search=b"s.jina.ai" in request)
        for start in range(0, len(whole), _SLICE_BYTES):
            writer.write(whole[start : start + _SLICE_BYTES])
            await writer.drain()
        if named:
            await self._send_rest(named[1].decode(), writer)

    async def _send_rest(self, name: str, writer: asyncio.StreamWriter) -> None:
        """Send what follows the response."""
        if late := self._file_if_exists(f"{name}.late"):
            task = asyncio.create_task(self._send_late(late, writer))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        for kind, wait_s in (("endless", 0.0), ("drip", _DRIP_S)):
            while more := self._file_if_exists(f"{name}.{kind}"):
                await asyncio.sleep(wait_s)
                writer.write(more)
                await writer.drain()

    async def _send_late(self, late: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(_LATE_S)
        writer.write(late)
        await writer.drain()
        self._note(LATE)

    def _note(self, line: bytes) -> None:
        with (self._folder / RECEIVED).open("ab") as received:
            received.write(line + b"\n")

    def _file_if_exists(self, name: str) -> bytes:
        return self._file(name) if (self._folder / name).exists() else b""

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            self._files[name] = (self._folder / name).read_bytes()
        return self._files[name]


async def _listen(folder: Path, certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    serve = _Upstream(folder).serve
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls, limit=_HEAD_BYTES, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    """Serve until killed; print the port once it is open."""
    parser = argparse.ArgumentParser(description="An upstream that answers with prepared bytes.")
    parser.add_argument("--folder", type=Path, required=True, help="prepared responses, by name")
    parser.add_argument("--certificate", type=Path, required=True, help="PEM file with key and chain")
    arguments = parser.parse_args()
    asyncio.run(_listen(arguments.folder, arguments.certificate))


if __name__ == "__main__":
    main()
