"""Inputs of the fuzz targets: saved corpora (a JSON Lines file each, one input per line), and seeds.

Seeds are messages of the tests, their tables of addresses, and the recordings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import orjson

from openapi_tool.local.recordings import load_recordings
from openapi_tool.tools.catalogue import CATALOGUE
from tests.fuzz.whole import STATUSES, joined
from tests.support import BODY, HEADERS, SUBJECT
from tests.unit import test_url_policy as addresses

_MAX_BYTES = 3_000
CORPUS = Path(__file__).parent / "corpus"
BROKE = "found-"
"""Prefix of saved inputs that once caused a failure; a merge never removes them."""

MAX_INPUTS, MAX_TOTAL_BYTES = 300, 300_000


def saved(name: str) -> dict[str, bytes]:
    """Return a target's saved inputs by name."""
    if not _file(name).exists():
        return {}
    entries = map(json.loads, _file(name).read_text(encoding="utf-8").splitlines())
    return {entry["name"]: entry["data"].encode("latin-1") for entry in entries}


def save(name: str, inputs: Iterable[bytes]) -> None:
    """Save the smallest inputs up to the limit, and all that once caused a failure."""
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    sizes = accumulate(map(len, ordered))
    chosen = {known: data for known, data in saved(name).items() if known.startswith(BROKE)}
    for data, size in zip(ordered[:MAX_INPUTS], sizes, strict=False):
        if size <= MAX_TOTAL_BYTES:
            chosen[hashlib.sha256(data).hexdigest()[:16]] = data
    entries = ({"name": known, "data": data.decode("latin-1")} for known, data in chosen.items())
    _file(name).write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def _file(name: str) -> Path:
    return CORPUS / f"{name}.jsonl"


def seeds(name: str) -> list[bytes]:
    """Return the seeds of a target."""
    return list(
        {
            "command": _messages,
            "address": _addresses,
            "answer": _answers,
            "whole": _calls,
            "socket": _frames,
        }.get(name, _nothing)()
    )


def _nothing() -> Iterator[bytes]:
    yield bytes(64)


def _messages() -> Iterator[bytes]:
    body = orjson.dumps(BODY)
    headers = "\n".join(f"{name}: {text}" for name, text in HEADERS.items())
    yield f"{SUBJECT}\n{headers}\n\n".encode() + body
    yield f"{SUBJECT.replace('public', 'private')}\n{headers.lower()}\ntracestate: a=b\n\n".encode() + body[:-1]
    yield f"{SUBJECT}\n\n".encode() + orjson.dumps(
        {**BODY, "args": {}, "project_id": "x", "tool_name": "skills.job_watch"}
    )


def _addresses() -> Iterator[bytes]:
    texts = [*addresses.UNCHANGED, *(text for text, _ in addresses.REPAIRED), *chain(*addresses.MALFORMED.values())]
    texts += [f"https://{host}/" for host in addresses.REFUSED_HOSTS]
    for text in texts:
        if len(text) < _MAX_BYTES:
            yield text.encode("utf-8", "surrogateescape" if text.isascii() else "surrogatepass")


def _answers() -> Iterator[bytes]:
    for recording in load_recordings().values():
        if len(recording.body) < _MAX_BYTES:
            mode = b"\x01" if recording.name.startswith("s-") else b"\x00"
            status = {200: b"\x00", 422: b"\x03", 429: b"\x04", 400: b"\x05", 451: b"\x09"}.get(
                recording.status, b"\x0a"
            )
            yield status + mode + b"\x01\x00" + recording.body
    for depth in (100, 300, 500, 900, 5_000):
        nested = b"[" * depth + b"]" * depth
        yield b'\x00\x00\x00\x00{"data":{"content":"x","title":' + nested + b"}}"
        yield b"\x00\x00\x00\x00" + nested
    yield b"G" + bytes(range(200))


def _calls() -> Iterator[bytes]:
    """Yield every built-in tool with a recorded response of each kind, and hostile ones."""
    bodies = {name: recording for name, recording in load_recordings().items() if len(recording.body) < _MAX_BYTES}
    arguments = {
        "query": "hello",
        "queries": ["a", "b"],
        "url": "https://example.com/",
        "urls": ["https://example.com/"],
    }
    for number, tool in enumerate(CATALOGUE.values()):
        given = {name: value for name, value in arguments.items() if name in tool.arguments.model_fields}
        row = {"parameters": tool.schema(), "options": {"jina": {"mode": tool.operation.name, "tool": tool.name}}}
        for recording in list(bodies.values())[number :: len(CATALOGUE)]:
            if recording.status in STATUSES:
                yield joined(row, given, recording.status, recording.body)
    for row, given in _ATTACKS:
        yield joined(row, given, 200, b'{"code":200,"data":{"content":"x","links":{"0":"a,https://a.b/"}}}')


def _frames() -> Iterator[bytes]:
    """Yield valid and invalid lines of a server, and messages that any client may publish."""
    yield from (
        b"\x00PING\r\n+OK\r\nPONG\r\n",
        b'\x00INFO {"server_id":"y","max_payload":1048576,"headers":true,"ldm":true}\r\n',
        b"\x00-ERR 'Permissions Violation for Publish to \"a\"'\r\n-ERR 'Stale Connection'\r\n",
        b"\x00MSG a 1 r 5\r\nhello\r\nHMSG a 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
        b"\x00HMSG a 1 28 28\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n",
        b"\x00MSG a 1 99\r\nhello",
    )
    headers = "".join(f"{name}: {text}\r\n" for name, text in HEADERS.items())
    yield f"\x01{SUBJECT}||NATS/1.0\r\n{headers}\r\n|".encode() + orjson.dumps(BODY)
    yield f"\x01{SUBJECT}".encode() + b"\xff|||{}"
    yield b"\x01a\x0bb|$JS.ACK.a.b.1.2.3.x.0|NATS/1.0 408\r\n\r\n|"
    yield b"\x01_|$JS.ACK._._.1.9.9.99999999999999999999999.0|NATS/1.0\r\nA\r\n:\r\n\xff: \xff\r\n\r\n|[" + b"[" * 600


_JINA = {"mode": "reader"}
_ATTACKS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"options": {"jina": _JINA, "envs": {"locale": "JINA_API_KEY"}}}, {"url": "https://a.b/"}),
    (
        {"options": {"jina": _JINA, "args": {"defaults": {"locale": "{agent_id}" * 9}}}},
        {"url": "r.jina.ai/" * 9 + "a.b"},
    ),
    ({"options": {"jina": _JINA | {"params": {"unknown": 1}, "headers": {"X-A": "b"}}}}, {"url": "a.b"}),
    ({"options": {"jina": _JINA}, "parameters": {"anyOf": [{"required": ["url"]}, {"type": "null"}]}}, {"url": "a.b"}),
    ({"options": {"jina": _JINA}, "parameters": {"properties": {"url": {"pattern": "(a+)+$"}}}}, {"url": "a" * 30}),
    ({"options": {"jina": _JINA}, "metadata": {"tool_args_fixed_applied": ["url"]}}, {"url": "a.b"}),
    ({"options": {"openapi": {"base_url": "https://s.jina.ai", "auth": {"env": "JINA_API_KEY"}}}}, {"query": "x"}),
)
