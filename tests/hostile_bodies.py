"""Answers of the upstream that are made to be slow or large: what an attacker can put behind an address."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

SIZE = 9_800_000
"""Bytes: just under the largest answer that is read."""

_LINK = b'"%d":"https://a.example/%d",'


def _page(content: bytes) -> bytes:
    return b'{"code":200,"data":{"title":"t","url":"https://a.example/","content":"' + content + b'"}}'


def _filled(unit: str | bytes, behind: str = "") -> Callable[[], bytes]:
    """A page whose text is one unit again and again, and something behind."""
    raw = unit.encode() if isinstance(unit, str) else unit
    return lambda: _page(raw * (SIZE // len(raw)) + behind.encode())


def _field(name: str, value: str) -> Callable[[], bytes]:
    def body() -> bytes:
        text = value * (SIZE // len(value.encode()))
        return json.dumps({"data": {"content": "x", name: text}}, ensure_ascii=False).encode()

    return body


def _results(item: bytes, before: bytes = b"", behind: bytes = b"") -> Callable[[], bytes]:
    return lambda: b'{"data":[' + before + item * (SIZE // len(item)) + b"{}" + behind + b"]}"


def _links() -> bytes:
    many = b"".join(_LINK % (number, number) for number in range(79_000))
    return b'{"data":{"content":"x","links":{' + many + b'"":""}}}'


def _hidden_links() -> bytes:
    """Texts in which each character must be looked at."""
    text = "a\u200b" * 4_000
    pairs = [[text[:1_000], f"https://a.example/{text}"]] * 550
    return json.dumps({"data": {"content": "x", "links": pairs}}, ensure_ascii=False).encode()


def _wide_results() -> bytes:
    text = "\u200ba" * 5_000
    item = dict.fromkeys(("title", "url", "description", "date", "source", "imageUrl", "warning"), text)
    links = [{"title": text, "link": text, "snippet": text}] * 3
    return json.dumps({"data": [{**item, "siteLinks": links}] * 30}, ensure_ascii=False).encode()


PAGES: Mapping[str, Callable[[], bytes]] = {
    "words": _filled("lorem ipsum dolor "),
    "lines": _filled("\\n"),
    "paragraphs": _filled("word\\n\\n"),
    "one letter": _filled("a"),
    "commas and brackets": _filled("[{,"),
    "opening brackets": _filled("["),
    "escaped quotes": _filled('\\"'),
    "backslashes": _filled("\\\\"),
    "two-byte letters": _filled("\u0436\u0436\u0436 "),
    "four-byte signs": _filled("\U0001f600"),
    "ASCII with one four-byte sign": _filled("word ", "\U0001f600"),
    "look-alikes with one four-byte sign": _filled("[web content ", "\U0001f600"),
    "keys with one four-byte sign": _filled("jina_0123456789012345678901 ", "\U0001f600"),
    "escaped letters": _filled("\\u0436"),
    "control characters": _filled("\\u0001"),
    "NUL": _filled("\\u0000"),
    "half pairs": _filled("\\ud800"),
    "look-alikes of the frame": _filled("[ [end of web content."),
    "nearly look-alikes": _filled("web[[[[[[[["),
    "web": _filled("web "),
    "nearly keys": _filled("jina_"),
    "keys": _filled("jina_0123456789012345678901234567890 "),
    "title": _field("title", "a\u200b"),
    "warning": _field("warning", "a\u2028"),
    "links": _links,
    "links without blanks": _hidden_links,
    "values": lambda: b'{"data":[' + b"{}," * (SIZE // 3) + b"{}]}",
    "texts": lambda: b'{"data":[' + b'"",' * (SIZE // 3) + b'""]}',
    "keys of one object": lambda: b'{"data":{' + b",".join(b'"%090d":1' % number for number in range(79_000)) + b"}}",
    "nesting": lambda: b'{"data":' + b"[" * SIZE + b"}",
    "a number": lambda: b'{"data":' + b"9" * SIZE + b"}",
    "no JSON": lambda: b"<html>" + b"[{," * (SIZE // 3),
    "quotation marks": lambda: b'"' * SIZE,
    "no UTF-8": _filled(b"\xff"),
}
SEARCHES: Mapping[str, Callable[[], bytes]] = {
    "empty results": lambda: b'{"data":[' + b"{}," * 26_000 + b"{}]}",
    "small results": lambda: b'{"data":[' + b'{"a":{}},' * 26_000 + b"{}]}",
    "wide results": _wide_results,
    "one result": lambda: b'{"data":[{"title":"t","content":"' + b"a [" * (SIZE // 3) + b'"}]}',
}
