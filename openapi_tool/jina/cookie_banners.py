"""Recognizes pages whose text is only a cookie banner: a request, its buttons, and hardly anything else.

A banner has lines of four kinds: the *request* ("we use cookies …"), *buttons* ("Accept all"), other lines *about*
cookies or consent, and few other ones. All texts are compared in lower case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARS = 1_500
"""Maximum length of a banner without the addresses of its links; longer ones are policies."""
# Maxima of the other lines together: in characters, and as a share of the whole text.
_MAX_OTHER_CHARS = 200
_MAX_OTHER_SHARE = 0.25
_MAX_BUTTONS_CHARS = 100  # of a line of buttons


def _words(lines: str) -> str:
    """Return a pattern of any of the words, longer ones first."""
    words = lines.strip().replace("\n", "|").split("|")
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


COOKIE_WORDS = ("cookie", "kakor", "evästei", "çerez", "informasjonskaps", "クッキー")
"""Each banner contains one of these."""
_ABOUT = re.compile(
    "|".join(COOKIE_WORDS)
    + "|"
    + _words("""
consent|privacy|privatsphäre|datenschutz|vie privée|privacidad|prywatnoś|partners|partnern|partenaires|socios
personal data|personenbezogen|einwillig|consentement|consentimiento|consenso|accepting|by clicking|“accept|"accept
""")
)
"""Words of a line that belongs to a banner."""
_REQUEST = re.compile(
    rf"""(?:(?:and|und|et|y|e)\ )?(?:{
        _words('''
we|this website|this site|this web site|our website|our site|the website|by clicking|by continuing|by using|cookies help
wir|diese website|diese webseite|diese seite|unsere website|unsere seite|nous|ce site|notre site|en poursuivant
utilizamos|usamos|este sitio|este site|nosotros|nuestro sitio|esta web|esta página|questo sito|utilizziamo|usiamo|noi
wij|deze website|deze site|onze website|używamy|korzystamy|ta strona|nasza strona|vi använder|vi bruger|vi bruker
den här webbplatsen|denne hjemmeside|dette websted|dette nettstedet|käytämme|tämä sivusto|používáme|tento web|мы
этот сайт|наш сайт|当サイト|このサイト|本网站|我们|本サイト|bu web sitesi|web sitemiz
''')
    })(?!\w)[^?]*?(?:{"|".join(COOKIE_WORDS)})""",
    re.VERBOSE | re.DOTALL,
)
"""Start of a line in which a site says that it uses cookies."""
_CHOICE = _words("""
accept|accept all|accept all cookies|accept cookies|accept & close|accept and close|i accept|agree|i agree
agree and close|allow|allow all|allow all cookies|allow cookies|got it|ok|okay|reject|reject all|reject all cookies
decline|decline all|deny|deny all|refuse|refuse all|necessary only|only necessary|necessary cookies only
use necessary cookies only|essential only|essential cookies only|accept essential cookies|accept necessary cookies
continue without accepting|alle akzeptieren|alles akzeptieren|alle cookies akzeptieren|akzeptieren|annehmen
alle annehmen|zustimmen|allen zustimmen|alle zulassen|cookies zulassen|einverstanden|ablehnen|alle ablehnen
alles ablehnen|nur notwendige|nur notwendige cookies|nur essenzielle cookies|tout accepter|accepter|accepter et fermer
accepter tout|j'accepte|tout refuser|refuser|continuer sans accepter|aceptar|acepto|aceptar todo|aceptar todas
aceptar todas las cookies|aceptar cookies|rechazar|rechazar todo|rechazar todas|solo necesarias|accetta|accetto
accetta tutti|accetta tutto|accetta tutti i cookie|rifiuta|rifiuta tutti|rifiuta tutto|solo necessari|aceitar
aceitar tudo|aceitar todos|aceitar cookies|rejeitar|rejeitar tudo|recusar|accepteren|alles accepteren
alle cookies accepteren|akkoord|weigeren|alles weigeren|akceptuję|akceptuj|akceptuj wszystkie|zaakceptuj wszystkie
zgadzam się|odrzuć|odrzuć wszystkie|acceptera|acceptera alla|godkänn alla|avvisa|avvisa alla|accepter alle|tillad alle
afvis|afvis alle|godta alle|avvis alle|hyväksy|hyväksy kaikki|hylkää|hylkää kaikki|přijmout|přijmout vše|souhlasím
odmítnout|odmítnout vše|принять|принять все|согласен|отклонить|отклонить все|接受|全部接受|接受所有|同意|拒绝|全部拒绝
同意する|すべて許可|拒否する|すべて拒否|kabul et|tümünü kabul et|reddet|tümünü reddet
""")
_OTHER_BUTTON = _words("""
manage|manage preferences|manage my preferences|manage cookies|manage options|manage choices|manage settings|customize
customise|customize cookies|preferences|settings|cookie settings|cookie preferences|your choices|more options|options
show details|details|learn more|read more|more information|save|save preferences|save settings|confirm my choices
close|continue|privacy policy|cookie policy|imprint|privacy notice|einstellungen|cookie-einstellungen
einstellungen verwalten|auswahl erlauben|auswahl bestätigen|speichern|anpassen|mehr erfahren|mehr optionen|datenschutz
impressum|details anzeigen|personnaliser|paramétrer|paramètres|gérer mes choix|gérer les cookies|en savoir plus
configurar|configuración|personalizar|gestionar|más información|personalizza|preferenze|impostazioni|scopri di più
configurações|saiba mais|instellingen|voorkeuren|meer informatie|ustawienia|dowiedz się więcej|inställningar
indstillinger|innstillinger|asetukset|nastavení|více informací|настройки|подробнее|设置|设定|詳細|設定|ayarlar
""")
_BUTTONS = re.compile(rf"(?:(?:{_CHOICE}|{_OTHER_BUTTON})(?:\W+|\Z))+")
# A button that accepts or refuses; a line of buttons has one, or it may be any menu.
_HAS_CHOICE = re.compile(rf"(?<!\w)(?:{_CHOICE})(?!\w)")
_NOT_A_BANNER = re.compile(
    "|".join(COOKIE_WORDS)
    + "|"
    + _words("privacy|policy|gdpr|dsgvo|rgpd|consent|datenschutz|confidentialité|privacidad")
)
"""Words in the title of a page about cookies, which is no banner."""
# Words in the heading of a policy.
_POLICY = re.compile("polic|richtlinie|politique|política|politica|informativa|beleid|polityk")
_MAX_HEADING_CHARS = 60
_LIST_MARKS = "-•>[]✓✕ "  # around a line of a list, or of a checkbox


def is_cookie_banner(title: str, lines: Sequence[str]) -> bool:
    """Return whether the lines of a page, without images and addresses of links, are a cookie banner.

    Title and lines are in lower case. A page is none if its title, or a heading as its first line, is about cookies.
    """
    stripped = [line.strip(_LIST_MARKS) for line in lines]
    lines = [line for line in stripped if line and line != title]
    chars = sum(map(len, lines))
    if chars > MAX_CHARS or _NOT_A_BANNER.search(title):
        return False
    buttons = [line for line in lines if len(line) <= _MAX_BUTTONS_CHARS and _BUTTONS.fullmatch(line)]
    texts = [line for line in lines if line not in buttons]
    if not any(map(_HAS_CHOICE.search, buttons)) or not any(map(_REQUEST.match, texts)):
        return False
    other_chars = sum(len(line) for line in texts if not _ABOUT.search(line))
    if other_chars > min(_MAX_OTHER_CHARS, _MAX_OTHER_SHARE * chars):
        return False
    return not _is_heading_of_policy(lines[0])


def _is_heading_of_policy(line: str) -> bool:
    if len(line) > _MAX_HEADING_CHARS or _REQUEST.match(line):
        return False
    return _POLICY.search(line) is not None
