"""Distinctive secrets, and a search for them that shares nothing with the redactor."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

_SPECIALS = "+/=%&<>~ "
"""Between head and tail: what every encoding writes differently."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A secret of two distinctive halves; one half in an output is a leak as well."""

    head: str
    specials: str
    tail: str

    @property
    def value(self) -> str:
        """What is set."""
        return f"{self.head}{self.specials}{self.tail}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """What is searched for: all of it, and each half."""
        return self.value, self.head, self.tail


def new_canary(specials: str = _SPECIALS) -> Canary:
    """A secret that stands nowhere else."""
    return Canary(f"Canary{secrets.token_hex(10)}", specials, f"{secrets.token_hex(10)}yranaC")


def _aligned(before: int, encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    """Base64 of a text behind so many bytes, without the characters that its neighbours decide."""

    def encoded(text: str) -> str:
        whole = encode(b"\0" * before + text.encode())
        return whole[4 if before else 0 :].decode().rstrip("=")[:-1]

    return encoded


_WHOLE: Mapping[str, Callable[[str], str]] = {
    "exact": str,
    "percent": lambda text: quote(text, safe=""),
    "percent_path": quote,
    "form": quote_plus,
    "json": lambda text: json.dumps(text)[1:-1],
    "json_twice": lambda text: json.dumps(json.dumps(text))[3:-3],
    "repr": lambda text: repr(text)[1:-1],
}
ENCODINGS: Mapping[str, Callable[[str], str]] = {
    **_WHOLE,
    **{f"base64_{before}": _aligned(before, base64.b64encode) for before in range(3)},
    **{f"base64url_{before}": _aligned(before, base64.urlsafe_b64encode) for before in range(3)},
}
"""What is searched for."""


def spoken(canary: Canary) -> list[str]:
    """A canary as others may write it, alone and inside longer texts."""
    texts = [f"{before}{canary.value}{behind}" for before in ("", "u:", "me:") for behind in ("", "!")]
    encode = (*_WHOLE.values(), *(_in_base64(kind) for kind in (base64.b64encode, base64.urlsafe_b64encode)))
    return [each(text) for text in texts for each in encode]


def _in_base64(encode: Callable[[bytes], bytes]) -> Callable[[str], str]:
    return lambda text: encode(text.encode()).decode()


@dataclass(frozen=True, slots=True)
class Hit:
    """A canary, by name, that was found in a sink in some encoding."""

    canary: str
    sink: str
    encoding: str


def search(canaries: Mapping[str, Canary], sinks: Mapping[str, bytes]) -> list[Hit]:
    """Every canary in every encoding in every sink."""
    return [
        Hit(name, sink, encoding)
        for name, canary in canaries.items()
        for encoding, encode in ENCODINGS.items()
        for sink, content in sinks.items()
        if any(encode(part).encode() in content for part in canary.parts)
    ]


def planted(canaries: Mapping[str, Canary], sinks: Mapping[str, bytes]) -> bool:
    """Whether the search finds each canary in each encoding where it is put on purpose."""
    for name, canary in canaries.items():
        for encoding, encode in ENCODINGS.items():
            for sink in sinks:
                leak = b"x" * 100 + encode(canary.head).encode() + b"y" * 100
                if Hit(name, sink, encoding) not in search({name: canary}, {sink: leak}):
                    return False
    return True
