"""Page addresses: unchanged, repaired, malformed, and internal ones in every notation."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import FrameType
from typing import Literal
from urllib.parse import unquote, urlsplit

import ada_url
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.jina import address_repair, page_urls, url_policy
from openapi_tool.jina.address_repair import MAX_URL_CHARS
from openapi_tool.jina.public_addresses import is_public
from openapi_tool.jina.url_policy import INTERNAL_SUFFIXES, UrlPolicy, checked_url
from openapi_tool.protocol.errors import BadRequest, TargetRefused
from tests.requirements import requirement
from tests.support import each

RULES = UrlPolicy()

# fmt: off
UNCHANGED = [
    "https://example.com", "https://example.com/", "http://example.com/a", "HTTPS://Example.COM/A",
    "https://example.com.", "https://example.com./a", "https://sub_domain.example.com/", "https://example.com:8443/a",
    "https://example.com:/a", "https://example.com:65535", "https://example.com?q=1", "https://example.com#top",
    "https://example.com/#/route?x=1", "https://example.com/a%2Fb%20c?x=%26&y=a+b", "https://example.com/%zz",
    "https://example.com/a//b/../c", "https://example.com/?next=https://127.0.0.1/@x",
    "https://example.com/http://localhost/", "https://example.com/@user/post",
    "https://en.wikipedia.org/wiki/Mercury_(planet)", "https://en.wikipedia.org/wiki/Acme_Inc.",
    "https://example.com/a,", "https://example.com/[1]",
    "https://example.com/\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    "https://example.com/strasse/\u00fc?q=\u6771\u4eac", "https://m\u00fcnchen.de/a", "https://xn--mnchen-3ya.de/a",
    "https://xn--strae-oqa.de/", "https://m%C3%BCnchen.de/", "https://\u4f8b\u3048.\u30c6\u30b9\u30c8/",
    "https://i\u2764\ufe0f.ws/", "https://8.8.8.8/", "https://8.8.8.8.:53/", "https://100.63.0.1/",
    "https://100.128.0.1/", "https://172.32.0.1/", "https://[2a00:1450:4001::8a]/",
    "https://[2606:4700:4700::1111]:8080/a", "https://[::ffff:8.8.8.8]/", "https://[64:ff9b::8.8.8.8]/",
    "https://[2002:808:808::1]/", "https://jina.ai/reader", "https://r.jina.ai.example.com/",
    "https://notlocal.example.com", "https://example.notlocal", "https://mylocalhost.com/",
    "https://localhost.example.com/", "https://10.example.com/", "https://127.0.0.1.example.com/",
    "https://[2606:4700::1]:/", "https://[::ffff:8.8.8.8]:443/", "https://[64:ff9b::808:808]/",
    "https://[2002:808:808::]/", "https://xn--oogle-qmc.com/", "https://ExAmPlE.cOm./", "https://example.com:1/",
    # the last public address before a refused network, and the first one after it
    "https://1.0.0.0/", "https://9.255.255.255/", "https://11.0.0.0/", "https://100.63.255.255/",
    "https://100.128.0.0/", "https://126.255.255.255/", "https://128.0.0.0/", "https://168.63.129.15/",
    "https://168.63.129.17/", "https://169.253.255.255/", "https://169.255.0.0/", "https://172.15.255.255/",
    "https://172.32.0.0/", "https://191.255.255.255/", "https://192.0.1.0/", "https://192.0.3.0/",
    "https://192.88.98.255/", "https://192.88.100.0/", "https://192.167.255.255/", "https://192.169.0.0/",
    "https://198.17.255.255/", "https://198.20.0.0/", "https://198.51.99.255/", "https://198.51.101.0/",
    "https://203.0.112.255/", "https://203.0.114.0/", "https://223.255.255.255/", "https://[2000::]/",
    "https://[2001:200::]/", "https://[2001:db7:ffff::]/", "https://[2001:db9::]/", "https://[3ffe::]/",
    "https://[3fff:1000::]/",
]
# fmt: on

REPAIRED = [
    ("  https://example.com/a\n", "https://example.com/a"),
    ("\ufeffhttps://example.com/a\u00a0", "https://example.com/a"),
    ('"https://example.com/a"', "https://example.com/a"),
    ("'https://example.com/a'", "https://example.com/a"),
    ("`https://example.com/a`", "https://example.com/a"),
    ("```https://example.com/a```", "https://example.com/a"),
    ("\u201chttps://example.com/a\u201d", "https://example.com/a"),
    ("**https://example.com/a**", "https://example.com/a"),
    ("<https://example.com/a>", "https://example.com/a"),
    ("<https://example.com/a>.", "https://example.com/a"),
    ('"https://example.com/a",', "https://example.com/a"),
    ('"https://example.com/a,"', "https://example.com/a"),
    ('"https://example.com/a\u200b,"', "https://example.com/a"),
    ('"https://example.com/Acme_Inc."', "https://example.com/Acme_Inc."),
    ('" <example.com/a> "', "https://example.com/a"),
    ("[Example](https://example.com/a)", "https://example.com/a"),
    ("[Example](https://example.com/a).", "https://example.com/a"),
    ("![](https://example.com/a.png)", "https://example.com/a.png"),
    ("[https://example.com](https://example.com/a)", "https://example.com/a"),
    ('[A page](https://example.com/a "Its title")', "https://example.com/a"),
    ("[A page](<https://example.com/a>)", "https://example.com/a"),
    ("[M](https://en.wikipedia.org/wiki/Mercury_(planet))", "https://en.wikipedia.org/wiki/Mercury_(planet)"),
    ("example.com", "https://example.com"),
    ("example.com/a?b#c", "https://example.com/a?b#c"),
    ("example.com:8080/a", "https://example.com:8080/a"),
    ("8.8.8.8/a", "https://8.8.8.8/a"),
    ("//example.com/a", "https://example.com/a"),
    ("https:/example.com/a", "https://example.com/a"),
    ("http:example.com/a", "http://example.com/a"),
    ("https:///example.com/a", "https://example.com/a"),
    ("https://https://example.com/a", "https://example.com/a"),
    ("https://http://example.com/a", "http://example.com/a"),
    ("https:http://https:/example.com/a", "https://example.com/a"),
    ("https%3A%2F%2Fexample.com%2Fa%252Fb", "https://example.com/a%2Fb"),
    ("https://r.jina.ai/https://example.com", "https://example.com"),
    ("https://r.jina.ai/http://example.com/a?b=%26#/c", "http://example.com/a?b=%26#/c"),
    ("https://R.Jina.AI.:443//example.com/a", "https://example.com/a"),
    ("r.jina.ai/https://example.com/a", "https://example.com/a"),
    ("https://r.jina.ai/https%3A%2F%2Fexample.com%2Fa", "https://example.com/a"),
    ("https://r.jina.ai/https://r.jina.ai/https://example.com/a", "https://example.com/a"),
    ("https://r.jina.ai/https://r.jina.ai/https://r.jina.ai/https://example.com/a", "https://example.com/a"),
    ("https://eu.r.jina.ai/https://example.com/a", "https://example.com/a"),
    ("https://eu-r-beta.jina.ai/https://example.com/a", "https://example.com/a"),
    ('** "`https://example.com/a`",**', "https://example.com/a"),
    ("<<<https://example.com/a>>>", "https://example.com/a"),
]

# fmt: off
MALFORMED = {
    "empty": [
        "", " \n",
    ],
    "host name": [
        "https://", "https:///", "https://?q", "/docs/page", "?q=1", "#top", "../page",
        "[a](https://example.com/a)[b](https://example.com/b)", '"https://example.com","https://example.org"',
        '"', "*", "***", '"https://example.com/a', "https://example.com)", "https://example.com%40127.0.0.1/",
        "https://example.com%2Fa", "https://example.com%252Fa", "https://example.com%", "https://example.com\uff0fa",
        "https://example.com\u2100", "https://%5B2a00::1%5D/", "https://%5B2a00%3A%3A1%5D/",
        "https://example.com:99999/", "https://example.com:0/", "https://example.com:80a/",
        "https://example.com:000000080/", "https://example.com:65536/", "https://example.com:+80/",
        "https://example.com:80:80/", "https://example.com:\uff18\uff10/", "https://xn--127-/",
        "https://example..com/", "https://.example.com/", "https://example.com../",
        "https://exa!mple.com/", "https://exa\u0378mple.com/", f"https://{'a' * 64}.com/",
        f"https://{'a.' * 127}com/", "https://xn--/", "https://xn--localhost-/", "https://xn--example-.com/",
        "https://xn--99999999.com/", f"https://xn--{'z' * 70}.com/", "https://::1/", "https://[::1/",
        f"https://{'9' * 5000}/", "http\u017f%3A%2F%2Fexample.com/", "a." + "b" * 8189,
        '"https://example.com/","https://example.org/"', "<https://example.com/><b>",
    ],
    "cannot be read": [
        "ftp://example.com/", "file:///etc/passwd", "javascript:alert(1)", "JavaScript:alert(1)", "db:5432/x",
        "data:text/html,hello", "blob:https://example.com/a", "view-source:https://example.com",
        "mailto:somebody@example.com", "http\u017f://example.com/",
    ],
    "%20": [
        "https://exam ple.com/a", "https://example.com/a\nb", "https://exam\tple.com/", "https://example.com/\x00",
        "https://example.com/\x7f", "https://example.com/\u2028b", "https://example.com/\ud800",
        "https://example.com: 80/", "https://example.com\t@127.0.0.1/", "https://example.com\r\n.evil/",
        "https%3A%2F%2Fexample.com%0A%2Fa", "[a](https://example.com/a) and [b](https://example.com/b)",
    ],
    "a local file cannot be read": ["/home/me/a.pdf"],
    "backslash": [
        "https:\\\\example.com\\a", "https://example.com\\@127.0.0.1/",
        "https://127.0.0.1\\@example.com/", "https://127.0.0.1:80\\.example.com/",
    ],
    "user name": [
        "https://user@example.com/", "https://user:word@example.com/", "https://@example.com/",
        "https://:@example.com/", "https://example.com@127.0.0.1/", "https://r.jina.ai/https://user@example.com/",
        "somebody@example.com", "https://example.com%2F@x",
    ],
    "UTF-8": [
        "https://%ff.com/", "https%3A%2F%2F%ff.com", "https%3A%2F%2F%ff." + "\U0010ffff" * 80,
    ],
    "IPv6": [
        "https://[]/", "https://[::ffff:0x7f.1]/", "https://[127.0.0.1]/", "https://[v1.fe80]/",
        "https://[::\uff11]/", "https://[2606:4700::\u00b9]/", "https://[%3a%3a1]/",
    ],
    "interface": [
        "https://[2a00::1%25eth0]/",
    ],
    "IPv4": [
        "https://1.2.3.4.5/", "https://256.1.1.1/", "https://8.8.8.08/", "https://4294967296/",
        f"https://{'9' * 900}/", "https://example.123/", "https://example.0x1/",
    ],
    "8.8.8.8": [
        "https://134744072/", "https://010.8.8.8/", "https://8.8.2056/",
    ],
    "reader itself": [
        "https://r.jina.ai", "https://r.jina.ai/", "https://r.jina.ai/?url=https://example.com",
        "https://r.jina.ai?url=https://example.com", "https://r.jina.ai/#x", "https://r.jina.ai/https://r.jina.ai/",
        "https://eu.r.jina.ai/",
    ],
    "more than 3 times": [
        "https://r.jina.ai/" * 4 + "https://example.com/a", "r.jina.ai/" * 700 + "example.com/a",
        "https%3A%2F%2Fr.jina.ai/" * 300 + "https%3A%2F%2Fexample.com/",
    ],
    "search service": [
        "https://s.jina.ai/", "https://s.jina.ai/?q=x", "https://r.jina.ai/https://S.jina.ai./x",
        "https://eu.s.jina.ai/?q=x", "https://eu-s-beta.jina.ai/",
    ],
    "at most 16000": [
        f"https://example.com/{'a' * 16_000}", "example.com/" + "b" * 15_988,
    ],
}

REFUSED_HOSTS = [
    "localhost", "LOCALHOST", "localhost.", "a.localhost", "loc\u00adalhost", "\u2112ocalhost",
    "\uff4c\uff4f\uff43\uff41\uff4c\uff48\uff4f\uff53\uff54",
    "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3", "%6c%6f%63%61%6chost", "%EF%BD%8Cocalhost", "intranet",
    "db", "b\u00fccher", "xn--bcher-kva", "printer.local", "Printer.LOCAL.", "printer\u3002local", "printer%2Elocal",
    "printer.l\u200bocal", "\u00fc.internal", "api.default.svc", "api.default.svc.cluster.local", "local.home.arpa",
    "metadata.google.internal", "metadata.goog", "metadata.google.internal.", "127.0.0.1", "127.0.0.1.", "127.1",
    "127.0.1", "2130706433", "0x7f000001", "0x7F.0.0.1", "0177.0.0.1", "017700000001", "00000177.0.0.1", "0x7f.1",
    "127.0x.0.1", "0", "0x", "0.0.0.0",  # noqa: S104 - nothing is bound
    "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460",
    "127\u30020\u30020\u30021", "127\uff0e0\uff0e0\uff0e1", "127\uff610\uff610\uff611", "127.0.0.1\u200b",
    "%31%32%37.0.0.1", "%EF%BC%91%EF%BC%92%EF%BC%97.0.0.1", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "169.254.170.2", "2852039166", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192",
    "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::127.0.0.1]", "[::ffff:127.0.0.1]",
    "[::FFFF:7f00:1]", "[::ffff:0:127.0.0.1]", "[64:ff9b::10.0.0.1]", "[64:ff9b:1::8.8.8.8]", "[2002:7f00:1::]",
    "[2002:c0a8:101::1]", "[2001::1]", "[2001:db8::1]", "[3fff::1]", "[100::1]", "[fc00::1]", "[fd00:ec2::254]",
    "0x7f.0x0.0x0.0x1", "0300.0250.0.1", "0xA9FEA9FE", "[0:0:0:0:0:ffff:7f00:1]", "[64:ff9b::7f00:1]",
    "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::]", "[::FFFF:C0A8:0101]", "lo%63alhost", "\u202elocalhost", "10.0.0.0",
    "10.255.255.255", "127.255.255.255", "169.254.0.0", "169.254.255.255", "172.16.0.0", "192.168.0.0",
    "192.168.255.255", "100.127.255.255", "198.19.255.255", "192.0.0.255", "192.0.2.255", "198.51.100.255",
    "203.0.113.255", "0.255.255.255", "[1fff:ffff::1]", "[4000::]", "[2001:1ff:ffff::]", "[2001:db8:ffff::]",
    "[3fff:fff::]", "[fdff:ffff::]", "[febf::1]", "[ffff::]",
    "db.consul", "web.service.consul", "a.cluster", "kube-dns.kube", "a.test", "site.fixture.test", "a.invalid",
    "expyuzz4wqqyqhjn.onion", "a.alt", "a.mail", "ipv4only.arpa", "1.0.0.127.in-addr.arpa", "home.arpa", "a.lan.",
    "A.Consul", "a.c\u2092nsul", "xn--bcher-kva.test", "[2a00::5efe:8.8.8.8]", "[2a00::200:5efe:10.0.0.1]",
    "[2a00::5efe:7f00:1]", "[2a00:1:2:3:0200:5EFE:c0a8:101]", "[2002:808:808::5efe:a00:1]", "[2001:0:4136:e378::1]",
    "[fe80::1]", "[fe80::1%25eth0]", "[fe80::1%eth0]", "[fec0::1]", "[ff02::1]",
]
# fmt: on


@each("url", UNCHANGED)
@requirement("url.checked")
def test_a_good_url_is_sent_byte_for_byte(url: str) -> None:
    assert checked_url(url, RULES) == url


@each(("text", "url"), REPAIRED)
@requirement("url.checked")
def test_plain_intent_is_repaired(text: str, url: str) -> None:
    assert checked_url(text, RULES) == url
    assert checked_url(url, RULES) == url


@each(("text", "part"), [(text, part) for part, texts in MALFORMED.items() for text in texts])
@requirement("url.checked")
def test_what_is_no_web_address_is_refused_with_the_reason(text: str, part: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        checked_url(text, RULES)
    assert refusal.value.message.startswith("url: ")
    assert part in refusal.value.message
    assert len(refusal.value.message) < 400
    assert refusal.value.message.isprintable()


@each("host", REFUSED_HOSTS)
@requirement("url.checked")
def test_an_internal_host_is_refused_in_every_spelling(host: str) -> None:
    for url in (
        f"https://{host}",
        f"http://{host}:8080/a?b",
        f"//{host}/a",
        f"https://r.jina.ai/http://{host}/",
        f"https://eu.r.jina.ai/http://{host}/",
    ):
        with pytest.raises(TargetRefused, match="public page"):
            checked_url(url, RULES)


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:3000/a", "[::1]:80", "10.0.0.1:80", "<http://a.local>", "https://" * 4 + "a.com"]
)
@requirement("url.checked")
def test_repaired_url_is_checked_too(text: str) -> None:
    with pytest.raises(TargetRefused):
        checked_url(text, RULES)


FORBIDDEN = [char for char in map(chr, range(0x110000)) if char.isspace() or unicodedata.category(char) in ("Cc", "Cs")]


@requirement("url.checked")
def test_every_blank_and_control_character_of_unicode_is_refused_or_encoded() -> None:
    for char in FORBIDDEN:
        if char in " \u00a0":
            assert checked_url(f"https://example.com/a{char}b", RULES) == "https://example.com/a%20b"
            continue
        with pytest.raises(BadRequest, match="%20"):
            checked_url(f"https://example.com/a{char}b", RULES)


LENGTH = MAX_URL_CHARS


def filled(piece: str, head: str = "", tail: str = "") -> str:
    """Return head, as many pieces as fit in a text of maximum length, and tail."""
    return head + piece * ((LENGTH - len(head) - len(tail)) // len(piece)) + tail


# Each text took quadratic time, or exercises a loop, a pattern or a library that might take it.
LABORIOUS = {
    "reader prefixes": filled("r.jina.ai/", tail="example.com"),
    "reader prefixes with a scheme": filled("https://r.jina.ai/", tail="example.com"),
    "encoded reader prefixes": filled("https%3A%2F%2Fr.jina.ai/", tail="example.com"),
    "slashes behind the reader": filled("/", "https://r.jina.ai", "x"),
    "schemes": filled("http:", tail="//example.com"),
    "schemes with slashes": filled("https:///", tail="example.com"),
    "slashes behind the scheme": filled("/", "http:", "x"),
    "asterisks": filled("*"),
    "asterisks around": "*" * 7_990 + "https://a.com" + "*" * 7_990,
    "angle brackets around": "<" * 7_990 + "https://a.com" + ">" * 7_990,
    "quotes of all kinds around": "<\"'`*" * 1_500 + "https://a.com" + "*`'\">" * 1_500,
    "brackets with blanks around": "< " * 3_990 + "https://a.com" + " >" * 3_990,
    "punctuation": filled(".,;:!?", "https://a.com/"),
    "an open link text": filled("[", tail="](https://a.com)"),
    "links": filled("[a](b)"),
    "quotes in a link": filled('"', "[a](x ", ")"),
    "blanks in a link": filled(" ", "[a](x", ")x"),
    "closing parentheses": filled(")", "[a](x", "x"),
    "a long label": filled("a", "https://"),
    "labels": filled("a.", "https://", "com"),
    "dots": filled(".", "https://"),
    "characters that fold to many": filled("\ufdfa", "https://", ".com"),
    "combining marks": filled("\u0315\u0300", "https://a", ".com"),
    "combining marks that fold to two": filled("\u0344\u0327", "https://a", ".com"),
    "encoded combining marks": filled("%CC%95%CC%80", "https://a", ".com"),
    "international labels": filled("xn--a.", "https://", "com"),
    "escapes of the host": filled("%61", "https://"),
    "percent signs": filled("%", "https://"),
    "digits": filled("9", "https://"),
    "parts of an address": filled("1.", "https://", "1"),
    "ignored characters": filled("\u00ad", "https://", "a.com"),
    "an IPv6 zone": filled("a", "https://[::1%", "]"),
    "colons": filled(":", "https://"),
    "at signs": filled("@", "https://"),
    "an encoded URL": filled("%41", "https%3A%2F%2Fa.com%2F"),
    "another scheme": filled("a-", tail=":"),
}
CALLS = 2_000
"""More steps than any text needs (a host of 1,024 characters has 512 labels), but far fewer than one per character."""
CHECKING_FILES = {address_repair.__file__, page_urls.__file__, url_policy.__file__}


@pytest.mark.parametrize("text", LABORIOUS.values(), ids=LABORIOUS)
@requirement("url.checked")
def test_long_text_is_checked_in_a_bounded_number_of_steps(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[int] = []
    normalize = unicodedata.normalize

    def measured(form: Literal["NFKC"], part: str) -> str:
        folded.append(len(part))
        return normalize(form, part)

    monkeypatch.setattr(unicodedata, "normalize", measured)
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename in CHECKING_FILES

    sys.setprofile(count)
    try:
        with suppress(BadRequest, TargetRefused):
            checked_url(text, UrlPolicy())
    finally:
        sys.setprofile(None)
    assert calls < CALLS
    assert sum(folded) < 2 * LENGTH


@requirement("url.checked")
def test_the_length_is_bounded() -> None:
    url = f"https://example.com/{'x' * (MAX_URL_CHARS - 20)}"
    assert checked_url(url, UrlPolicy()) == url
    with pytest.raises(BadRequest, match="has 16001 characters, at most 16000"):
        checked_url(f"{url}x", UrlPolicy())


@pytest.mark.parametrize("suffix", [".intra.example.com", "intra.example.com", ".INTRA.example.com"])
@requirement("url.checked")
def test_an_operator_names_internal_suffixes(suffix: str) -> None:
    rules = UrlPolicy((suffix,))
    for host in ("wiki.intra.example.com", "intra.example.com"):
        with pytest.raises(TargetRefused):
            checked_url(f"https://{host}/", rules)
    assert checked_url("https://myintra.example.com/", rules)


@requirement("url.checked")
def test_an_operators_suffixes_are_added_to_the_built_in_ones() -> None:
    with pytest.raises(TargetRefused):
        checked_url("https://printer.local/", UrlPolicy((".corp.example.com",)))


@requirement("url.checked")
def test_operator_can_allow_a_suffix() -> None:
    rules = UrlPolicy(allow=(".Fixture.test",))
    for host in ("fixture.test", "site.fixture.test", "a.site.FIXTURE.test."):
        assert checked_url(f"http://{host}/a", rules) == f"http://{host}/a"
    for host in ("a.test", "notfixture.test", "fixture.test.local"):
        with pytest.raises(TargetRefused):
            checked_url(f"http://{host}/a", rules)


@pytest.mark.parametrize(
    ("allowed", "host", "others"),
    [
        ("wiki.local", "WIKI.local.", ("a.wiki.local", "iki.local")),
        ("localhost", "localhost", ("a.localhost",)),
        ("b\u00fccher", "xn--bcher-kva", ("bucher",)),
        ("10.0.0.5", "10.0.0.5", ("10.0.0.6", "[::ffff:10.0.0.5]")),
        ("[FD00:0::5]", "[fd00::5]", ("[fd00::6]",)),
        ("fd00::5", "[fd00::0:5]", ("[fd00::50]",)),
    ],
)
@requirement("url.checked")
def test_operator_can_allow_exact_hosts(allowed: str, host: str, others: tuple[str, ...]) -> None:
    rules = UrlPolicy(allow=(allowed,))
    assert checked_url(f"http://{host}:8080/a", rules) == f"http://{host}:8080/a"
    for other in others:
        with pytest.raises(TargetRefused):
            checked_url(f"http://{other}:8080/a", rules)


# fmt: off
PIECES = [
    "http", "https", "HTTPS", "ftp", "javascript", "://", ":", "/", "//", "\\", "@", "?", "#", "%", "%2F", "%40",
    "%31", "%3A%2F%2F", "https%3A%2F%2F", "[", "]", "(", ")", "](", "<", ">", '"', "'", "`", "*", " ", "\n", "\t",
    "\x00", "\u200b", "\ufeff", "\u00ad", "\u3002", "\uff0e", "\uff0f", "\uff11", "\u2488", "\ud800", ".", "..", ",",
    ";", "example", "com", "example.com", "localhost", "local", "svc", "xn--", "xn--mnchen-3ya", "r.jina.ai",
    "s.jina.ai", "127", "0", "1", "0x", "0x7f", "08", "10.0.0.1", "8.8.8.8", "::", "::1", "2a00::1", "fe80",
    "%25eth0", ":80", "https://", "https://r.jina.ai/", "https://example.com/", "metadata.google.internal",
]
# fmt: on
texts = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)
v6_urls = st.ip_addresses(v=6).map(lambda address: f"https://[{address}]/")


def assert_public(url: str) -> None:
    """Check a URL with the standard library's parser and its lists of addresses, independently of the tested code."""
    parts = urlsplit(url)
    assert parts.scheme in ("http", "https")
    assert parts.username is None
    assert parts.password is None
    assert not any(char.isspace() or unicodedata.category(char) == "Cc" for char in url)
    assert "\\" not in url
    host = unicodedata.normalize("NFKC", unquote(parts.hostname or "")).lower()
    host = host.replace("\u3002", ".").removesuffix(".")
    assert "." in host or ":" in host
    assert not host.endswith(INTERNAL_SUFFIXES)
    assert host not in ("r.jina.ai", "s.jina.ai")
    try:
        address = ip_address(host)
    except ValueError:
        return
    address = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None) or address
    compatible = isinstance(address, IPv6Address) and address.packed.startswith(bytes(12))
    assert address.is_global or (compatible and IPv4Address(address.packed[12:]).is_global)


