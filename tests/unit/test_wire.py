"""The parser of the NATS client protocol: any bytes, in any pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError

from openapi_tool.bus.wire import Handlers, Parser, parse_headers, shown_subject
from tests.promises import requirement

STREAM = (
    b'INFO {"max_payload": 7}\r\nPING\r\nMSG a.b 1 5\r\nhello\r\n+OK\r\nHMSG a\x0bb\xff 2 the.reply 12 14\r\n'
    b"NATS/1.0\r\n\r\nhi\r\nPONG\r\n-ERR 'Some \xffthing'\r\nMSG a\t 1  r 2\r\n\r\n\r\n"
)
EVENTS = [
    ("info", {"max_payload": 7}),
    ("ping",),
    ("message", 1, b"a.b", b"", b"hello", b""),
    ("message", 2, b"a\x0bb\xff", b"the.reply", b"hi", b"NATS/1.0\r\n\r\n"),
    ("pong",),
    ("error", "'some \\xffthing'"),
    ("message", 1, b"a", b"r", b"\r\n", b""),
]


def parsed(pieces: Sequence[bytes]) -> list[tuple[Any, ...]]:
    """What the parser makes of bytes that arrive in these pieces. Raises ProtocolError."""
    events: list[tuple[Any, ...]] = []

    def handler(kind: str) -> Any:
        async def handle(*arguments: Any) -> None:
            events.append((kind, *arguments))

        return handle

    async def parse() -> None:
        parser = Parser(Handlers(*map(handler, ("message", "ping", "pong", "error", "info"))))
        for piece in pieces:
            await parser.parse(piece)

    asyncio.run(parse())
    return events


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8))
@requirement("bus.parser")
def test_bytes_mean_the_same_in_whatever_pieces_they_arrive(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parsed([STREAM[start:end] for start, end in pairwise(edges)]) == EVENTS


@given(data=st.binary(max_size=300) | st.lists(st.sampled_from(STREAM.split(b" ")), max_size=20).map(b" ".join))
@requirement("bus.parser")
def test_any_bytes_are_messages_or_a_protocol_error(data: bytes) -> None:
    try:
        events = parsed([data])
    except ProtocolError:
        return
    assert all(event[0] in ("message", "ping", "pong", "error", "info") for event in events)


@requirement("bus.parser")
def test_a_control_line_without_an_end_is_not_kept_for_ever() -> None:
    with pytest.raises(ProtocolError):
        parsed([b"x" * 30_000] * 10)


@given(block=st.binary(max_size=400))
@requirement("wire.hostile_bytes")
def test_any_header_block_gives_headers_of_plain_names(block: bytes) -> None:
    headers = parse_headers(block)
    assert headers.complete
    assert all(name.isascii() and name == name.strip() for name in headers)


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\nA: 1\r\nB:2\r\nA:\t3 \r\n\r\n", {"A": "3", "B": "2"}),
        (b"NATS/1.0 404 No Messages\r\nA: b\r\n\r\n", {"Status": "404", "Description": "No Messages", "A": "b"}),
        (b"NATS/1.0 100\r\n\r\n", {"Status": "100"}),
        (b"NATS/1.0 4\xff4 x\r\nA: \xff\r\n: b\r\nc d: e\r\n\xff: f\r\nno colon", {"A": "\ufffd"}),
        (b"X", {}),
    ],
)
@requirement("wire.hostile_bytes")
def test_headers_and_inline_status_are_read(block: bytes, headers: dict[str, str]) -> None:
    assert parse_headers(block) == headers


@pytest.mark.parametrize(("lines", "complete"), [(255, True), (256, True), (257, False)])
@requirement("wire.headers_too_large")
def test_headers_are_read_up_to_a_number_of_lines(lines: int, complete: bool) -> None:  # noqa: FBT001 - a parameter
    headers = parse_headers(b"NATS/1.0\r\n" + b"".join(b"n%d: v\r\n" % number for number in range(lines)) + b"\r\n")
    assert (len(headers), headers.complete) == (min(lines, 256), complete)


@requirement("wire.headers_too_large")
def test_headers_are_read_up_to_a_number_of_bytes_and_never_half_a_line() -> None:
    headers = parse_headers(b"NATS/1.0\r\nA: b\r\nC: " + b"x" * 70_000 + b"\r\n\r\n")
    assert (headers, headers.complete) == ({"A": "b"}, False)


@requirement("wire.hostile_bytes")
def test_a_subject_is_shown_with_its_odd_bytes_escaped() -> None:
    assert shown_subject(b"a.\xffb\xc3\xa9".decode("utf-8", "surrogateescape")) == "a.\\xffbé"
