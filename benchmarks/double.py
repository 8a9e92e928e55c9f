"""Minimal double of the upstream for load: HTTP/1.1 over TLS, responses of any size after any delay.

Each request names the wanted response as `bench-<delay ms>-<bytes>`; its first occurrence counts. The
double checks nothing else, unlike `openapi_tool.local.double`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import ssl
import sys
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import uvloop

from openapi_tool.local.recordings import load_recordings

_WANTED = re.compile(rb"bench-(\d+)-(\d+)")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END = b"\r\n\r\n"
_RESULTS = 5
_RECORDINGS = {True: "s-q-content-json", False: "r-ok-json"}  # by whether the request is a search
_SIZING_ROUNDS = 8  # escapes make JSON longer than its text; a few corrections reach the size
_BACKLOG = 1024
_LONE_REFUSAL_S = 2.0  # Retry-After of the one request that is refused
_TOO_MANY_S = 1.0  # Retry-After above the concurrent requests

COUNTERS = {"connections": 0, "requests": 0, "refused": 0, "most_in_60_s": 0, "most_at_once": 0, "tokens": 0}
"""`tokens`: charged for the requests that were not refused, also if nobody reads the response."""

REFUSED: deque[float] = deque(maxlen=100)
"""Times of the last requests that were refused, in seconds since the epoch."""

SERVED: Counter[int] = Counter()
"""Requests that were not refused, by the second of the epoch."""

MINUTE_S = 60.0
_KEY = re.compile(rb"authorization: *bearer +(\S+)", re.IGNORECASE)
_RECENT: defaultdict[bytes, deque[float]] = defaultdict(deque)


def counters() -> dict[str, Any]:
    """Return the counters, among them the most requests of one key in 60 s, and the served requests by second."""
    return {**COUNTERS, "served": dict(SERVED), "refused_at": list(REFUSED)}


def refused_for_s(request: bytes, per_minute: int) -> float | None:
    """Count a request in its key's sliding window; return the seconds until the next one is served if it is refused."""
    key, now = _KEY.search(request), time.time()
    recent = _RECENT[key[1] if key else b""]
    while recent and recent[0] <= now - MINUTE_S:
        recent.popleft()
    if len(recent) >= per_minute:
        return recent[0] + MINUTE_S - now
    recent.append(now)
    SERVED[int(now)] += 1
    COUNTERS["most_in_60_s"] = max(COUNTERS["most_in_60_s"], len(recent))
    return None


def refusal(seconds: float, text: str = "limit") -> bytes:
    """Return a response with status 429, and count it."""
    COUNTERS["refused"] += 1
    REFUSED.append(time.time())
    envelope = {"data": None, "code": 429, "name": "RateLimitTriggeredError", "status": 42903, "message": text}
    body = orjson.dumps({**envelope, "readableMessage": text})
    head = f"HTTP/1.1 429 Too Many Requests\r\nRetry-After: {math.ceil(seconds)}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def unique_query(delay_ms: int, size: int, number: int) -> str:
    """Return a unique query (or end of a url) whose response has the given size and delay."""
    return f"bench-{delay_ms}-{size}-{number}"


@cache
def answer(size: int, *, search: bool, tokens: int | None = None) -> bytes:
    """Return a whole response whose body is a recorded one, truncated or repeated to `size` bytes.

    `tokens` replaces the cost of a page.
    """
    body = _body(size, search=search, tokens=tokens)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _envelope(tokens: int | None, *, search: bool) -> dict[str, Any]:
    envelope: dict[str, Any] = orjson.loads(load_recordings()[_RECORDINGS[search]].body)
    if tokens is not None and not search:
        envelope["data"]["usage"]["tokens"] = envelope["meta"]["usage"]["tokens"] = tokens
    return envelope


@cache
def charged(tokens: int | None, *, search: bool) -> int:
    """Return the tokens that a response charges."""
    return int(_envelope(tokens, search=search)["meta"]["usage"]["tokens"])


def _body(size: int, *, search: bool, tokens: int | None) -> bytes:
    envelope = _envelope(tokens, search=search)
    item = envelope["data"][0] if search else envelope["data"]
    text, chars, body = item["content"], size, b""
    for _ in range(_SIZING_ROUNDS):
        chars = max(_RESULTS, chars - (len(body) - size if body else 0))
        body = orjson.dumps(envelope | {"data": _sized(item, text, chars, search=search)})
        if abs(len(body) - size) <= _RESULTS:  # a search divides the text evenly, so it cannot be more exact
            break
    return body


