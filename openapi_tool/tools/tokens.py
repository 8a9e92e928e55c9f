"""Estimate of the tokens of a text, since the limit of a result is in tokens of the model that reads it.

Tokens are not proportional to characters: one character is a quarter of a token in English, and two tokens in Ethiopic.
The estimate adds up weights of what a text consists of (words, digits, signs, line ends, letters beyond ASCII). The
weights are fitted to the tokenizer o200k of OpenAI, on the texts of tests/unit/test_model_answers.py.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_right
from collections import Counter
from functools import lru_cache

_LINE_END = re.compile(r"\n\s*+")  # with the indentation of the next line
_ASCII = re.compile(r"[\x00-\x7f]+")
_SIGNS = string.punctuation.encode()
# Tables for `bytes.translate`, which is much faster than a regular expression: all but digits, and all but letters,
# become blanks.
_DIGITS_ALONE = bytes(char if chr(char) in string.digits else ord(" ") for char in range(256))
_LOWER_WORDS = bytes(ord(chr(char).lower()) if chr(char) in string.ascii_letters else ord(" ") for char in range(256))
_COMMON_WORDS = """
the of and to in is for that with or this be as are it on by not if an a de la le les el los que en et des du un una une
por para se os o do da e y und der die das den von zu il di che per w het van een
"""
_COMMON = frozenset(_COMMON_WORDS.encode().split())
"""Words of languages whose longer words are mostly one token."""
_COMMON_SHARE = 0.25  # fraction of these words in a text of such a language
_SHORT_WORD = 5  # letters of a word that is mostly one token
_SLICE_CHARS = 1_000  # of a text, of which `fitting_chars` estimates the tokens at once

# Tokens per word, and per letter after the fifth of a word: in the languages of `_COMMON`, and in others.
_PER_WORD, _PER_RARE_WORD = 0.97, 1.18
_PER_LETTER, _PER_RARE_LETTER = 0.18, 0.42
_PER_DIGITS, _PER_SIGN, _PER_LINE_END = 1.75, 0.33, 1.43
_PER_CHARACTER = (
    *((0x80, 0.39), (0x250, 1.5), (0x300, 1.0), (0x370, 0.41), (0x400, 0.34), (0x460, 1.7), (0x530, 0.29)),
    *((0x590, 0.46), (0x600, 0.42)),
    *((0x700, 2.1), (0x800, 1.5), (0x900, 0.35), (0xA00, 0.63), (0xA80, 0.39), (0xB00, 1.0), (0xB80, 0.37)),
    *((0xC00, 0.46), (0xD00, 0.31), (0xD80, 0.6), (0xE00, 0.42), (0xE80, 1.63), (0x1000, 0.57), (0x1060, 2.5)),
    *((0x10A0, 0.31), (0x1200, 2.0), (0x13A0, 3.2), (0x1680, 1.5), (0x1780, 0.62), (0x1800, 1.5), (0x1900, 3.0)),
    *((0x1D00, 1.5), (0x1E00, 0.38), (0x1F00, 2.3), (0x2000, 1.0), (0x2D30, 2.95), (0x2D80, 2.0), (0x3000, 0.7)),
    *((0x3040, 0.9), (0x3400, 0.88), (0xA000, 2.9), (0xAC00, 0.75), (0xD800, 1.0), (0x10000, 4.1), (0x1F000, 2.0)),
)
"""Tokens per character, by the first code point of a range."""
_PER_LETTER_OF = {
    **dict.fromkeys("əɑʼˈ", 0.3),
    **dict.fromkeys("ғқңүұһәөҗҳҷӣӯҒҚҢҮҰҺӘӨҖҲҶӢӮ", 0.34),
    **dict.fromkeys("эЭ", 2.0),
    "ŋ": 1.5,
}
"""Exceptions from the ranges: letters of widely used languages in ranges of rare ones, and letters that are frequent
only in languages with rare words: `э` in the Caucasus and Siberia, `ŋ` in West Africa."""
_RANGE_STARTS = [start for start, _ in _PER_CHARACTER]


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text."""
    tokens = _ascii_tokens(text.encode("ascii", "replace")) + len(_LINE_END.findall(text)) * _PER_LINE_END
    if not text.isascii():
        others = Counter(_ASCII.sub("", text))
        # Each of them has become a `?` for `_ascii_tokens`, which has counted it as a sign.
        tokens += sum((_tokens_of_character(char) - _PER_SIGN) * count for char, count in others.items())
    return round(tokens)


def _ascii_tokens(text: bytes) -> float:
    words = text.translate(_LOWER_WORDS).split()
    extra_letters = sum([len(word) - _SHORT_WORD for word in words if len(word) > _SHORT_WORD])
    common_words = sum(map(_COMMON.__contains__, words))
    # 1 for a text in a language of `_COMMON`, 0 for one in another, and something between for a mixed one.
    common_weight = min(1.0, common_words / (_COMMON_SHARE * max(1, len(words))))
    per_word = _PER_WORD * common_weight + _PER_RARE_WORD * (1 - common_weight)
    per_letter = _PER_LETTER * common_weight + _PER_RARE_LETTER * (1 - common_weight)
    groups_of_digits = sum([(len(digits) + 2) // 3 for digits in text.translate(_DIGITS_ALONE).split()])
    signs = len(text) - len(text.translate(None, delete=_SIGNS))
    return len(words) * per_word + extra_letters * per_letter + groups_of_digits * _PER_DIGITS + signs * _PER_SIGN


@lru_cache(maxsize=4_096)
def _tokens_of_character(char: str) -> float:
    if char in _PER_LETTER_OF:
        return _PER_LETTER_OF[char]
    _, tokens = _PER_CHARACTER[bisect_right(_RANGE_STARTS, ord(char)) - 1]
    return tokens


def fitting_chars(text: str, max_tokens: int) -> int:
    """Return how many characters at the start of a text have about `max_tokens`; all if it has fewer."""
    left = float(max_tokens)
    for start in range(0, len(text), _SLICE_CHARS):
        part = text[start : start + _SLICE_CHARS]
        tokens = estimate_tokens(part)
        if tokens > left:
            return start + int(len(part) * max(0.0, left) / tokens)
        left -= tokens
    return len(text)
