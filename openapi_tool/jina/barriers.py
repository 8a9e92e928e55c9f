"""Recognizes pages with a barrier in place of content, by their title and text.

A barrier is a bot check (`captcha`), a login, a request for `consent`, a request for JavaScript, or a `loading` text. A
page that shows only its title counts as `empty`. Two rules apply to all:

- A barrier is short. A longer text with the same words has content of its own, so each kind has a maximum length.
- Title and text are compared in lower case, with plain apostrophes.

In the texts below each phrase ends at `|`, each title at `;`, and both at the end of a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from openapi_tool.jina.cookie_banners import COOKIE_WORDS, is_cookie_banner

MAX_CHARS = 1_000
"""Maximum characters of the text of a barrier."""
# Lower maxima of single kinds of barriers.
_MAX_LOGIN_CHARS = 600
_MAX_NOTICE_CHARS = 400
_MAX_FORM_CHARS = 300
_MAX_BANNER_CHARS = 130
_MAX_LOADING_CHARS = 60

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
私はロボットではありません|solve the challenge below|solve this challenge|blocked by network security
please enable js and disable any ad blocker|making sure you're not a bot|confirm you're not a bot
click the button below to continue shopping|blocked due to a network policy|checking your browser...
a required part of this site couldn't load|why have i been blocked|may have set restrictions that prevent you
"""
_CAPTCHA_NOTICE = """
ray id:|you are not a bot|you're not a bot|verifying your browser|slide to verify|drag the slider
环境异常|网络环境存在异常|请求存在异常|异常请求|去验证|完成验证后|完成验证即可|进行安全验证|人机验证|真人验证|是真人|滑动验证|拖动滑块|拖动下方滑块
按住滑块|访问过于频繁|请求过于频繁|流量异常|異常流量|執行安全驗證|進行安全驗證|您是人類|不是机器人|不是機器人
cookie 以继续|cookie 以繼續|セキュリティ検証|人間であることを確認|ボットではない|続行するには javascript
보안 확인을|보안 확인 수행|사람인지 확인|사람임을 확인|로봇이 아닙니다
sicherheitsüberprüfung|dass sie ein mensch|dass du ein mensch|kein bot|cookies, um fortzufahren
vérification de sécurité|vous êtes un humain|vous êtes humain|n'êtes pas un bot|n'êtes pas un robot
cookies pour continuer|verificación de seguridad|eres un ser humano|es un ser humano|no eres un bot|no es un bot
cookies para continuar|verificação de segurança|você é humano|você é um ser humano|não é um bot|não é um robô
verifica di sicurezza|non sei un robot|non sei un bot|non sia un bot|cookie per continuare
beveiligingsverificatie|beveiligingscontrole|u een mens bent|geen bot|cookies in om door te gaan
weryfikacja bezpieczeństwa|weryfikacji bezpieczeństwa|weryfikację bezpieczeństwa|jesteś człowiekiem
nie jesteś botem|güvenlik doğrulama|insan olduğunuzu|проверка безопасности|проверки безопасности
проверку безопасности|что вы человек|вы не бот|файлы cookie, чтобы|перевірка безпеки|перевірку безпеки
що ви людина|xác minh bảo mật|bạn là con người|verifikasi keamanan|anda adalah manusia|bahwa anda manusia
التحقق من الأمان|التحقق الأمني|أنك إنسان
完成下方验证|访问异常|bezpečnostní ověření|bezpečnostního ověření|že jste člověk|säkerhetsverifiering
att du är en människa|du er et menneske|että olet ihminen|biztonsági ellenőrzés|hogy ön ember|verificarea de securitate
că sunteți om|ότι είστε άνθρωπος|שאתה אנושי|אימות אבטחה|คุณเป็นมนุษย์|आप मानव हैं
"""
"""Less specific phrases of bot checks, and those of other languages, which count only in a shorter text."""
_LOGIN = """
sign in to continue|log in to continue|login to continue|sign in to view|log in to view|log in or sign up to
sign in to see|log in to see|log in or create an account|sign in or create an account|you must be logged in
you must log in|you need to be logged in|you need to log in|please log in to|please sign in to|please login to
log into facebook|sign in to your account|log in to your account|melden sie sich an, um|connectez-vous pour
inicia sesión para|请登录|ログインしてください|войдите, чтобы
"""
_LOGIN_FORM = """
forgot password?|forgot your password?|forgotten password?|passwort vergessen?|mot de passe oublié
olvidaste tu contraseña|忘记密码|forgot email?|e-mail-adresse vergessen?|adresse e-mail oubliée
olvidado tu correo
"""
_JAVASCRIPT = """
enable javascript|javascript is disabled|javascript is not enabled|javascript is required|requires javascript
javascript enabled|javascript must be enabled|turn on javascript|javascript has been disabled|javascript aktivieren
javascript ist deaktiviert|activer javascript|habilitar javascript|habilite javascript|activa javascript
abilita javascript|включите javascript|启用javascript|启用 javascript|javascriptを有効
"""
_CAPTCHA_TITLES = """
just a moment;attention required! | cloudflare;access denied;robot or human?;security checkpoint
vercel security checkpoint;ddos-guard;nur einen moment;einen moment;un instant;un momento;um momento;een moment
even geduld;bir dakika lütfen;chwileczkę;cierpliwości;один момент;подождите;请稍候;請稍候;しばらくお待ちください
잠시만 기다리십시오;tunggu sebentar;安全验证;百度安全验证;人机验证;滑动验证页面;验证码中间页
"""
_LOADING = """
loading|please wait|one moment|redirecting|laden|wird geladen|bitte warten|chargement|cargando|carregando|caricamento
ładowanie|загрузка|завантаження|yükleniyor|加载中|正在加载|載入中|読み込み中|로딩|đang tải|memuat
"""
_LOGIN_TITLES = """
sign up | linkedin;linkedin login, sign in | linkedin;registrieren | linkedin;mitglied werden | linkedin
s'inscrire | linkedin;s'identifier | linkedin;registrarse | linkedin;iniciar sesión | linkedin
x. it's what's happening / x;log in to x / x;sign up for x / x;log into facebook;login • instagram
sign up • instagram;log in | tiktok;sina visitor system
"""
_HOME_TITLES = """
小红书 - 你的生活兴趣社区;小红书 - 你的生活指南
"""
"""Titles of start pages, which a login in place of a page has, too."""
_CONSENT_REQUEST = re.compile(
    r"""(?: before\ you\ continue\ to\ SERVICE
    | bevor\ (?:sie|du)\ (?:zu|mit)\ SERVICE\ (?:weitergehen|weitergehst|fortfahren|fortfährst)
    | avant\ (?:d'accéder\ à|de\ passer\ à|de\ continuer\ (?:sur|vers))\ SERVICE
    | antes\ de\ (?:ir\ a|continuar\ (?:a|en|para\ o))\ SERVICE
    | prima\ di\ continuare\ su\ SERVICE
    )""".replace("SERVICE", r"(?:youtube|google(?:[\ -]\w{1,20})?)"),
    re.VERBOSE,
)
"""Google's request for consent to cookies, as a whole title or line."""
_MAX_CONSENT_LINES = 6  # first lines of a text, among which that request is
_HEADING = re.compile(r"#|[^\n]*\n(?:=+|-+)\s*$", re.MULTILINE)
"""Start of a Markdown heading: marked with #, or underlined."""
_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"