@given(texts | texts.map("https://".__add__) | v6_urls)
@requirement("url.checked")
def test_any_text_gives_a_public_url_or_one_of_two_errors(text: str) -> None:
    try:
        url = checked_url(text, RULES)
    except (BadRequest, TargetRefused) as refusal:
        assert refusal.message.startswith("url: ")
        assert refusal.message.isprintable()
        return
    assert_public(url)
    assert checked_url(url, RULES) == url


HOST_PARTS = (
    *(
        "127",
        "0",
        "1",
        "0x7f",
        "0177",
        "192.168",
        "169.254",
        "256",
        "4294967295",
        "0x",
        "localhost",
        "local",
        "internal",
    ),
    *(
        "metadata",
        "google",
        "example",
        "com",
        "r.jina.ai",
        "s.jina.ai",
        ".",
        "..",
        "-",
        "_",
        "[::1]",
        "[",
        "]",
        "::",
        ":80",
    ),
    *(
        "xn--",
        "xn--zca",
        "xn--11b5bs3a9aj6g",
        "xn--ls8h",
        "xn--a",
        "%2e",
        "%31",
        "%00",
        "%EF%BC%8E",
        "%e3%80%82",
        "a",
        "+",
    ),
    *("\u2460", "\uff12", "\uff0e", "\u3002", "\u2024", "\u2488", "\u2100", "\u00df", "\u1e9e", "\ufb00", "\u0131"),
    *("\u0130", "\u00ad", "\u200d", "\u200c", "\u24db", "\u212a", "\u017f", "\uff41", "\u0301", "\u0661", "\u2066"),
    *("\ufe0f", "\u115f", "\u65e5", "\U0001d7cf", "\U0001f642"),
)
ENDS = ("", "", ".com", ".com.", ".local", ".", ".0.0.1", ".1")