def _sized(item: dict[str, Any], text: str, chars: int, *, search: bool) -> Any:
    """Return one page, or the results of a search, whose contents have about `chars` characters in all."""
    share = chars // _RESULTS if search else chars
    sized = item | {"content": (text * (share // len(text) + 1))[:share]}
    return [sized | {"url": f"{item['url']}/{number}"} for number in range(_RESULTS)] if search else sized


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Limits of a key in requests in 60 s and of all keys in concurrent requests; number of one request to refuse.

    `bytes_per_token` is the size of a page per token that it costs; without it each costs what the recorded one did.
    """

    per_minute: int | None = None
    concurrent: int | None = None
    refused_number: int | None = None
    bytes_per_token: int | None = None


USUAL = Behaviour()
_OPEN = 0  # requests whose response was not sent


class Upstream(asyncio.Protocol):
    """One connection; answers requests one after another, as clients do not pipeline."""

    def __init__(self, behaviour: Behaviour = USUAL) -> None:
        self._behaviour = behaviour
        self._transport: asyncio.Transport | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        COUNTERS["connections"] += 1
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel delayed responses."""
        del exc
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._buffer += data
        while (end := self._end()) and end <= len(self._buffer):
            request, self._buffer = self._buffer[:end], self._buffer[end:]
            self._answer(request)

    def _end(self) -> int:
        head = self._buffer.find(_END)
        if head < 0:
            return 0
        length = _LENGTH.search(self._buffer, 0, head)
        return head + len(_END) + (int(length[1]) if length else 0)

    def _answer(self, request: bytes) -> None:
        global _OPEN  # noqa: PLW0603 - of this process, as the counters are
        COUNTERS["requests"] += 1
        behaviour = self._behaviour
        if behaviour.concurrent and behaviour.concurrent <= _OPEN:
            self._send(refusal(_TOO_MANY_S, "Too many concurrent requests"))
            return
        if behaviour.per_minute and (seconds := refused_for_s(request, behaviour.per_minute)) is not None:
            self._send(refusal(seconds))
            return
        if COUNTERS["requests"] == behaviour.refused_number:
            self._send(refusal(_LONE_REFUSAL_S))
            return
        if not behaviour.per_minute:
            SERVED[int(time.time())] += 1
        match = _WANTED.search(request)
        delay_ms, size = map(int, match.groups()) if match else (0, 0)
        search = b"s.jina.ai" in request
        tokens = size // behaviour.bytes_per_token if behaviour.bytes_per_token else None
        COUNTERS["tokens"] += charged(tokens, search=search)
        response = answer(size, search=search, tokens=tokens)
        if delay_ms:
            _OPEN += 1
            COUNTERS["most_at_once"] = max(COUNTERS["most_at_once"], _OPEN)
            asyncio.get_running_loop().call_later(delay_ms / 1000, self._send_late, response)
        else:
            self._send(response)

    def _send_late(self, response: bytes) -> None:
        global _OPEN  # noqa: PLW0603 - of this process, as the counters are
        _OPEN -= 1
        self._send(response)

    def _send(self, response: bytes) -> None:
        if self._transport is not None:
            self._transport.write(response)


class Counters(asyncio.Protocol):
    """Sends the counters as one JSON object to each client, and closes the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the counters and close."""
        transport.write(json.dumps(counters()).encode())  # type: ignore[attr-defined]
        transport.close()


async def serve(certificate: Path, behaviour: Behaviour) -> None:
    """Serve until killed; print both ports as one JSON line."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Upstream(behaviour), "127.0.0.1", 0, ssl=tls, backlog=_BACKLOG),
        await loop.create_server(Counters, "127.0.0.1", 0),
    ]
    port, counters = (server.sockets[0].getsockname()[1] for server in servers)
    sys.stdout.write(json.dumps({"port": port, "counters": counters}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Run the double as a separate process."""
    parser = argparse.ArgumentParser(description="An upstream double for load.")
    parser.add_argument("--certificate", type=Path, required=True, help="PEM file with key and chain")
    parser.add_argument("--per-minute", type=int, help="answer 429 above this number of requests of a key in 60 s")
    parser.add_argument("--concurrent", type=int, help="answer 429 above this number of concurrent requests")
    parser.add_argument("--refused-number", type=int, help="answer 429 to the request of this number, once")
    parser.add_argument("--bytes-per-token", type=int, help="charge a token for this many bytes of a page")
    arguments = vars(parser.parse_args())
    uvloop.run(serve(arguments.pop("certificate"), Behaviour(**arguments)))


if __name__ == "__main__":
    main()
