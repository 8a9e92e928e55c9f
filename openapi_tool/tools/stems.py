"""Stems of words, so that a question with `refund` finds `refunds`, if the language of a text is clear.

A language is clear by its script, or by its commonest words. All words here are folded (`text_folding.py`): lower case,
and without marks in Latin script. Imports pure code only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from openapi_tool.tools.text_folding import folded

Stem = Callable[[str], str]
"""Returns the stem of a folded word."""

SAMPLE_CHARS = 20_000
"""Characters of a text that tell its language."""
_MIN_WORDS = 3  # of a language that must occur, to tell it
_LEAD = 1.5  # so many times as many words as of the next language
_MIN_PLURAL_CHARS = 4
_WORD = re.compile(r"[^\W\d_]+")

# The commonest words of languages in Latin script. Few of them are words of several languages, as these tell little.
_COMMON_WORDS = {
    "english": "the of and to is that it for was with as are this be have from or not which you by an",
    "german": "der die und das ist nicht mit sich auf fur den dem ein eine auch es von zu im werden als bei",
    "french": "le la les des est et dans pour que qui une sur pas avec ce sont au du par il plus nous vous",
    "spanish": "el la los las que de y en un una es por con para del se no su al como mas pero",
    "portuguese": "o os as que de do da em um uma e para com nao por mais dos das se na no ao foi",
    "italian": "il di che e la per un una non con del della sono i le da gli nel anche si alla piu",
    "dutch": "de het een en van is dat niet op te zijn met voor aan er ook als bij door maar naar worden",
    "swedish": "och att det som en pa ar av for med den till inte om ett har de jag var sig fran eller",
    "danish": "og at det som en pa er af for med den til ikke om et har de jeg var sig fra eller blev hvad",
    "norwegian": "og at det som en pa er av for med den til ikke om et har de jeg var seg fra eller ble hva",
    "finnish": "ja on ei se etta oli han mutta joka ovat myos kun tai niin kuin mika sen ovat ole jos",
    "hungarian": "a az es hogy nem is egy de van meg ez csak azt volt mint vagy ki lehet ha",
    "romanian": "si de la in cu este nu un o pe care sa din pentru mai sunt ca al fost sau",
    "turkish": "ve bir bu da de icin ile ne gibi daha cok olarak olan en var ama kadar sonra",
    "polish": "i w na z do nie to sie jest ze od za jak po co o ale czy tym przez",
    "czech": "a v na je se s to z o do i ze k jako pro by za od ale jsou nebo",
}
_LANGUAGES_OF: dict[str, list[str]] = {}  # a common word
for _language, _words in _COMMON_WORDS.items():
    for _word in _words.split():
        _LANGUAGES_OF.setdefault(_word, []).append(_language)

# Languages by script: the letters of the script, and the letters of other languages in it, such as the Ukrainian ї.
_NOT_RUSSIAN = "\u0456\u0457\u0454\u0491\u045e\u0452\u0458\u0459\u045a"
_NOT_RUSSIAN += "\u045b\u045f\u049b\u04a3\u0493\u04af\u04b1\u04bb\u04e9"
_SCRIPTS = (
    ("russian", re.compile("[\u0430-\u044f\u0451]"), re.compile(f"[{_NOT_RUSSIAN}]")),
    ("greek", re.compile("[\u03b1-\u03c9]"), None),
    ("arabic", re.compile("[\u0621-\u064a]"), re.compile("[\u067e\u0686\u0698\u06af\u06a9\u06cc]")),
    ("hindi", re.compile("[\u0904-\u0939]"), None),
    ("tamil", re.compile("[\u0b85-\u0bb9]"), None),
    ("armenian", re.compile("[\u0561-\u0586]"), None),
)
_SCRIPT_SHARE = 0.5  # of the letters of a text, at least, in the script of its language


def stem_of(sample: str) -> Stem:
    """Return how words of the language of a text are stemmed; if it is not clear, only the s of plurals is removed."""
    language = language_of(sample)
    if language is None:
        return _without_s
    import snowballstemmer  # noqa: PLC0415 - takes 20 ms, which only questions need

    stem: Stem = snowballstemmer.stemmer(language).stemWord
    return stem


def language_of(sample: str) -> str | None:
    """Return the language of a text if it is clear, by its script or its commonest words."""
    text = folded(sample[:SAMPLE_CHARS])
    letters = sum(map(str.isalpha, text))
    for language, script, others in _SCRIPTS:
        if letters and len(script.findall(text)) >= _SCRIPT_SHARE * letters:
            is_other = others is not None and others.search(text)
            return None if is_other else language
    return _latin_language(text)


def _latin_language(text: str) -> str | None:
    known_words = Counter(word for word in _WORD.findall(text) if word in _LANGUAGES_OF)
    counts = Counter[str]()  # of words, by language
    for word, count in known_words.items():
        counts.update(dict.fromkeys(_LANGUAGES_OF[word], count))
    if not counts:
        return None
    (language, count), (_, next_count), *_ = [*counts.most_common(2), ("", 0)]
    different_words = sum(language in _LANGUAGES_OF[word] for word in known_words)
    is_clear = count >= _LEAD * next_count and different_words >= _MIN_WORDS
    return language if is_clear else None


def _without_s(word: str) -> str:
    return word[:-1] if word.endswith("s") and len(word) >= _MIN_PLURAL_CHARS else word
