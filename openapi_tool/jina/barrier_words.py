"""The words by which `barriers.py` recognizes a page with a barrier in place of content, in many languages.

All are in lower case, with plain apostrophes. In the texts below each phrase ends at `|`, each title at `;`, and both
at the end of a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MAX_CHARS = 1_000
"""Maximum characters of the text of a barrier."""
# Lower maxima of single kinds of barriers. The more common their phrases are in other pages, the lower is the maximum.
_MAX_LOGIN_CHARS = 600
MAX_NOTICE_CHARS = 400
_MAX_FORM_CHARS = 300
_MAX_BANNER_CHARS = 130

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
CONSENT_REQUEST = re.compile(
    r"""(?: before\ you\ continue\ to\ SERVICE
    | bevor\ (?:sie|du)\ (?:zu|mit)\ SERVICE\ (?:weitergehen|weitergehst|fortfahren|fortfährst)
    | avant\ (?:d'accéder\ à|de\ passer\ à|de\ continuer\ (?:sur|vers))\ SERVICE
    | antes\ de\ (?:ir\ a|continuar\ (?:a|en|para\ o))\ SERVICE
    | prima\ di\ continuare\ su\ SERVICE
    )""".replace("SERVICE", r"(?:youtube|google(?:[\ -]\w{1,20})?)"),
    re.VERBOSE,
)
"""Google's request for consent to cookies, as a whole title or line."""


def _phrases(lines: str) -> tuple[str, ...]:
    """Return the phrases of a text above."""
    return tuple(lines.strip().replace("\n", "|").split("|"))


def _split_titles(lines: str) -> frozenset[str]:
    """Return the titles of a text above."""
    return frozenset(lines.strip().replace("\n", ";").split(";"))


class PhraseRule(NamedTuple):
    """A barrier of the type `kind`: a text of at most `max_chars` that contains one of the phrases."""

    kind: str
    max_chars: int
    phrases: tuple[str, ...]


BARRIERS = (
    PhraseRule("captcha", MAX_CHARS, _phrases(_CAPTCHA)),
    PhraseRule("captcha", MAX_NOTICE_CHARS, _phrases(_CAPTCHA_NOTICE)),
    PhraseRule("login", _MAX_LOGIN_CHARS, _phrases(_LOGIN)),
    PhraseRule("login", _MAX_FORM_CHARS, _phrases(_LOGIN_FORM)),
    PhraseRule("javascript", MAX_NOTICE_CHARS, _phrases(_JAVASCRIPT)),
)
"""The first rule that applies to a text counts."""

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

CAPTCHA_TITLES = _split_titles(_CAPTCHA_TITLES)
LOGIN_TITLES = _split_titles(_LOGIN_TITLES)
HOME_TITLES = _split_titles(_HOME_TITLES)
"""Titles of start pages of a service, which its login has, too."""
LOADING_WORDS = _phrases(_LOADING)


@dataclass(frozen=True, slots=True)
class ServiceLogin:
    """The login of one service in place of a page.

    - `max_chars`: maximum of its text, without the addresses of links and without images.
    - `titles`: it has one of these, or any title if there are none.
    - `phrases`: its text contains one of these, or any words if there are none.
    """

    max_chars: int
    titles: frozenset[str] = frozenset()
    phrases: tuple[str, ...] = ()


_XIAOHONGSHU = "登录后推荐更懂你的笔记"  # in the login of that service
SERVICE_LOGINS = (
    ServiceLogin(MAX_CHARS, HOME_TITLES, (_XIAOHONGSHU,)),
    ServiceLogin(MAX_NOTICE_CHARS, HOME_TITLES),
    ServiceLogin(_MAX_LOGIN_CHARS, phrases=("already on linkedin? sign in",)),
    # Pages of these services begin with the same words; then the page itself follows.
    ServiceLogin(
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
SERVICE_LOGIN_STEMS = (_XIAOHONGSHU, "on linkedin?", "first to know", "en enterarse", "premiers à savoir")
"""Each phrase of SERVICE_LOGINS contains one of these."""