def _phrases(lines: str) -> tuple[str, ...]:
    """Return the phrases of a text above."""
    return tuple(lines.strip().replace("\n", "|").split("|"))


def _split_titles(lines: str) -> frozenset[str]:
    """Return the titles of a text above."""
    return frozenset(lines.strip().replace("\n", ";").split(";"))


STEMS = _phrases("""
human|robot|browser|secur|unusual traffic|characters you see|interruption|been blocked|been denied|incapsula|captcha
ddos|mensch|humain|umano|робот|验证|ロボット|cookies to|log in|login|sign in|logged in|log into|melden|connectez
inicia ses|登录|ログイン|войдите|passwor|mot de passe|contraseña|密码|javascript|challenge|ad blocker
network security|shopping
ray id:| bot|slide to|slider|异常|频繁|真人|滑块|流量|驗證|人類|机器人|機器人|cookie |cookies |cookies, um|файлы
セキュリティ|人間|ボット|続行する|보안|사람|로봇|sicherheits|robô|écurité|segur|sicurezza|beveilig|een mens
bezpiecze|człowiek|güvenlik|insan|безопасн|человек|не бот|безпек|людина
xác minh|con người|keamanan|manusia|الأمان|الأمني|إنسان
network policy|site couldn't|i been blocked|set restrictions|forgot email|adresse vergessen|e-mail oubliée|tu correo
bezpečnost|že jste|säkerhets|människa|menneske|ihminen|biztonsági|hogy ön|securitate
sunteți om|άνθρωπος|אנושי|אבטחה|มนุษย์|मानव
""")
"""Each phrase of `BARRIERS` contains one of these.

Nearly no page does, so a search for these first saves three quarters of the time.
"""

