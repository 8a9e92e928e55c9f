"""Remarks for the model about a result that looks complete but is not, and typed warnings about pages.

Both are outside of the markers around web content, so no page can fake one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from openapi_tool.tools.problems import counted

SEARCH_OPERATORS = ("site", "exclude_sites", "after", "filetype", "intitle", "ext", "loc")
"""Parameters that become operators of the query."""
_FILTERS = (*SEARCH_OPERATORS, "location", "gl", "hl")
"""Parameters that restrict a search; without them it may find more."""
_TOLERANCE_DIVISOR = 50  # the upstream charges a cut text at up to 1/50 above the limit (jina-api 1.3)

_MAX_BARRIER_CHARS = 1_000
"""Maximum length of the text of a barrier: a bot check or login instead of content."""
# Lower maxima for single kinds of barriers: a longer text with such words has content of its own.
_MAX_LOGIN_CHARS, _MAX_NOTICE_CHARS, _MAX_FORM_CHARS, _MAX_LOADING_CHARS = 600, 400, 300, 60

WARNINGS: Mapping[str, str] = {
    "captcha": "This is probably a bot check, not the page. Use another source.",
    "login": "This is probably a login, not the page. Use another source.",
    "javascript": "The page asks for JavaScript. Read it with wait_for_selector, or use another source.",
    "empty": "The page has no text, or loads it late. Read it with wait_for_selector, or use another source.",
    "not_loaded": "The page may not be fully loaded. If so, read it with wait_for_selector.",
    "frames": "Embedded frames are left out. Read them by their own address.",
    "shadow_dom": "Parts of the page may be missing. If so, use another source.",
    "may_be_captcha": "The page has a captcha. If content is missing, use another source.",
    "stored_copy": "This is a stored copy. For the current page, read it with no_cache.",
}
"""Texts for the model, by the type of a warning in the result's `state`."""

_IF_NOT_OFFERED: Mapping[str, tuple[str, str]] = {
    "javascript": ("wait_for_selector", "The page asks for JavaScript. Use another source."),
    "empty": ("wait_for_selector", "The page has no text, or loads it late. Use another source."),
    "not_loaded": ("wait_for_selector", "The page may not be fully loaded. If so, use another source."),
    "stored_copy": ("no_cache", "This is a stored copy; the page itself may be newer."),
}
"""The argument that a warning names, and the warning if the model cannot give it or has given it already."""

Offers = Callable[[str], bool]
"""Returns whether a remedy may name an argument in the result of a call."""


def warning(kind: str, offers: Offers) -> str:
    """Return the text for the model."""
    argument, alternative = _IF_NOT_OFFERED.get(kind, ("", ""))
    return WARNINGS[kind] if not argument or offers(argument) else alternative


UPSTREAM_WARNINGS: Mapping[str, str] = {
    "This page maybe not yet fully loaded, consider explicitly specify a timeout.": "not_loaded",
    "This page contains iframe that are currently hidden, consider enabling iframe processing.": "frames",
    "This page contains shadow DOM that are currently hidden, consider enabling shadow DOM processing.": "shadow_dom",
    "This page maybe requiring CAPTCHA, please make sure you are authorized to access this page.": "may_be_captcha",
    "This is a cached snapshot of the original page, consider retry with caching opt-out.": "stored_copy",
}
"""Types of the upstream's own warnings (jina-api 3.1), whose texts name parameters that only an operator sets."""

_CAPTCHA = """
verify you are human|verify you are a human|verify that you are human|verifying you are human|confirm you are human
confirm you are a human|prove you are human|prove that you are human|confirm that you are human|you're not a robot
you are not a robot|are you a robot?|robot or human?|checking your browser before|checking your browser…
checking if the site connection is secure|needs to review the security of your connection
performing security verification|enable javascript and cookies to continue|unusual traffic from your
complete the security check to access|enter the characters you see below|pardon our interruption
something about your browser made us think|you have been blocked|access to this page has been denied
request unsuccessful. incapsula|solve this captcha|complete the captcha|solve the captcha|enter the captcha
type the characters you see|ddos protection by|bestätigen sie, dass sie ein mensch|vérifiez que vous êtes humain
verifica que eres humano|verifica di essere umano|подтвердите, что вы не робот|请完成安全验证|请输入验证码
私はロボットではありません
"""
_LOGIN = """
sign in to continue|log in to continue|login to continue|sign in to view|log in to view|log in or sign up to
sign in to see|log in to see|log in or create an account|sign in or create an account|you must be logged in
you must log in|you need to be logged in|you need to log in|please log in to|please sign in to|please login to
log into facebook|sign in to your account|log in to your account|melden sie sich an, um|connectez-vous pour
inicia sesión para|请登录|ログインしてください|войдите, чтобы
"""
_LOGIN_FORM = """
forgot password?|forgot your password?|forgotten password?|passwort vergessen?|mot de passe oublié
olvidaste tu contraseña|忘记密码
"""
_JAVASCRIPT = """
enable javascript|javascript is disabled|javascript is not enabled|javascript is required|requires javascript
javascript enabled|javascript must be enabled|turn on javascript|javascript has been disabled|javascript aktivieren
javascript ist deaktiviert|activer javascript|habilitar javascript|habilite javascript|activa javascript
abilita javascript|включите javascript|启用javascript|启用 javascript|javascriptを有効
"""
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"
_LOADING = ("loading", "please wait", "one moment", "redirecting", "laden", "bitte warten", "chargement", "cargando")