@requirement("url.checked")
def test_each_host_that_passes_is_public_for_the_parser_of_node_too() -> None:
    """The reader runs on Node.js, whose parser of URLs is Ada. A host that Ada finds invalid reaches nothing."""
    chance, passed = random.Random(7), 0  # noqa: S311 - no secret
    for _ in range(60_000):
        host = "".join(chance.choices(HOST_PARTS, k=chance.randint(1, 5))) + chance.choice(ENDS)
        try:
            found = ada_url.URL(checked_url(f"http://{host}/", RULES)).hostname.removesuffix(".")
        except (BadRequest, TargetRefused, ValueError):
            continue
        passed += 1
        try:
            assert is_public(ip_address(found.strip("[]"))), ascii(host)
        except ValueError:
            assert "." in found, ascii(host)
            assert not f".{found}".endswith((*INTERNAL_SUFFIXES, ".r.jina.ai", ".s.jina.ai")), ascii(host)
    assert passed > 1_000


@given(texts)
@requirement("url.checked")
def test_a_public_host_with_any_proper_rest_is_unchanged(rest: str) -> None:
    clean = "".join(char for char in rest if unicodedata.category(char)[0] not in "CZ" and char != "\\")
    url = f"https://example.com/{clean}"
    assert checked_url(url, RULES) == url


