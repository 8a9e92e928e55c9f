"""Distinctive secrets, and a search for them that shares no code with the redactor."""

from __future__ import annotations

import base64
import html
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

_SPECIALS = "+/=%&<>~_ "
"""Characters between head and tail that encodings write differently."""

_DIGITS = 12
_KEPT_DIGITS = slice(2, 11)  # of a float's text: after the point, before rounded digits
_MARKDOWN = re.compile(r"([^\w\s]|_)")
"""Characters that the reader escapes in a page: punctuation may be Markdown there."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A secret of two distinctive halves; one half in an output is a leak as well."""

    head: str
    specials: str
    tail: str

    @property
    def value(self) -> str:
        """Value that is set."""
        return f"{self.head}{self.specials}{self.tail}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Texts to search for: the whole value, and each half."""
        return self.value, self.head, self.tail


def new_canary(specials: str = _SPECIALS) -> Canary:
    """Return a secret that occurs nowhere else."""
    return Canary(f"Canary{secrets.token_hex(10)}", specials, f"{secrets.token_hex(10)}yranaC")


def new_number() -> Canary:
    """Return a secret of digits only, which JSON may contain as a number that parsers round."""
    head, tail = (str(secrets.choice(range(10 ** (_DIGITS - 1), 10**_DIGITS))) for _ in range(2))
    return Canary(head, "", tail)


def _aligned(before: int, encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    """Return base64 of a text after `before` bytes, without the characters that depend on adjacent bytes."""

    def encoded(text: str) -> str:
        whole = encode(b"\0" * before + text.encode())
        return whole[4 if before else 0 :].decode().rstrip("=")[:-1]

    return encoded


def _rounded(text: str) -> str:
    """Return digits as rounded by a parser without integers of this size; other text unchanged."""
    return repr(float(text))[_KEPT_DIGITS] if text.isdigit() and len(text) > _DIGITS else text


def _each(form: str) -> Callable[[str], str]:
    """Return an encoder that uses the same escape for every character."""
    return lambda text: "".join(form.format(ord(char)) for char in text)


_WHOLE: Mapping[str, Callable[[str], str]] = {
    "exact": str,
    "lower": str.lower,
    "upper": str.upper,
    "percent": lambda text: quote(text, safe=""),
    "percent_path": quote,
    "percent_lower": lambda text: re.sub("%..", lambda escape: escape[0].lower(), quote(text, safe="")),
    "percent_all": _each("%{:02X}"),
    "form": quote_plus,
    "json": lambda text: json.dumps(text)[1:-1],
    "json_twice": lambda text: json.dumps(json.dumps(text))[3:-3],
    "json_slash": lambda text: json.dumps(text)[1:-1].replace("/", r"\/"),
    "json_units": _each("\\u{:04x}"),
    "repr": lambda text: repr(text)[1:-1],
    "bytes": _each("\\x{:02x}"),
    "markdown": lambda text: _MARKDOWN.sub(r"\\\1", text),
    "html": html.escape,
    "entity_decimal": _each("&#{};"),
    "entity_hex": _each("&#x{:x};"),
    "entity_hex_upper": _each("&#x{:X};"),
    "hex": lambda text: text.encode().hex(),
    "hex_upper": lambda text: text.encode().hex().upper(),
}
ENCODINGS: Mapping[str, Callable[[str], str]] = {
    **_WHOLE,
    "rounded": _rounded,
    **{f"base64_{before}": _aligned(before, base64.b64encode) for before in range(3)},
    **{f"base64url_{before}": _aligned(before, base64.urlsafe_b64encode) for before in range(3)},
}
"""Encodings to search for."""


def encoded_forms(canary: Canary) -> list[str]:
    """Return a canary in encodings that others may use, alone and inside longer texts."""
    texts = [f"{before}{canary.value}{behind}" for before in ("", "u:", "me:") for behind in ("", "!")]
    in_base64 = [_in_base64(kind) for kind in (base64.b64encode, base64.urlsafe_b64encode)]
    return [
        *(encode(text) for text in (texts[0], texts[-1]) for encode in _WHOLE.values()),
        *(encode(text) for text in texts for encode in in_base64),
    ]


def _in_base64(encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    return lambda text: encode(text.encode()).decode()


@dataclass(frozen=True, slots=True)
class Hit:
    """A canary, by name, that was found in a sink in some encoding."""

    canary: str
    sink: str
    encoding: str


def search(canaries: Mapping[str, Canary], sinks: Mapping[str, bytes]) -> list[Hit]:
    """Search every sink for every canary in every encoding."""
    hits = []
    for name, canary in canaries.items():
        for encoding, encode in ENCODINGS.items():
            needles = {encode(part).encode() for part in canary.parts}
            hits += [
                Hit(name, sink, encoding)
                for sink, content in sinks.items()
                if any(needle in content for needle in needles)
            ]
    return hits


def planted(canaries: Mapping[str, Canary]) -> bool:
    """Check that the search finds each canary and each half of it in each encoding if it is planted."""
    for name, canary in canaries.items():
        for encoding, encode in ENCODINGS.items():
            leaks = {part: b"x" * 100 + encode(part).encode() + b"y" * 100 for part in canary.parts}
            matches = search({name: canary}, leaks)
            if not {Hit(name, part, encoding) for part in canary.parts} <= set(matches):
                return False
    return True