def _phrases(lines: str) -> tuple[str, ...]:
    return tuple(lines.strip().replace("\n", "|").split("|"))


STEMS = _phrases("""
human|robot|browser|secur|unusual traffic|characters you see|interruption|been blocked|been denied|incapsula|captcha
ddos|mensch|humain|umano|робот|验证|ロボット|cookies to|log in|login|sign in|logged in|log into|melden|connectez
inicia ses|登录|ログイン|войдите|passwor|mot de passe|contraseña|密码|javascript
""")
"""Each phrase of `BARRIERS` contains one of these. Nearly no page does, so testing them first saves 3/4 of the time."""

BARRIERS = (
    ("captcha", _MAX_BARRIER_CHARS, _phrases(_CAPTCHA)),
    ("login", _MAX_LOGIN_CHARS, _phrases(_LOGIN)),
    ("login", _MAX_FORM_CHARS, _phrases(_LOGIN_FORM)),
    ("javascript", _MAX_NOTICE_CHARS, _phrases(_JAVASCRIPT)),
)
_CAPTCHA_TITLES = ("just a moment", "attention required! | cloudflare", "access denied", "robot or human?")


def barrier_type(title: str, text: str) -> str | None:
    """Return the warning type of a page that shows a barrier or a loading text instead of content."""
    if len(text) > _MAX_BARRIER_CHARS:
        return None
    text = text.strip().lower().replace(_APOSTROPHE, "'")
    if len(text) <= _MAX_LOADING_CHARS and text.lstrip("#*![ ").startswith(_LOADING):
        return "empty"
    if any(map(text.__contains__, STEMS)):
        for kind, chars, phrases in BARRIERS:
            if len(text) <= chars and any(map(text.__contains__, phrases)):
                return kind
    is_notice = len(text) <= _MAX_NOTICE_CHARS and len(title) <= _MAX_NOTICE_CHARS
    return "captcha" if is_notice and title.strip(" .…").lower() in _CAPTCHA_TITLES else None


def result_warning(kind: str, numbers: Sequence[int], offers: Offers) -> str:
    """Return a warning about search results."""
    results = "result" if len(numbers) == 1 else "results"
    return f"[Warning about {results} {', '.join(map(str, numbers))}: {warning(kind, offers)}]"


def unreadable_results(number: int) -> str:
    """Return the remark about items of a search that hold no result."""
    return f"[{counted(number, 'further result')} came damaged and {'is' if number == 1 else 'are'} left out.]"


def is_cut(tokens: int | None, max_tokens: int) -> bool:
    """Return whether the upstream cut a text at `max_tokens`; only its charge shows that (jina-api section 9)."""
    return tokens is not None and max_tokens <= tokens <= max_tokens + max_tokens // _TOLERANCE_DIVISOR


def cut_page(max_tokens: int, offers: Offers) -> str:
    """Return the remark about a cut page."""
    remedies = {
        "max_tokens": "call again with a larger max_tokens, which costs more",
        "target_selector": "read a part of it with target_selector",
    }
    ways = ", or ".join(way for argument, way in remedies.items() if offers(argument))
    more = f"To see more, {ways}." if ways else "This tool cannot show it."
    return f"[The page is longer: it was cut at max_tokens = {max_tokens:,}, and the rest is not stored. {more}]"


def cut_result(max_tokens: int) -> str:
    """Return the remark about a search result with a cut page."""
    return f"[This page is longer: it was cut at max_tokens = {max_tokens:,}. To see more, read it by its address.]"


def other_search(names: Mapping[str, str]) -> str:
    """Return what to change about a search without results; `names` maps parameters to the model's names."""
    filters = [names[name] for name in _FILTERS if name in names]
    drop = f", or drop {' or '.join(filters)}" if filters else ""
    end = f" The results may end before this {names['page']}." if "page" in names else ""
    return f"Use other or fewer words{drop}.{end}"