@given(texts)
@requirement("url.checked")
def test_wrappers_do_not_change_what_is_inside(rest: str) -> None:
    url = "https://example.com/" + "".join(char for char in rest if char.isalnum() or char in "/?#%.()=&")
    for wrapped in (f'"{url}"', f"<{url}>", f"`{url}`", f"[a page]({url})", f" {url}\n", f"https://r.jina.ai/{url}"):
        assert checked_url(wrapped, RULES) == url


def part_encodings(value: int) -> list[str]:
    return [str(value), hex(value), f"0X{value:X}", f"0x000{value:x}", f"0{value:o}", f"000{value:o}"]


@st.composite
def v4_hosts(draw: st.DrawFn, networks: tuple[str, ...]) -> str:
    """Draw an address of the networks in one to four parts, each in one of its notations, then disguise it."""
    address = draw(st.one_of([st.ip_addresses(network=network) for network in networks]))
    data = address.packed
    front = draw(st.integers(0, 3))
    values = [*data[:front], int.from_bytes(data[front:], "big")]
    host = ".".join(draw(st.sampled_from(part_encodings(value))) for value in values) + draw(st.sampled_from(["", "."]))
    return "".join(draw(st.sampled_from(disguises(char))) for char in host)


def disguises(char: str) -> list[str]:
    if char == ".":
        return [".", ".", "\u3002", "\uff0e", "\uff61", "%2E", "%2e", "%E3%80%82"]
    wide = chr(ord(char) + 0xFEE0)
    return [
        char,
        char,
        char,
        wide,
        f"%{ord(char):02x}",
        f"\u00ad{char}",
        "".join(f"%{byte:02X}" for byte in wide.encode()),
    ]


