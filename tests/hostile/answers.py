"""Upstream responses, or pages behind them, that are as expensive as possible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

from openapi_tool.local.caller import ResultRows
from openapi_tool.tools.inline_bounds import MAX_BODY_BYTES, body_fits_inline
from tests.hostile.case import Cases
from tests.hostile.scene import ANSWER_S, Scene, assert_failed, assert_succeeded, content_of
from tests.hostile.upstream import LATE, response

CASES = Cases()
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Make = Callable[[], bytes]
MAX_BYTES = 9_900_000
"""Just below the size limit of a response."""

PAGES = 56
"""Concurrent calls: fewer than there are slots, since a project that fills all slots is another case."""
TIMEOUT_S = 110
"""Limit in seconds for calls that wait for memory, also on a busy machine: all PAGES together exceed the limit."""
NEIGHBOUR_S = 5
READER = {"jina": {"mode": "reader"}}
SHOWN_CHARS, CARD_CHARS = 40_000, 300_000
_FAILED = ("upstream_rejected", "upstream_unavailable", "response_too_large", "bad_request", "rate_limited")


def fill(unit: str, size: int = MAX_BYTES) -> str:
    """Return a text of about this many bytes."""
    return unit * (size // len(unit.encode()))


def page(**fields: object) -> bytes:
    """Return a reader's response; a field of type `bytes` is raw JSON."""
    own = {"title": "A page", "url": "https://a.example/", "content": "Some text.", **fields}
    inner = b",".join(json.dumps(name).encode() + b":" + _json(value) for name, value in own.items())
    return response(b'{"code":200,"status":20000,"data":{%b},"meta":{"usage":{"tokens":1}}}' % inner)


def results(inner: bytes) -> bytes:
    """Return a search's response with these results as raw JSON."""
    return response(b'{"code":200,"status":20000,"data":[%b],"meta":{"usage":{"tokens":1}}}' % inner)


