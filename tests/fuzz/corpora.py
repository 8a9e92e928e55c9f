"""Corpora, and mutations of their inputs.

Seeds are messages of the tests, their tables of addresses, and the recordings.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import orjson

from openapi_tool.jina.parameters import REFUSED
from openapi_tool.local.recordings import load_recordings
from openapi_tool.tools.catalogue import CATALOGUE
from tests.fuzz.whole import MAX_BYTES, SEPARATOR, STATUSES, joined, parts
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


_MAX_TIMES = 2_000
_DEPTHS = (2, 10, 60, 200)
_NAMES = (
    *(
        "parameters",
        "options",
        "jina",
        "args",
        "envs",
        "defaults",
        "fixed",
        "params",
        "headers",
        "mode",
        "tool",
        "method",
    ),
    *("path", "base_url", "auth_env", "timeout_s", "endpoint_template", "result_format", "suspend_timeout_seconds"),
    *("type", "properties", "required", "items", "enum", "const", "pattern", "anyOf", "oneOf", "allOf", "not", "$ref"),
    *("$defs", "if", "then", "else", "patternProperties", "additionalProperties", "unevaluatedProperties", "minLength"),
    *("uniqueItems", "contains", "dependentSchemas", "propertyNames", "prefixItems", "multipleOf", "format", "$id"),
    *(
        "query",
        "queries",
        "url",
        "urls",
        "cursor",
        "find",
        "count",
        "site",
        "session_id",
        "api_key",
        "timeout",
        "with_content",
    ),
    *(
        "data",
        "title",
        "content",
        "description",
        "warning",
        "links",
        "images",
        "chunks",
        "siteLinks",
        "usage",
        "tokens",
    ),
    *("meta", "code", "status", "message", "readableMessage", "name", "publishedTime", "numPages", "metadata", "text"),
    *("tool_args_defaults_applied", "tool_args_fixed_applied", "step_id", "trace_id", "0", "1", "html", "doNotTrack"),
    *sorted(REFUSED),
    *(name for tool in CATALOGUE.values() for name in tool.arguments.model_fields),
)
_TEXTS = (
    *_NAMES,
    *("", "search", "reader", "string", "object", "array", "https://example.com/", "https://r.jina.ai", "JINA_API_KEY"),
    *("{agent_id}", "{step_id}{trace_id}", "{nobody}", "(a+)+$", "^[a-z]{1,500}$", "a,https://a.b/", "#/$defs/a", "#"),
    *("a-key-of-the-fuzzer", "[End of web content.]", "[web content", "\u0000", "\u202e", "x://y@", "Error(", "jina_"),
    *("\ud7ff", "\U0001f600", "a" * 300, "No search results available for query x", "&#97;-key", "\\_"),
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    1e308,
    2**53,
    -(2**63),
    2**64 - 1,
    "",
    [],
    {},
    [[]],
    {"": {}},
)
_NUMBER = (0, 1, 20, 10_000)

Change = Callable[[Any, random.Random], Any]


def mutate(data: bytes, most: int, seed: int, flip: Callable[[bytes, int], bytes]) -> bytes:
    """Return a mutated input of at most `most` bytes; `flip` changes bytes as libFuzzer does."""
    chance = random.Random(seed)  # noqa: S311 - libFuzzer's own seed
    pieces = list(parts(data))
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(3)
        pieces[place] = _answer(pieces[place], chance, flip) if place == 2 else _json(pieces[place], chance)
    changed = SEPARATOR.join(pieces)
    return changed if len(changed) <= min(most, MAX_BYTES) else flip(data, min(most, MAX_BYTES))


def _answer(piece: bytes, chance: random.Random, flip: Callable[[bytes, int], bytes]) -> bytes:
    status, body = piece[:1] or b"\0", piece[1:]
    if chance.random() < 0.1:
        status = bytes([chance.randrange(14)])
    if chance.random() < 0.15:
        return status + flip(body, len(body) + 64)
    return status + _json(body, chance)


def _json(text: bytes, chance: random.Random) -> bytes:
    """Return a JSON text with one random change."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = {}
    try:
        return orjson.dumps(_changed(value, chance))
    except TypeError:  # nested too deeply
        return text


def _changed(value: Any, chance: random.Random) -> Any:
    """Descend randomly, then change the value there."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        return {**value, name: _changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(_CHANGES)(value, chance)


def _replace(_: Any, chance: random.Random) -> Any:
    return chance.choice(_VALUES) if chance.random() < 0.5 else chance.choice(_TEXTS)


def _most_times(value: Any) -> int:
    """Return how often a value may be repeated in an input without exhausting the fuzzer's memory."""
    return max(1, MAX_BYTES // len(orjson.dumps(value)))


def _grow(value: Any, chance: random.Random) -> Any:
    times = chance.randrange(1, min(_MAX_TIMES, _most_times(value) + 1))
    if isinstance(value, str):
        return value[:100] * times
    if isinstance(value, list):
        return (value[:10] or [None]) * times
    if isinstance(value, dict):
        filler = chance.choice(_VALUES)
        return value | {f"{chance.choice(_NAMES)}{number}": filler for number in range(times)}
    return [value] * times


def _nest(value: Any, chance: random.Random) -> Any:
    name = chance.choice(_NAMES)
    for _ in range(chance.choice(_DEPTHS)):
        value = {name: value} if name != "items" else [value]
    return value


def _branch(value: Any, chance: random.Random) -> Any:
    keyword = chance.choice(("anyOf", "oneOf", "allOf"))
    for _ in range(chance.randrange(1, 9)):
        if _most_times(value) == 1:
            break
        value = {keyword: [value, value]}
    return value


def _add(value: Any, chance: random.Random) -> Any:
    new = chance.choice((*_VALUES, *_TEXTS))
    if isinstance(value, dict):
        return {**value, chance.choice(_NAMES): new}
    return [*value, new] if isinstance(value, list) else {chance.choice(_NAMES): value}


def _drop(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value:
        gone = chance.choice(list(value))
        return {name: inner for name, inner in value.items() if name != gone}
    return value[: len(value) // 2] if isinstance(value, str | list) else None


def _rename(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict) or not value:
        return _replace(value, chance)
    old, new = chance.choice(list(value)), chance.choice(_TEXTS)
    return {new if name == old else name: inner for name, inner in value.items()}


def _splice(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, str):
        return _add(value, chance)
    place = chance.randrange(len(value) + 1)
    return value[:place] + chance.choice(_TEXTS) + value[place:]


_CHANGES: tuple[Change, ...] = (_replace, _replace, _add, _add, _drop, _rename, _splice, _grow, _nest, _branch)