V6_WITH_V4: list[Callable[[IPv4Address], IPv6Address]] = [
    lambda inner: IPv6Address(int(inner)),
    lambda inner: IPv6Address((0xFFFF << 32) | int(inner)),
    lambda inner: IPv6Address((0x64FF9B << 96) | int(inner)),
    lambda inner: IPv6Address((0x2002 << 112) | (int(inner) << 80) | 1),
]
PRIVATE = (
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "100.64.0.0/10",
    "0.0.0.0/8",
)


@given(v4_hosts(PRIVATE))
@requirement("url.checked")
def test_a_private_address_is_refused_in_any_spelling(host: str) -> None:
    with pytest.raises(TargetRefused):
        checked_url(f"http://{host}/", RULES)


@given(v4_hosts(("8.0.0.0/8", "1.1.1.0/24")))
@requirement("url.checked")
def test_a_public_address_is_sent_only_where_every_program_reads_it_alike(host: str) -> None:
    try:
        url = checked_url(f"http://{host}/", RULES)
    except BadRequest as refusal:
        assert "unusual spelling" in refusal.message
        return
    assert_public(url)


@given(st.one_of([st.ip_addresses(v=4, network=network) for network in PRIVATE]), st.sampled_from(V6_WITH_V4))
@requirement("url.checked")
def test_a_private_address_inside_an_ipv6_address_is_refused(
    inner: IPv4Address, outer: Callable[[IPv4Address], IPv6Address]
) -> None:
    for text in (str(outer(inner)), outer(inner).exploded, str(outer(inner)).upper()):
        with pytest.raises(TargetRefused):
            checked_url(f"http://[{text}]/", RULES)