def _json(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()


def _items(item: bytes) -> bytes:
    return b",".join([item] * (MAX_BYTES // (len(item) + 1)))


def _numbered(item: str) -> bytes:
    count = MAX_BYTES // (len(item.replace("%d", "1234567")) + 1)
    return ",".join(item.replace("%d", str(number)) for number in range(count)).encode()


def small_chunks() -> bytes:
    """Return a page behind 4.8 MB of blanks in chunks, the framing of each of which is a quarter of its 24 bytes."""
    _, _, body = page(content="x").partition(b"\r\n\r\n")
    return _CHUNKED + b"18\r\n%b\r\n" % (b" " * 24) * 200_000 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


READERS: Mapping[str, Make] = {
    "brackets": lambda: response(b"[" * MAX_BYTES),
    "brackets_in_pairs": lambda: page(content=b"[" * (MAX_BYTES // 2) + b"]" * (MAX_BYTES // 2)),
    "objects_in_objects": lambda: page(title=b'{"a":' * 1_500_000 + b"1" + b"}" * 1_500_000),
    "links_by_the_hundred_thousand": lambda: page(links=b"{" + _numbered('"l%d":"https://a.b/%d"') + b"}"),
    "links_under_numbers": lambda: page(links=b"{" + _numbered('"%d":"a,https://a.b/%d"') + b"}"),
    "links_in_pairs": lambda: page(links=b"[" + _items(b'["l","u"]') + b"]"),
    "a_link_of_commas": lambda: page(links={"0": fill(",a")}),
    "a_link_of_a_long_scheme": lambda: page(links={"0": "," + fill("a")}),
    "images_by_the_million": lambda: page(images=b"[" + _items(b'["i","u"]') + b"]"),
    "warnings_by_the_million": lambda: page(warning=fill("w\n")),
    "warnings_of_odd_lines": lambda: page(warning=fill("\u2028\x85\v")),
    "a_title_of_ten_megabytes": lambda: page(title=fill("title ")),
    "a_title_of_control_characters": lambda: page(title=fill("\x85")),
    "a_title_of_blanks": lambda: page(title=fill(" ")),
    "an_address_of_ten_megabytes": lambda: page(url="https://" + fill("u")),
    "a_date_of_ten_megabytes": lambda: page(publishedTime=fill("2")),
    "chunks_by_the_million": lambda: page(content="", chunks=b"[" + _items(b'"c"') + b"]"),
    "a_number_of_many_digits": lambda: page(numPages=b"9" * MAX_BYTES),
    "names_by_the_million": lambda: page(metadata=b"{" + _numbered('"n%d":"%d"') + b"}"),
    "numbers_by_the_million": lambda: page(external=b"[" + _items(b"1") + b"]"),
    "a_code_of_many_digits": lambda: response(b'{"code":%b,"data":{}}' % (b"9" * MAX_BYTES)),
    "no_json": lambda: response(b"<html>" + b"<p>" * (MAX_BYTES // 3)),
    "no_utf8": lambda: response(b'{"data":{"content":"' + b"\xff" * MAX_BYTES + b'"}}'),
    "a_text_alone": lambda: response(json.dumps(fill("x")).encode()),
    "blanks_alone": lambda: response(b" " * MAX_BYTES + b"{}"),
}
"""Pages for which a failure is acceptable, too."""

READABLE: Mapping[str, Make] = {
    "brackets_in_its_text": lambda: page(content=fill("[")),
    "brackets_and_blanks": lambda: page(content=fill("[ _")),
    "look_alikes_of_the_frame": lambda: page(content=fill("[web")),
    "frames": lambda: page(content=fill("[End of web content.] ")),
    "quotes_and_backslashes": lambda: page(content=fill('"\\', MAX_BYTES // 2)),
    "one_word": lambda: page(content=fill("a")),
    "four_byte_letters": lambda: page(content=fill("\U0001f600")),
    "two_byte_letters": lambda: page(content=fill("\u00e9 ")),
    "zeros": lambda: page(content=b'"' + b"\\u0000" * (MAX_BYTES // 6) + b'"'),
    "half_escapes": lambda: page(content=b'"' + b"\\ud83d" * (MAX_BYTES // 6) + b'"'),
    "what_looks_like_a_login": lambda: page(content=fill("jina_://a@")),
    "what_looks_like_a_key": lambda: page(content=fill("jina_aaaaaaaaaaaaaaaaaaaaaaaa ")),
    "line_breaks": lambda: page(content=fill("a\n", MAX_BYTES // 2)),
    "percents": lambda: page(content=fill("%25")),
    "one_chunk_without_a_length": lambda: response(
        b'{"code":200,"data":{"content":"' + b"c " * 4_900_000 + b'"}}', chunked=True
    ),
}
"""Pages that must be rendered."""

SEARCHES: Mapping[str, Make] = {
    "empty_results_by_the_million": lambda: results(_items(b"{}")),
    "lists_for_results": lambda: results(_items(b"[]")),
    "results_by_the_hundred_thousand": lambda: results(_items(b'{"title":"t","url":"u"}')),
    "results_of_warnings": lambda: results(_items(b'{"warning":"w"}')),
    "results_of_tokens": lambda: results(_items(b'{"usage":{"tokens":9}}')),
    "a_result_of_site_links": lambda: results(b'{"title":"t","siteLinks":[%b]}' % _items(b'{"title":"t","link":"l"}')),
    "a_result_of_many_fields": lambda: results(b"{" + _numbered('"f%d":"%d"') + b"}"),
    "a_result_of_a_long_title": lambda: results(b'{"title":"%b"}' % (b"t" * MAX_BYTES)),
}

WORDS: Mapping[str, str] = {
    "letters": "a",
    "schemes": "a://",
    "names": "Error(",
    "capitals": "AError",
    "selectors": " with target selector ",
    "net": "net::ERR_A",
    "letters_and_points": "a.",
    "parentheses": "Error()Error(",
    "odd_blanks": "\u2028 \x01",
}
"""Repeated parts of error messages."""


def reasons(size: int) -> Mapping[str, bytes]:
    """Return upstream errors with messages of this many bytes."""
    found = {}
    for name, unit in WORDS.items():
        body = {"code": 422, "status": 42206, "readableMessage": fill(unit, size), "message": "x"}
        found[f"reason_{name}_{size}"] = response(_json(body), 422)
    return found


def fields() -> Mapping[str, bytes]:
    """Return upstream errors with a large value in another field."""
    found = {}
    for name in ("message", "name", "retryAfterDate", "retryAfter", "status"):
        body = {"code": 400, name: fill("9")}
        found[f"field_{name.lower()}"] = response(_json(body), 400, "Retry-After: 0\r\n")
    return found


def assert_bounded(answer: ResultRows) -> None:
    """Assert a typed failure, or a success within the limit of what a model is shown."""
    content = content_of(answer)
    if content["status"] != "success":
        assert_failed(answer, *_FAILED)
        return
    assert len(str(content["result"])) <= SHOWN_CHARS
    assert len(json.dumps(answer.card, default=str, ensure_ascii=False)) < CARD_CHARS, "state or metadata are large"


def _add_page_case(name: str, make: Make, *, readable: bool) -> None:
    async def attack(scene: Scene) -> None:
        answer = await scene.read(f"https://example.com/attack-{name}")
        assert_bounded(answer)
        if readable:
            assert_succeeded(answer)

    attack.__name__ = f"page_of_{name}"
    CASES.case("13", lambda: {name: make()})(attack)


def _add_search_case(name: str, make: Make) -> None:
    async def attack(scene: Scene) -> None:
        assert_bounded(await scene.search(f"attack-{name}"))

    attack.__name__ = f"search_of_{name}"
    CASES.case("13", lambda: {name: make()})(attack)


for _name, _make in READERS.items():
    _add_page_case(_name, _make, readable=False)
for _name, _make in READABLE.items():
    _add_page_case(_name, _make, readable=True)
for _name, _make in SEARCHES.items():
    _add_search_case(_name, _make)


@CASES.case("12", lambda: reasons(150_000))
async def error_messages_slow_to_parse(scene: Scene) -> None:
    for name in WORDS:
        assert_failed(await scene.read(f"https://example.com/attack-reason_{name}_150000"), *_FAILED)


@CASES.case("12", lambda: reasons(MAX_BYTES - 1_000))
async def error_messages_of_ten_megabytes(scene: Scene) -> None:
    for name in WORDS:
        assert_failed(await scene.read(f"https://example.com/attack-reason_{name}_{MAX_BYTES - 1_000}"), *_FAILED)


@CASES.case("12", fields)
async def large_fields_in_error_responses(scene: Scene) -> None:
    for name in fields():
        assert_failed(await scene.read(f"https://example.com/attack-{name}"), *_FAILED)


@CASES.case("13", lambda: {"many_pages": page(content=fill("word \U0001f600 "))})
async def pages_of_ten_megabytes_at_once(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader"}, "suspend_timeout_seconds": TIMEOUT_S})
    arguments = {"url": "https://example.com/attack-many_pages/{n}"}
    for answer in await scene.calls(scene.scaled(PAGES), tool, arguments, TIMEOUT_S):
        assert_bounded(answer)


@CASES.case("13", lambda: {"many_objects": page(links=b"{" + _numbered('"l%d":"https://a.b/%d"') + b"}")})
async def pages_of_many_values_at_once(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader"}})
    arguments = {"url": "https://example.com/attack-many_objects/{n}"}
    for answer in await scene.calls(scene.scaled(PAGES) // 3, tool, arguments):
        assert_bounded(answer)


@CASES.case("13", lambda: {"chunked_pages": READABLE["one_chunk_without_a_length"]()})
async def pages_without_a_length_at_once(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader"}})
    arguments = {"url": "https://example.com/attack-chunked_pages/{n}"}
    for answer in await scene.calls(scene.scaled(PAGES) // 3, tool, arguments):
        assert_bounded(answer)


@CASES.case("13", lambda: {"small_chunks": small_chunks()})
async def pages_in_small_chunks_at_once(scene: Scene) -> None:
    """They share a fifth of the event loop, and so may not arrive in time."""
    tool = await scene.define({"jina": {"mode": "reader"}})
    arguments = {"url": "https://example.com/attack-small_chunks/{n}"}
    for answer in await scene.calls(max(1, scene.scaled(8)), tool, arguments, TIMEOUT_S):
        if content_of(answer)["status"] != "success":
            assert_failed(answer, *_FAILED, "tool_timeout")


def _just_inline() -> bytes:
    half_pairs = rb"\ud800" * ((MAX_BODY_BYTES - 400) // 6)
    found = page(content=b'"%b"' % half_pairs)
    assert body_fits_inline(bytearray(found.partition(b"\r\n\r\n")[2]), secrets=1)
    return found


@CASES.case("13", lambda: {"just_inline": _just_inline()})
async def costly_pages_just_below_the_inline_bound_at_once(scene: Scene) -> None:
    tool = await scene.define({"jina": {"mode": "reader"}})
    arguments = {"url": "https://example.com/attack-just_inline/{n}"}
    for answer in await scene.calls(scene.scaled(PAGES), tool, arguments):
        assert_succeeded(answer)


@CASES.case("own", lambda: {"busy": response(b'{"code":503,"status":50300}', 503)})
async def failing_batches_at_once(scene: Scene) -> None:
    """Each of their pages is requested several times."""
    tool = await scene.define({"jina": {"mode": "reader", "tool": "jina.read_many"}})
    urls = [f"https://example.com/attack-busy/{{n}}/{number}" for number in range(10)]
    for answer in await scene.calls(scene.scaled(400), tool, {"urls": urls}):
        assert_failed(answer, *_FAILED)


TOKENS = (b"-5", b"1" + b"0" * 400, b"1e308", b"true", b'"7"', b"[]", b"1.5", b"9223372036854775808", b"-1e400")


def _token_answers() -> Mapping[str, bytes]:
    return {
        f"tokens_{number}": response(
            b'{"code":200,"data":{"content":"x","url":"u"},"meta":{"usage":{"tokens":%b}}}' % tokens
        )
        for number, tokens in enumerate(TOKENS)
    }


@CASES.case("smaller", _token_answers)
async def invalid_token_counts(scene: Scene) -> None:
    for name in _token_answers():
        answer = await scene.read(f"https://example.com/attack-{name}")
        assert_succeeded(answer)
        tokens = answer.card["metadata"]["tool_output"]["usage"]["tokens"]
        assert isinstance(tokens, int)
        assert 0 <= tokens < 10**15


@CASES.case(
    "own",
    lambda: {
        "half": page(content="x")[:-20],
        "lengths": response(b"{}", headers="Content-Length: 5\r\n"),
        "headers_many": response(b"{}", headers="X-Header: x\r\n" * 5_000),
        "header_long": response(b"{}", headers=f"X-Header: {'x' * 1_000_000}\r\n"),
        "packed": response(b"\x1f\x8b" + b"x" * 1_000, headers="Content-Encoding: gzip\r\n"),
        "redirect": response(b"", 302, "Location: http://127.0.0.1:1/\r\n"),
        "cookie": response(b'{"data":{"content":"c"}}', headers="Set-Cookie: a=b; Domain=jina.ai\r\n"),
        "no_http": b"\x00\x01\x02" * 1_000 + b"\r\n\r\n",
        "informational": b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 20_000 + page(content="x"),
        "chunks_of_nothing": _CHUNKED + b"1\r\n \r\n" * 500_000 + b"0\r\n\r\n",
    },
)
async def odd_http_responses(scene: Scene) -> None:
    plain = ("half", "lengths", "headers_many", "header_long", "packed", "redirect", "cookie", "no_http")
    names = (*plain, "informational", "chunks_of_nothing")
    reader = await scene.define({"jina": {"mode": "reader"}, "suspend_timeout_seconds": 5})
    calls = [scene.call(reader, {"url": f"https://example.com/attack-{name}", "timeout": 4}) for name in names]
    for answer in await asyncio.gather(*calls):
        content = content_of(answer)
        assert content["status"] in ("success", "failed", "timeout")


@CASES.case(
    "14.5",
    lambda: {"unasked": page(content="asked"), "unasked.late": page(content="an answer to no request of this call")},
)
async def responses_without_a_request(scene: Scene) -> None:
    """Each arrives on an idle connection."""
    reader = await scene.define({"jina": {"mode": "reader"}})
    for number in range(10):
        await scene.call(reader, {"url": f"https://example.com/attack-unasked/{number}"})
        await scene.received(LATE, number + 1)
        answer = await scene.call(reader, {"url": f"https://example.com/ordinary/{number}"})
        assert "to no request" not in assert_succeeded(answer)


HELD_PAGES = 10
NEIGHBOUR = "proj_neighbour"


@CASES.case(
    "14.2",
    lambda: {
        "held": b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + b'{"data":{"content":"' + b"x" * 70_000,
        "held.drip": b"x",
        "neighbour": page(content=fill("word ", 200_000)),
    },
)
async def responses_that_reserve_memory_and_stall(scene: Scene) -> None:
    """Each declares 10 MB, sends 70 kB, then single bytes."""
    many = await scene.define({"jina": {"mode": "reader", "tool": "jina.read_many"}})
    await scene.caller.set_up_project(
        NEIGHBOUR, "agent", [{"tool_name": "read", "target_subject": "x", "options": READER}]
    )
    await scene.caller.listen(f"cg.{scene.caller.version}.{NEIGHBOUR}.*.cmd.agent.*.wakeup")
    for batch in range(3):
        urls = [f"https://example.com/attack-held/{batch}/{number}" for number in range(HELD_PAGES)]
        await scene.place(many, {"urls": urls, "timeout": 8})
    await scene.received(b"attack-held", 3 * HELD_PAGES)
    for number in range(5):
        url = f"https://example.com/attack-neighbour/{number}"
        call = await scene.caller.place(NEIGHBOUR, "agent", "read", {"url": url})
        assert_succeeded(await scene.caller.result(call, NEIGHBOUR_S))


HINTS = b"HTTP/1.1 103 E\r\n\r\n" * 14_000


@CASES.case(
    "14.4",
    lambda: {
        "hints": b"HTTP/1.1 103 E\r\n\r\n",
        "hints.endless": HINTS,
        "hints_after": page(content="asked"),
        "hints_after.endless": HINTS,
    },
)
async def endless_informational_responses(scene: Scene) -> None:
    """Those after a response may arrive while the next call waits on its connection, and are then taken for its own."""
    reader = await scene.define({"jina": {"mode": "reader"}, "suspend_timeout_seconds": 5})
    for answer in await scene.calls(4, reader, {"url": "https://example.com/attack-hints/{n}", "timeout": 4}):
        assert_failed(answer, "upstream_unavailable")
    arguments = {"url": "https://example.com/attack-hints_after/{n}", "timeout": 4}
    statuses = []
    for answer in await scene.calls(4, reader, arguments):
        statuses.append(content_of(answer)["status"])
        if statuses[-1] == "success":
            assert "asked" in assert_succeeded(answer)
        else:
            assert_failed(answer, "upstream_unavailable")
    assert "success" in statuses


HEAD_BATCHES = 30


@CASES.case(
    "14.3",
    lambda: {
        "heads": response(b"x", headers="".join(f"X-{number}: {'h' * 8_100}\r\n" for number in range(96)))[:-1],
    },
)
async def response_headers_that_fill_the_memory(scene: Scene) -> None:
    """Each has nearly the maximum number of headers of nearly maximum length, and a body that does not arrive."""
    many = await scene.define({"jina": {"mode": "reader", "tool": "jina.read_many"}})
    batches = [
        [f"https://example.com/attack-heads/{batch}/{number}" for number in range(10)]
        for batch in range(scene.scaled(HEAD_BATCHES))
    ]
    calls = [await scene.place(many, {"urls": urls, "timeout": scene.scaled(8)}) for urls in batches]
    for call in calls:
        assert_failed(await scene.caller.result(call, ANSWER_S), "upstream_unavailable", "tool_timeout")


@CASES.case(
    "14.5",
    lambda: {
        "again": page(content="asked"),
        "again.endless": page(content="an answer to no request of this call") * 500,
    },
)
async def endless_responses(scene: Scene) -> None:
    """The surplus is not read; while the next call waits, it cannot be distinguished from that call's response."""
    reader = await scene.define({"jina": {"mode": "reader"}, "suspend_timeout_seconds": 5})
    for answer in await scene.calls(8, reader, {"url": "https://example.com/attack-again/{n}", "timeout": 4}):
        assert content_of(answer)["status"] in ("success", "failed", "timeout")
