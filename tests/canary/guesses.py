"""Part of the canary: no result may confirm a guess of a secret.

Wherever a caller's text, or that of a page which he controls, may be quoted, send each secret and a wrong guess of the
same form. The two results may differ in nothing but the guess.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import quote

from openapi_tool.local.caller import Caller
from openapi_tool.telemetry.redact import MASK
from tests.conftest import AGENT, PROJECT, reader_tool, search_tool

WAIT_S = 30.0
_AT_ONCE = 24
_MIN_PART_CHARS = 6  # of a guess that is cut
_RANDOM = re.compile(r"[0-9]{6,}|\"[A-Za-z0-9_-]{40,60}=?\"")
"""Marks of frames and sequence numbers; cursors."""
_VOLATILE = ("latency_ms", "attempts", "artifact_ref", "next_cursor")


@dataclass(frozen=True, slots=True)
class Guess:
    """A text of two halves: a secret, or the same form with other letters or digits."""

    head: str
    specials: str
    tail: str

    def __str__(self) -> str:
        return f"{self.head}{self.specials}{self.tail}"

    def wrong(self) -> Guess:
        """Return a wrong guess of the same form."""
        return Guess(_other(self.head), self.specials, _other(self.tail))

    def removed_from(self, text: str) -> str:
        """Return a text with `#` for each character of the guess, also where a message cuts it."""
        for part in (self.head, self.tail):
            for chars in range(len(part), _MIN_PART_CHARS - 1, -1):
                text = re.sub(re.escape(part[:chars]), "#" * chars, text, flags=re.IGNORECASE)
        return text


def _other(part: str) -> str:
    """Return another text with letters and digits at the same places, the first digit not 0."""
    letters, first = "abcdef", next((at for at, char in enumerate(part) if char.isdigit()), 0)
    drawn = (
        str(1 + secrets.randbelow(9)) if at == first else str(secrets.randbelow(10)) if char.isdigit() else
        secrets.choice(letters) if char in letters else char
        for at, char in enumerate(part)
    )  # fmt: skip
    return "".join(drawn)


def comparable(guess: Guess, card: Mapping[str, Any]) -> str:
    """Return what a caller can read of a result, without the guess and what differs from call to call."""
    content, output = card["content"], dict(card["metadata"].get("tool_output") or {})
    result = content["result"]
    shown = {name: value for name, value in output.items() if name not in _VOLATILE}
    if isinstance(result, dict):
        result = {name: value for name, value in result.items() if name not in _VOLATILE}
    text = json.dumps([content["status"], result, content["error"], shown], ensure_ascii=False)
    return _RANDOM.sub("N", guess.removed_from(text))


TOOLS = "jina_guess_"
"""Begin of the names of tools with definitions of their own."""

KEY = "KEY"
"""Replaced in arguments by a text that no other call has, by which the upstream finds its response."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a guess is sent.

    `arguments` are for the tool, or for one with `definition`. `page` is the upstream's response, with its HTTP status
    as `code`; if `from_upstream`, it has the guess, and the request has not.
    """

    name: str
    arguments: Callable[[str], Any]
    tool: str | Callable[[str], str] = "jina_search"
    definition: Callable[[str], Mapping[str, Any]] | None = None
    page: Callable[[str], dict[str, Any]] | None = None
    from_upstream: bool = False


_READ = {"mode": "reader"}
_QUERY = {"query": "x"}
_PAGE = {"url": "https://a.example/"}


def _reader(name: str, definition: Callable[[str], Mapping[str, Any]], arguments: Any = None) -> Place:
    return Place(f"definition: {name}", lambda _: arguments or _PAGE, definition=definition)


def _responds(name: str, page: Callable[[str], dict[str, Any]], tool: str = "jina_object") -> Place:
    arguments = {
        "jina_search": {"query": KEY},
        "jina_many": {"urls": [f"https://a.example/{KEY}", f"https://b.example/{KEY}"]},
    }.get(tool, {"url": f"https://a.example/{KEY}"})
    return Place(f"upstream: {name}", lambda _: arguments, tool, page=page, from_upstream=True)


def _fields(text: str) -> dict[str, Any]:
    words = f"is it {text}?"
    fields = ("title", "url", "description", "content", "text", "publishedTime", "warning", "source", "date")
    return dict.fromkeys(fields, words) | {"links": {words: f"https://a.example/{text}"}, "images": [[words, words]]}


_REJECTED = "Rejected by validator x"
_OPEN = {"type": "object", "properties": {"query": {"type": "string"}}}
_CLOSED = {**search_tool(), "parameters": {**_OPEN, "additionalProperties": False}}
PLACES: tuple[Place, ...] = (
    Place("argument name", lambda guess: {"query": "x", guess: 1}, definition=lambda _: _CLOSED),
    Place("argument name without a query", lambda guess: {guess: 1}),
    Place("argument name of a batch", lambda guess: {guess: ["https://a.example/"]}, "jina_many"),
    Place("argument names", lambda guess: {f"{guess}{number}": 1 for number in range(30)}),
    Place(
        "argument name that is left out",
        lambda guess: {"query": "x", guess: 1},
        definition=lambda _: {**search_tool(), "parameters": _OPEN},
    ),
    Place("text for a number", lambda guess: {"query": "x", "count": guess}),
    Place("text of an enumeration", lambda guess: {**_PAGE, "format": guess}, "jina_object"),
    Place("text that is too long", lambda guess: {"query": "x", "country": guess}),
    Place("text for a list", lambda guess: {"query": "x", "site": f"{guess} and {guess}"}),
    Place("raw arguments", lambda guess: {"_raw": guess}),
    Place("arguments that are a text", lambda guess: guess),
    Place("session", lambda guess: {"query": "x", "session_id": guess}),
    Place("host", lambda guess: {"url": f"https://{guess}/"}, "jina_object"),
    Place("scheme", lambda guess: {"url": f"{guess}://a.example/"}, "jina_object"),
    Place("user of an address", lambda guess: {"url": f"https://{guess}@a.example/"}, "jina_object"),
    Place("private host", lambda guess: {"url": f"http://{guess}.internal/"}, "jina_object"),
    Place("query without results", lambda guess: {"query": f"{guess} KEY"}, page=lambda _: {"code": 200, "data": []}),
    Place("address of a batch", lambda guess: {"urls": ["https://a.example/", f"https://{guess}/"]}, "jina_many"),
    Place("page of a batch", lambda guess: {"urls": [f"https://a.example/{quote(guess)}"]}, "jina_many"),
    Place("addresses that fail", lambda guess: {"urls": [f"https://{guess}{at}/" for at in range(3)]}, "jina_many"),
    Place("cursor", lambda guess: {"cursor": guess}, "jina_object"),
    Place("cursor as address", lambda guess: {"url": guess[:44]}, "jina_object"),
    Place("phrase without cursor", lambda guess: {**_PAGE, "find": guess}, "jina_object"),
    Place("name of a tool", lambda _: _QUERY, tool=lambda guess: guess),
    _reader("key variable", lambda guess: reader_tool(jina={**_READ, "auth_env": guess})),
    _reader("variable", lambda guess: reader_tool(envs={"tenant_token": guess})),
    _reader("secret argument", lambda guess: reader_tool(envs={guess: "TENANT_TOKEN"})),
    _reader("host", lambda guess: reader_tool(jina={**_READ, "base_url": f"https://{guess}"})),
    _reader("name of an option", lambda guess: reader_tool(**{guess: 1})),
    _reader("name of a member", lambda guess: reader_tool(jina={**_READ, guess: 1})),
    _reader("built-in tool", lambda guess: reader_tool(jina={**_READ, "tool": guess})),
    _reader("mode", lambda guess: reader_tool(jina={"mode": guess})),
    _reader("header", lambda guess: reader_tool(jina={**_READ, "headers": {guess: "1"}})),
    _reader("header's value", lambda guess: reader_tool(jina={**_READ, "headers": {"X-Timeout": guess}})),
    _reader("parameter", lambda guess: reader_tool(jina={**_READ, "params": {guess: 1}})),
    _reader("parameter's value", lambda guess: reader_tool(jina={**_READ, "params": {"tokenBudget": guess}})),
    _reader("placeholder", lambda guess: reader_tool(args={"fixed": {"url": f"https://a.example/{{{guess}}}"}})),
    _reader("fixed argument", lambda guess: reader_tool(args={"fixed": {guess: "{unknown}"}})),
    _reader("fixed address", lambda guess: reader_tool(args={"fixed": {"url": f"https://{guess}/"}})),
    _reader("default", lambda guess: reader_tool(args={"defaults": {"max_tokens": guess}})),
    _reader("budget", lambda guess: reader_tool(budget={guess: 1})),
    _reader("result format", lambda guess: reader_tool(result_format=guess)),
    _reader("schema", lambda guess: {**reader_tool(), "parameters": {"type": guess}}),
    _reader("enumeration", lambda guess: {**reader_tool(), "parameters": _enumeration(guess)}, {**_PAGE, "kind": "y"}),
    _reader(
        "required argument", lambda guess: {**reader_tool(), "parameters": {"type": "object", "required": [guess]}}
    ),
    _responds("page", lambda guess: {"code": 200, "data": _fields(guess)}),
    _responds("page as text", lambda guess: {"code": 200, "data": _fields(guess)}, "jina_reader"),
    _responds("results", lambda guess: {"code": 200, "data": [_fields(guess)] * 2}, "jina_search"),
    _responds("page without text", lambda guess: {"code": 200, "data": {"content": "", "warning": guess}}),
    _responds("error", lambda guess: {"code": 422, "readableMessage": f"SomeError(url): no {guess}"}),
    _responds("error of a search", lambda guess: {"code": 400, "readableMessage": guess}, "jina_search"),
    _responds("error in a batch", lambda guess: {"code": 451, "readableMessage": guess}, "jina_many"),
    _responds("refused value", lambda guess: {"code": 400, "readableMessage": _REJECTED, "value": f"a {guess}"}),
)


def _enumeration(guess: str) -> dict[str, Any]:
    properties = {"url": {"type": "string"}, "kind": {"enum": [guess]}}
    return {"type": "object", "properties": properties, "required": ["url"]}


@dataclass(slots=True)
class Guesser:
    """Sends guesses, several at once.

    `pages` are the upstream's responses by a text of their request. `was_sent` returns whether a request with the first
    text also had the second one. `calls` are the ids of the calls, whose results quote secrets that the caller sent.
    """

    caller: Caller
    pages: dict[str, dict[str, Any]]
    was_sent: Callable[[str, str], bool]
    calls: set[str] = field(default_factory=set)
    compared: int = 0
    masked: int = 0
    _numbers: Iterator[int] = field(default_factory=count)
    _permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    async def confirmed(self, known: Mapping[str, Guess], places: Sequence[Place] = PLACES) -> list[str]:
        """Return where a result tells a right guess from a wrong one, or shows a secret that its call had sent."""
        found = await asyncio.gather(
            *(self._compare(place, name, secret) for place in places for name, secret in known.items())
        )
        return [problem for problem in found if problem]

    async def _compare(self, place: Place, name: str, secret: Guess) -> str | None:
        wrong = secret.wrong()
        (key, card), (_, other_card) = await asyncio.gather(self._ask(place, secret), self._ask(place, wrong))
        result, other = comparable(secret, card), comparable(wrong, other_card)
        if place.from_upstream and self.was_sent(key, str(secret)):
            self.masked += 1  # it may be an echo of the request
            leaked = secret.head in str(card) or MASK not in result
            return f"{name} in {place.name} is not masked" if leaked else None
        self.compared += 1
        if result == other and MASK not in result:
            return None
        return f"{name} in {place.name}: {_difference(result, other)}"

    async def _ask(self, place: Place, guess: Guess) -> tuple[str, Mapping[str, Any]]:
        """Return the key and the result card."""
        text, number = str(guess), next(self._numbers)
        key = f"key-{number:08}"
        async with self._permits:
            if place.page is not None:
                self.pages[key] = place.page(text)
            tool = place.tool if isinstance(place.tool, str) else place.tool(text)
            if place.definition is not None:
                tool = f"{TOOLS}{number:08}"
                await self.caller.add_tool(PROJECT, {**place.definition(text), "tool_name": tool})
            arguments = json.loads(json.dumps(place.arguments(text)).replace(KEY, key))
            placed = await self.caller.place(PROJECT, AGENT, tool, arguments)
            self.calls.add(placed.tool_call_id)
            return key, (await self.caller.result(placed, WAIT_S)).card


def _difference(right: str, wrong: str) -> str:
    at = next((at for at, (one, other) in enumerate(zip(right, wrong, strict=False)) if one != other), 0)
    return f"{right[max(0, at - 60) : at + 80]!r} instead of {wrong[max(0, at - 60) : at + 80]!r}"