BARRIERS = (
    ("captcha", MAX_CHARS, _phrases(_CAPTCHA)),
    ("captcha", _MAX_NOTICE_CHARS, _phrases(_CAPTCHA_NOTICE)),
    ("login", _MAX_LOGIN_CHARS, _phrases(_LOGIN)),
    ("login", _MAX_FORM_CHARS, _phrases(_LOGIN_FORM)),
    ("javascript", _MAX_NOTICE_CHARS, _phrases(_JAVASCRIPT)),
)
"""Type, maximum characters and phrases of barriers; the first that a text has one phrase of counts."""
_TITLES = _split_titles(_CAPTCHA_TITLES)
_LOGINS = _split_titles(_LOGIN_TITLES)
_HOMES = _split_titles(_HOME_TITLES)
_TITLE_SEPARATORS = (" | ", " - ", " \N{EN DASH} ", " \N{EM DASH} ", " · ")
_LOADING_WORDS = _phrases(_LOADING)


@dataclass(frozen=True, slots=True)
class _Wall:
    """A login of one service in place of a page.

    - `max_chars`: maximum of its text, without the addresses of links and without images.
    - `titles`: it has one of these, or any title if there are none.
    - `phrases`: its text contains one of these, or any words if there are none.
    """

    max_chars: int
    titles: frozenset[str] = frozenset()
    phrases: tuple[str, ...] = ()


_MAX_WALL_CHARS = 8_000
"""Maximum characters of a barrier with the addresses of its links."""
_XIAOHONGSHU = "登录后推荐更懂你的笔记"  # in the login of that service
_WALLS = (
    _Wall(MAX_CHARS, _HOMES, (_XIAOHONGSHU,)),
    _Wall(_MAX_NOTICE_CHARS, _HOMES),
    _Wall(_MAX_LOGIN_CHARS, phrases=("already on linkedin? sign in",)),
    # Pages of these services begin with the same words; then the page itself follows.
    _Wall(
        _MAX_BANNER_CHARS,
        phrases=(
            _XIAOHONGSHU,
            "people on x are the first to know",
            "people on twitter are the first to know",
            "usuarios de x son los primeros en enterarse",
            "utilisateurs de x sont les premiers à savoir",
        ),
    ),
)
# Each phrase above contains one of these.
_WALL_STEMS = (_XIAOHONGSHU, "on linkedin?", "first to know", "en enterarse", "premiers à savoir")
# In linear time: neither text nor address may contain its own opening bracket.
_LINK = re.compile(r"\[([^\[\]\n]*+)\]\([^()\n]*+\)")
_IMAGE = re.compile("!" + _LINK.pattern)


def barrier_type(title: str, text: str) -> str | None:
    """Return the warning type of a page that shows a barrier, a loading text or only its title instead of content."""
    if len(text) > _MAX_WALL_CHARS:
        return None
    title, text = _folded(title), _folded(text)
    by_title = _type_of_title(title)
    kind = _wall_type(by_title, title, text)
    if kind is None and len(text) <= MAX_CHARS:
        kind = _short_type(by_title, title, text)
    return kind


