"""Where fuzzing begins besides the kept corpora: messages of the tests, their tables of addresses, the recordings."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import orjson

from openapi_tool.local.recordings import load_recordings
from tests.support import BODY, HEADERS, SUBJECT
from tests.unit import test_targets as addresses

_MOST_BYTES = 3_000


def seeds(name: str) -> list[bytes]:
    """The seeds of a target."""
    return list({"command": _messages, "address": _addresses, "answer": _answers}.get(name, _nothing)())


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
        if len(text) < _MOST_BYTES:
            yield text.encode("utf-8", "surrogateescape" if text.isascii() else "surrogatepass")


def _answers() -> Iterator[bytes]:
    for recording in load_recordings().values():
        if len(recording.body) < _MOST_BYTES:
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
