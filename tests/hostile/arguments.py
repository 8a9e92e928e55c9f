"""Hostile arguments, as from a model under prompt injection: mostly addresses."""

from __future__ import annotations

from tests.hostile.case import Cases
from tests.hostile.scene import Scene, assert_failed, assert_succeeded

CASES = Cases()
_LONGEST = 15_900
_ITEMS = 10
_BAD = ("bad_request", "target_refused", "blocked_target", "all_failed")

SLOW_ADDRESSES = (
    "r.jina.ai/" * 1_590 + "example.com",
    "https://r.jina.ai/" * 880 + "example.com",
    "https://" * 1_980 + "example.com",
    "http:" * 3_100 + "//example.com",
    "https%3a" * 1_980 + "//example.com",
    "'" * 7_900 + "example.com" + "'" * 7_900,
    "'\"" * 3_950 + "example.com" + "\"'" * 3_950,
    "<" * 7_900 + ">" * 7_900,
    "[" * 7_900 + "](" + "x" * 7_900,
    "[a](" * 3_900 + ")",
    "[a](b " + '"' * 15_000 + ")",
    "https://" + "a." * 7_900 + "com/",
    "https://" + "a" * 15_000 + ".com/",
    "https://" + "\ufdfa" * 1_700 + ".com/",
    "https://" + "xn--a." * 2_600 + "com/",
    "https://" + "0x." * 5_200 + "1/",
    "https://" + "1" * 15_000 + "/",
    "https://[" + "1:" * 7_500 + "]/",
    "https://" + "%31" * 5_200 + "/",
    "https://" + "\u200b" * 15_000 + "example.com/",
    "\u00a0" * 15_000,
    "https://" + "@" * 15_000,
    "https://example.com:" + "0" * 15_000,
    "//" * 7_900,
    "r.jina.ai/" * 40 + "'" * 3_000 + "r.jina.ai/" * 40,
)

LONG_ADDRESS = "https://example.com/" + "%25" * 5_200

INTERNAL = (
    *("https://[2001:db8::5efe:127.0.0.1]/", "https://[fe80::5efe:10.0.0.1]/", "https://[2a00::5efe:a00:1]/"),
    *("https://[2a00::200:5efe:7f00:1]/", "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/"),
    *("https://a.consul/", "https://a.cluster/", "https://a.svc.cluster.local/", "https://a.kube/", "https://a.test/"),
    *("https://a.invalid/", "https://a.onion/", "https://a.ONION./", "https://a.%63onsul/", "https://a\u3002consul/"),
    *("https://eu.r.jina.ai/http://127.0.0.1", "https://eu.s.jina.ai/", "eu.r.jina.ai/http://a.consul/"),
    *("https://r.jina.ai/https://eu.r.jina.ai/http://localhost/", "https://a.home.arpa/", "https://a.internal/"),
)


@CASES.case("11")
async def addresses_slow_to_parse(scene: Scene) -> None:
    for address in SLOW_ADDRESSES:
        urls = [address[:_LONGEST] + str(number) for number in range(_ITEMS)]
        assert_failed(await scene.read({"urls": urls}), *_BAD)


@CASES.case("11")
async def long_addresses(scene: Scene) -> None:
    assert_succeeded(await scene.read({"urls": [f"{LONG_ADDRESS}{number}" for number in range(_ITEMS)]}))


@CASES.case("11")
async def addresses_behind_the_reader_many_times(scene: Scene) -> None:
    urls = ["r.jina.ai/" * 1_590 + f"example.com/{number}" for number in range(_ITEMS)]
    assert_failed(await scene.read({"urls": urls}), *_BAD)


@CASES.case("11")
async def address_behind_the_reader_once(scene: Scene) -> None:
    assert_succeeded(await scene.read("https://r.jina.ai/https://example.com/once"))
    assert b"r.jina.ai/https" not in scene.sent()


@CASES.case("smaller")
async def internal_addresses(scene: Scene) -> None:
    for address in INTERNAL:
        assert_failed(await scene.read(address), *_BAD)
    assert scene.sent() == b"", "something was asked for"


@CASES.case("own")
async def arguments_of_every_shape_at_once(scene: Scene) -> None:
    """Arguments of the largest card: names, lists, texts, numbers, depth."""
    tool = await scene.define()
    texts = (
        '{"query":' + "[" * 90 + "]" * 90 + "}",
        '{"query":"' + "\\ud83d\\ude00" * 20_000 + '"}',
        '{"query":' + "9" * 100_000 + "}",
        '{"query":1e-16000}',
        '{"query":"x","count":' + "1" * 4_000 + "}",
        '{"' + "a" * 200_000 + '":{"b":1},"query":"x"}',
        "{" + ",".join(f'"q{n}":"x"' for n in range(9_500)) + "}",
        '{"query":"' + "x" * 250_000 + '"}',
        '{"query":"' + "x" * 9_000_000 + '"}',
        '{"query":[' + ",".join(['"x"'] * 9_900) + "]}",
    )
    for text in texts:
        assert_failed(await scene.call_text(tool, text), "bad_request")


@CASES.case("own")
async def batch_of_too_many_queries(scene: Scene) -> None:
    many = await scene.define({"jina": {"mode": "search", "tool": "jina.search_many"}})
    assert_failed(await scene.call(many, {"queries": ["x"] * 9_000}), "bad_request")
    assert_failed(await scene.call(many, {"queries": [""] * 9_000}), "bad_request")
    assert_failed(await scene.call(many, {"queries": [{"a": n} for n in range(9_000)]}), "bad_request")
    assert scene.sent() == b"", "something was asked for"


@CASES.case("own")
async def guessed_cursors(scene: Scene) -> None:
    reader = await scene.define({"jina": {"mode": "reader"}})
    for cursor in ("", "A" * 44, "A" * 200_000, "=" * 44, "\U0001f600" * 100):
        assert_failed(await scene.call(reader, {"cursor": cursor}), "bad_request", "not_found")
