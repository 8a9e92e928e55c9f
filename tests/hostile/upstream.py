"""An upstream that answers with prepared bytes, as a process: HTTPS on loopback for both hosts.

A request that holds `attack-NAME` gets the bytes of the file NAME in its folder, which are a whole HTTP response, sent
as they are. One that holds `victim-MS` gets an ordinary answer after so many milliseconds, any other one at once. What
an attacker's calls sent, Authorization included, is appended to the file `received`.
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

RECEIVED = "received"
_NAMED = re.compile(rb"attack-([a-z0-9_]+)")
_DELAY = re.compile(rb"victim-(\d+)")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"\r\n\r\n"
_SLICE_BYTES = 256 * 1024
_HEAD_BYTES = 64 * 1024
_RECORDINGS = {True: "s-post-json", False: "r-ok-json"}


def response(body: bytes, status: int = 200, headers: str = "", *, chunked: bool = False) -> bytes:
    """A whole HTTP response; a chunked one does not say how long it is. `headers` are lines ending with CRLF."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\n{length}\r\n{headers}\r\n".encode()
    return head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


@cache
def ordinary(*, search: bool) -> bytes:
    """A recorded answer."""
    body = orjson.loads(load_recordings()[_RECORDINGS[search]].body)
    return response(orjson.dumps(body))


class _Upstream:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request after the other until the other side has gone."""
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
            with (self._folder / RECEIVED).open("ab") as received:
                received.write(request + b"\n")
        await asyncio.sleep(int(delay[1]) / 1000 if delay else 0)
        whole = self._file(named[1].decode()) if named else ordinary(search=b"s.jina.ai" in request)
        for start in range(0, len(whole), _SLICE_BYTES):
            writer.write(whole[start : start + _SLICE_BYTES])
            await writer.drain()

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