def title_type(title: str) -> str | None:
    """Return the warning type of a page by its title alone."""
    return _type_of_title(_folded(title))


def _type_of_title(title: str) -> str | None:
    title = title.strip(" .…")
    if title in _TITLES:
        return "captcha"
    if title in _LOGINS:
        return "login"
    return "consent" if _CONSENT_REQUEST.fullmatch(title) else None


def _wall_type(by_title: str | None, title: str, text: str) -> str | None:
    """Return the type of a login, request for consent or cookie banner, which may have long lists of links.

    `by_title` is the type that the title alone has.
    """
    if by_title in ("login", "consent"):
        return by_title
    if "cookies" in text and any(map(_CONSENT_REQUEST.fullmatch, _lines(text)[:_MAX_CONSENT_LINES])):
        return "consent"
    has_cookies = _has_one(text, COOKIE_WORDS)
    if title not in _HOMES and not has_cookies and not _has_one(text, _WALL_STEMS):
        return None
    shown = _LINK.sub(r"\1", _IMAGE.sub("", text))
    if has_cookies and is_cookie_banner(title, _lines(shown)):
        return "consent"
    is_login = any(
        len(shown) <= wall.max_chars
        and (not wall.titles or title in wall.titles)
        and (not wall.phrases or _has_one(shown, wall.phrases))
        for wall in _WALLS
    )
    return "login" if is_login else None


def _short_type(by_title: str | None, title: str, text: str) -> str | None:
    """Return the type of a short text; `by_title` is the type that the title alone has."""
    kind = _type_by_phrases(text) if _has_one(text, STEMS) else None
    has_title_of_bot_check = by_title == "captcha" and len(text) <= _MAX_NOTICE_CHARS
    if has_title_of_bot_check and kind in (None, "javascript"):  # a bot check mostly asks for JavaScript, too
        return "captcha"
    if kind is not None:
        return kind
    if _is_loading(title, text):
        return "loading"
    return "empty" if _is_only_title(title, text) else None


def _type_by_phrases(text: str) -> str | None:
    for kind, max_chars, phrases in BARRIERS:
        if len(text) <= max_chars and _has_one(text, phrases):
            return kind
    return None


def _folded(text: str) -> str:
    """Return the part of a text that is compared, in lower case and with plain apostrophes."""
    return text[:_MAX_WALL_CHARS].strip().lower().replace(_APOSTROPHE, "'")


def _lines(text: str) -> list[str]:
    """Return the lines with words, without the marks of a heading."""
    lines = [line.strip("#*= \t") for line in text.splitlines()]
    return [line for line in lines if line.strip("-")]


def _has_one(text: str, phrases: tuple[str, ...]) -> bool:
    return any(map(text.__contains__, phrases))


def _is_only_title(title: str, text: str) -> bool:
    """Return whether a text is only the title of its page, with or without the name of the site.

    It must begin with a heading, since a line without marks may be the content of a file.
    """
    return bool(title and _HEADING.match(text)) and _own_titles(title).issuperset(_lines(text))


def _own_titles(title: str) -> set[str]:
    """Return a title as it is, and without the name of its site behind it: `News` for `News | Example`."""
    return {title, *(title.partition(separator)[0] for separator in _TITLE_SEPARATORS)}


def _is_loading(title: str, text: str) -> bool:
    """Return whether a text, without images and the title that may be above it, is only a loading text."""
    if not _has_one(text, _LOADING_WORDS):
        return False
    lines = _lines(_IMAGE.sub("", text))
    own = _own_titles(title)
    if lines and title.startswith(lines[0]):
        own.add(lines[0])
    without_title = [line for line in lines if line not in own]
    return any(
        len(shown) <= _MAX_LOADING_CHARS and shown.lstrip("![ ").startswith(_LOADING_WORDS)
        for shown in ("\n".join(lines), "\n".join(without_title))
    )
