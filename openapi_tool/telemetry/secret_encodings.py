"""The forms in which a secret may occur in a text, as regular expressions: escaped, in hex, in base64, and so on.

`redact.Redactor` searches texts for them. A regular expression is slow, and a search for a literal text is fast. So
each encoding has *marks*: literal texts, one of which occurs in every match of its pattern. The pattern only runs over
a text that contains a mark. Marks are as long as possible: a search for 60 characters takes 0.05 ms/MB, for 4 ten times
that.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType

_SHORTEST_MARK = 3
_FLOAT_DIGITS = 15  # significant digits that every float formatter preserves
_MIN_DIGITS = 5  # fewer occur in too many other numbers
_HEX = re.compile(r"[0-9a-f]{2,}")

# Nested escapes: JSON in JSON doubles backslashes, a URL in a URL escapes percent signs, HTML in HTML ampersands.
_PERCENT = r"%(?:25){0,3}"  # %, %25, %2525
_AMPERSAND = rf"(?:&(?:amp;){{0,3}}|{_PERCENT}26(?:amp(?:;|{_PERCENT}3[Bb])){{0,3}})"  # &, &amp;, %26, %26amp%3B
_SEMICOLON = rf"(?:;|{_PERCENT}3[Bb])?"  # ;, %3B, or left out
_NUMBER = rf"(?:#|{_PERCENT}23)"  # the # of an entity such as &#65;
_BACKSLASH = rf"(?:\\|{_PERCENT}5[Cc]|{_AMPERSAND}{_NUMBER}(?:0{{0,6}}92|x0{{0,6}}5c){_SEMICOLON})"  # \, %5C, &#92;
_ENTITY_NAMES = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}


@dataclass(frozen=True)
class Encoding:
    """One encoding of a secret: its marks, and the source of its pattern.

    Without marks the pattern runs over every text.
    """

    marks: tuple[str, ...]
    source: str
    flags: re.RegexFlag = re.IGNORECASE

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled on first use: that takes milliseconds, and most secrets never occur."""
        return re.compile(self.source, self.flags)


@lru_cache(maxsize=1_024)
def encodings_of(secret: str) -> tuple[Encoding, ...]:
    """Return the encodings of a secret, which must not be empty."""
    value = secret.encode("utf-8", "surrogatepass")
    codes = [ord(char) for char in secret]
    # Each character or byte in the same form: what is escaped, and how.
    uniform_escapes = (
        ("%{:02x}", value),
        ("\\x{:02x}", value),
        ("\\u{:04x}", _utf16_units(secret)),
        ("&#{};", codes),
        ("&#x{:x};", codes),
    )
    return (
        _escaped(secret),
        *(_uniform("".join(map(escape.format, units))) for escape, units in uniform_escapes),
        Encoding(_cases(value.hex()), value.hex()),
        *_rounded(secret),
        *(_escaped(text, {"+": "[-+]", "/": "[/_]"}, any_case=False) for text in _base64(value)),
    )


def _escaped(text: str, literals: Mapping[str, str] = MappingProxyType({}), *, any_case: bool = True) -> Encoding:
    """Return the encoding in which each character that is no letter or digit is plain or escaped in some way.

    `literals` has patterns for such characters that may also be plain in another form.
    """
    plain_runs = ["".join(group) for is_plain, group in groupby(text, _is_plain) if is_plain]
    mark = max(plain_runs, key=len, default="")  # the longest part that no escape changes
    marks: tuple[str, ...] = ()
    if len(mark) >= _SHORTEST_MARK:
        marks = _cases(mark) if any_case else (mark,)
    return Encoding(marks, "".join(_repeated(char, len(list(group)), literals) for char, group in groupby(text)))


def _is_plain(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _repeated(char: str, count: int, literals: Mapping[str, str]) -> str:
    """Return the pattern of a character that follows itself `count` times."""
    if char == "\\":  # with one repeat each, matching would backtrack exponentially
        return f"{_BACKSLASH}{{{count},{8 * count}}}"
    if _is_plain(char):
        return count * char
    forms = _forms(char, literals.get(char, re.escape(char)))
    return count * f"(?:{'|'.join(forms)})"


def _forms(char: str, literal: str) -> Iterator[str]:
    """Yield patterns of a character: `literal` or escaped, also behind backslashes."""
    code = ord(char)
    value = char.encode("utf-8", "surrogatepass")
    named = f"|{_AMPERSAND}{_ENTITY_NAMES[char]}{_SEMICOLON}" if char in _ENTITY_NAMES else ""  # &amp;
    entity = f"{_AMPERSAND}{_NUMBER}(?:0{{0,6}}{code}|x0{{0,6}}{code:x}){_SEMICOLON}"  # &#38; or &#x26;
    percent = "".join(f"{_PERCENT}{byte:02x}" for byte in value)  # %26
    yield f"{_BACKSLASH}{{0,8}}(?:{literal}|{entity}|{percent}{named})"
    if char == " ":
        yield r"\+"  # in a URL's query
    yield "".join(f"{_BACKSLASH}{{1,8}}x{byte:02x}" for byte in value)  # \x26 for each byte in UTF-8
    yield "".join(f"{_BACKSLASH}{{1,8}}u{unit:04x}" for unit in _utf16_units(char))  # \u0026 for each unit in UTF-16
    yield f"{_BACKSLASH}{{1,8}}(?:x{code:02x}|u\\{{?0{{0,4}}{code:x}\\}}?)"  # \x26 or \u{26} for the character


def _utf16_units(text: str) -> list[int]:
    raw = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


def _uniform(form: str) -> Encoding:
    """Return the encoding of one literal text, whose hex digits may be in upper case, too: `%6b%65` and `%6B%65`."""
    upper = _HEX.sub(lambda digits: digits[0].upper(), form)
    return Encoding(_without_repeats(form, upper), re.escape(form))


def _cases(text: str) -> tuple[str, ...]:
    return _without_repeats(text, text.lower(), text.upper())


def _without_repeats(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _rounded(secret: str) -> Iterator[Encoding]:
    """Yield the encodings of a decimal secret written as a float, rounded to 15 to 17 digits.

    For example a parser may read the secret 12345678901234567 as a number, and print 1.2345678901234568e+16.
    """
    if not (secret.isascii() and secret.isdecimal() and len(secret) > _FLOAT_DIGITS):
        return
    number = float(secret)
    texts = (secret, f"{number:.0f}", *(f"{number:.{digits}e}" for digits in (14, 15, 16)), repr(number))
    for digits in sorted({_leading_digits(text) for text in texts}):
        first, others = digits[0], digits[1:]
        if len(others) >= _MIN_DIGITS:
            yield Encoding((others,), rf"{first}\.?{others}\d{{0,40}}(?:e\+?\d{{1,3}})?")


def _leading_digits(number: str) -> str:
    """Return the significant digits: "1.5e+16" has "15"."""
    return number.partition("e")[0].replace(".", "")[:_FLOAT_DIGITS].rstrip("0")


def _base64(secret: bytes) -> Iterator[str]:
    """Yield what is the same in each base64 text that contains the secret, for each of its three alignments.

    Base64 encodes three bytes as four characters. With one or two other bytes before the secret in its group, the first
    two or three characters depend on these; and the last character may depend on the byte after the secret.
    """
    for bytes_before, first in enumerate((0, 2, 3)):
        last = (bytes_before + len(secret)) * 8 // 6
        yield base64.b64encode(bytes(bytes_before) + secret).decode()[first:last]
