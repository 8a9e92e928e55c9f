"""Connection strings: parsed as by the driver, or refused without showing their content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import quote, unquote, urlsplit

import nkeys
import pytest
from asyncpg.connect_utils import _parse_connect_dsn_and_args
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.dsn import Dsn, Host, parse_dsn
from openapi_tool.environment import likely_secrets
from openapi_tool.nats_client.login import file_problems
from openapi_tool.nats_client.options import NatsOptions
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.settings.driver_options import DriverOptions
from openapi_tool.urls import ServerUrl, parse_url
from tests.requirements import requirement
from tests.support import each

USER, DATABASE = "user-of-the-environment", "database-of-the-environment"
_ARGUMENTS = (
    *("host", "port", "user", "password", "passfile", "database", "ssl", "service", "servicefile", "direct_tls"),
    *("server_settings", "target_session_attrs", "krbsrvname", "gsslib"),
)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set only these variables of the driver, and hide files in the user's folder."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    with patch.dict(os.environ, {**others, "HOME": "/nowhere", **variables}, clear=True):
        yield


def driver(dsn: str) -> tuple[list[Any], Any]:
    """Return addresses and parameters from the driver's own parser. Raises its exceptions."""
    addresses, parameters = _parse_connect_dsn_and_args(dsn=dsn, **dict.fromkeys(_ARGUMENTS))
    return addresses, parameters


def address(host: Host) -> object:
    name, port = host
    port = port or 5432
    if name.startswith("/"):
        return name if ".s.PGSQL." in name else os.path.join(name, f".s.PGSQL.{port}")  # noqa: PTH118 - as the driver
    return name, port


def assert_read_alike(dsn: str) -> Dsn:
    """Check that the driver parses an accepted string alike; return it parsed."""
    parsed = parse_dsn(dsn)
    with environment(PGUSER=USER, PGDATABASE=DATABASE):
        addresses, parameters = driver(dsn)
    if parsed.hosts:
        assert [address(host) for host in parsed.hosts] == addresses
    assert parameters.user == (parsed.user or USER)
    assert parameters.password == parsed.password
    assert parameters.database == (DATABASE if parsed.database is None else parsed.database)
    return parsed


# fmt: off
ACCEPTED = [
    "postgresql://", "postgresql:///", "postgresql:///db", "postgres://h", "POSTGRES://h/db", "postgresql://h/",
    "postgresql://h:5433/db", "postgresql://h:/db", "postgresql://:5433/db", "postgresql://u@h/db", "postgresql://u@/db",
    "postgresql://u:p@h/db", "postgresql://u:@h/db", "postgresql://:p@h/db", "postgresql://u:p:q@h/db",
    "postgresql://u%40realm:p%2Fq%3F%23%40@h/d%2Fb", "postgresql://u:100%@h/db", "postgresql://u:p,q;r=s&t@h/db",
    "postgresql://\u00fc:p\u00e4ss@h/db", "postgresql://u:p@h/a/b", "postgresql://u:p@[::1]:5433/db",
    "postgresql://[::1]/db", "postgresql://[fe80::1%25eth0]:5432/db", "postgresql://h1,h2,h3/db",
    "postgresql://u:p@h1:1,h2:65535,h3/db?target_session_attrs=read-write", "postgresql://[::1]:1,[::2]/db",
    "postgresql://%2Ftmp/db", "postgresql://u:p@%2Fvar%2Frun%2Fpostgresql:5433/db", "postgresql://h%2E1/db",
    "postgresql:///db?host=/tmp", "postgresql:///db?host=/tmp,h2&port=5433", "postgresql:///db?host=h1:1,h2&user=u",
    "postgresql:///?host=h1,h2&port=1,2&dbname=db", "postgresql://?host=[::1]:7&database=db&password=p%40q",
    "postgresql://h?dbname=a&database=b", "postgresql://h/db?user=u&password=p&user=v", "postgresql://h/db?user=",
    "postgresql://u:p@h/db?user=v&password=q&host=other&port=7", "postgresql://h/db?sslmode=disable&sslpassword=x",
    "postgresql://h/db?application_name=a%20b&options=-c%20x%3Dy", "postgresql://h/db?passfile=/nowhere/pgpass",
    "postgresql://xn--bcher-kva.example/db", "postgresql://b\u00fccher.example/db", "postgresql://h_1.svc.cluster.local./d",
    "postgresql://h/db?sslmode=verify_full&sslmode=prefer", "postgresql://u:p@h/db?service=none",
]

CANARY = "zq7canary"
P = f"{CANARY}{{}}{CANARY}"
REFUSED = [
    # a password with a character that ends it for some parser; with digits before it, the rest would even be accepted
    *(f"postgresql://u:{P.format(char)}@h/db" for char in "/?#@[] \t\n\x00\x7f\u00a0\u2028\ud800\uff0f"),
    *(f"postgresql://u:5432{char}{CANARY}@h/db" for char in "/?#@"),
    f"postgresql://u:1?{CANARY}=x@h/db", f"postgresql://u:1?x={CANARY}@h/db", f"postgresql://u:1/{CANARY}?x@h/db",
    f"postgresql://u:{CANARY}@h@i/db", f"postgresql://u:{CANARY}@h/db@x", f"postgresql://u:{CANARY}@h/db?x=y@z",
    f"postgresql://u:{CANARY}", f"postgresql://u:{CANARY}/db", f"postgresql://u:{CANARY}@h/db#x",
    # hosts and ports
    f"postgresql://{CANARY}:x@::1/db", f"postgresql://x:{CANARY}@::1:5432/db", f"postgresql://x:{CANARY}@fe80::1/db",
    f"postgresql://u:{CANARY}@h:0/db", f"postgresql://u:{CANARY}@h:65536/db", f"postgresql://u:{CANARY}@h:99999999999/db",
    f"postgresql://u:{CANARY}@h:5_4/db", f"postgresql://u:{CANARY}@h:+5/db", f"postgresql://u:{CANARY}@h:\u0665/db",
    f"postgresql://u:{CANARY}@h1,,h2/db", f"postgresql://u:{CANARY}@h1,/db", f"postgresql://u:{CANARY}@,h/db",
    f"postgresql://u:{CANARY}@[::1/db", f"postgresql://u:{CANARY}@[::1]x/db", f"postgresql://u:{CANARY}@[{CANARY}]/db",
    f"postgresql://u:{CANARY}@[v1.x]/db", f"postgresql://u:{CANARY}@{'a' * 64}.b/db", f"postgresql://u:{CANARY}@a..b/db",
    f"postgresql://u:{CANARY}@a%2Fb/db", f"postgresql://u:{CANARY}@a%40b/db", f"postgresql://u:{CANARY}@a%00b/db",
    f"postgresql://u:{CANARY}@h%20i/db", f"postgresql://u:{CANARY}@/db?host=h1,h2&port=1,2,3",
    f"postgresql://u:{CANARY}@/db?port={CANARY}", f"postgresql://u:{CANARY}@/db?host=h,,i",
    f"postgresql://u:{CANARY}@/db?host=::1",
    # the query
    f"postgresql://u:{CANARY}@h/db?{CANARY}", f"postgresql://u:{CANARY}@h/db?a=b&&c=d", f"postgresql://h/db?a=b&{CANARY}",
    f"postgresql://u:{CANARY}@h/db?password=a b", f"postgresql://u:%00{CANARY}@h/db",
    # no connection string at all
    CANARY, f"mysql://u:{CANARY}@h/db", f"host=h password={CANARY}", f"postgresql:u:{CANARY}@h/db",
    f"//u:{CANARY}@h/db", f"postgresql:/u:{CANARY}@h/db", f" postgresql://u:{CANARY}@h/db",
]
# fmt: on


@each("dsn", ACCEPTED)
@requirement("settings.errors")
def test_a_dsn_is_parsed_as_by_the_driver(dsn: str) -> None:
    parsed = assert_read_alike(dsn)
    assert not parsed.password or parsed.password in parsed.credentials
    assert not any(secret in parsed.shown for secret in parsed.credentials if len(secret) > 1)


@each("dsn", REFUSED)
@requirement("settings.errors")
def test_an_ambiguous_dsn_is_refused_and_not_shown(dsn: str) -> None:
    with pytest.raises(ValueError, match="must look like postgresql://") as refusal:
        parse_dsn(dsn)
    assert CANARY not in str(refusal.value)
    assert refusal.value.__context__ is None or refusal.value.__suppress_context__
    assert str(refusal.value).isascii()


@requirement("settings.errors")
def test_the_error_lists_the_characters_to_percent_encode() -> None:
    with pytest.raises(ValueError, match=r"write % as %25, / as %2F, \? as %3F, # as %23, @ as %40"):
        parse_dsn("postgresql://u:p/q@h/db")


@given(st.text())
@requirement("settings.errors")
def test_any_password_of_a_dsn_is_parsed_whole_or_refused(password: str) -> None:
    try:
        parsed = assert_read_alike(f"postgresql://u:{password}@h/db")
    except ValueError:
        assert any(
            char in "/?#@[]" or not char.isprintable() or char.isspace() or not char.isascii() for char in password
        )
        return
    assert (parsed.password or "") == unquote(password)
    assert (parsed.user, parsed.hosts, parsed.database) == ("u", (("h", None),), "db")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
names = st.from_regex(r"[a-z0-9_]{1,9}(\.[a-z0-9-]{1,9}){0,2}", fullmatch=True)
ports = st.one_of(st.none(), st.integers(1, 65_535))
hosts = st.lists(
    st.tuples(
        names | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map("[{}]".format) | st.just("%2Frun%2Fpg"), ports
    ),
    min_size=1,
    max_size=3,
)


@given(hosts, texts, texts, texts, st.dictionaries(st.sampled_from(["user", "password", "dbname", "x"]), texts))
@requirement("settings.errors")
def test_percent_encoded_parts_of_a_dsn_are_accepted(
    hosts: list[tuple[str, int | None]], user: str, password: str, database: str, query: Mapping[str, str]
) -> None:
    places = ",".join(name + (f":{port}" if port else "") for name, port in hosts)
    pairs = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    encoded = [quote(text, safe="") for text in (user, password, database)]
    parsed = assert_read_alike(f"postgresql://{encoded[0]}:{encoded[1]}@{places}/{encoded[2]}?{pairs}".rstrip("?"))
    assert (parsed.user, parsed.password, parsed.database) == (user, password, database)
    assert len(parsed.hosts) == len(hosts)


PIECES = [
    *("postgresql://", "postgres://", "u", ":", "p", "@", "h", ",", "h2", ":5432", ":1", "/", "db", "?", "&", "=", "#"),
    *(
        "host=",
        "port=",
        "user=",
        "password=",
        "dbname=",
        "[",
        "]",
        "[::1]",
        "::1",
        "%2F",
        "%40",
        "%zz",
        "%",
        " ",
        "/run",
    ),
    *("1", "1,2", "sslmode=disable", "sslmode=require&sslnegotiation=direct", "\u00e4", "\uff0f", ".", ".."),
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map(lambda pieces: "postgresql://" + "".join(pieces)))
@requirement("settings.errors")
def test_any_dsn_is_refused_or_parsed_as_by_the_driver(dsn: str) -> None:
    try:
        parse_dsn(dsn)
    except ValueError as refusal:
        assert str(refusal).isascii()
        return
    with environment():
        refused = problems(dsn)
    if refused:
        with environment(), pytest.raises((ValueError, OSError)):
            driver(dsn)
    else:
        assert_read_alike(dsn)


@requirement("settings.errors")
def test_the_repr_of_a_dsn_shows_no_password() -> None:
    dsn = f"postgresql://u:{CANARY}@h/db?password={CANARY}&sslpassword={CANARY}"
    assert CANARY not in repr(parse_dsn(dsn))
    assert parse_dsn(dsn).credentials == (CANARY,)


# fmt: off
BAD_ENVIRONMENT: list[tuple[str, dict[str, str], str]] = [
    ("postgresql://h/db", {"PGPORT": "abc"}, "PGPORT"),
    ("postgresql://h:5432/db", {"PGPORT": "abc"}, "PGPORT"),
    ("postgresql://h1,h2/db", {"PGPORT": "1,2,3"}, "PGPORT"),
    ("postgresql:///db", {"PGPORT": "1,2"}, "PGPORT"),
    ("postgresql:///db", {"PGHOST": "h1,h2", "PGPORT": "1,x"}, "PGPORT"),
    ("postgresql:///db", {"PGHOST": "h1,,h2"}, "PGHOST"),
    ("postgresql:///db", {"PGHOST": "::1"}, "PGHOST"),
    ("postgresql://h/db", {"PGSSLMODE": "nonsense"}, "PGSSLMODE"),
    ("postgresql://h/db", {"PGSSLMODE": ""}, "PGSSLMODE"),
    ("postgresql://h/db?sslmode=nonsense", {}, "postgres.dsn: sslmode"),
    ("postgresql://h/db?sslmode=verify-full", {}, "postgres.dsn: sslmode"),
    ("postgresql://h/db", {"PGSSLMODE": "verify-ca"}, "PGSSLMODE"),
    ("postgresql://h/db?sslmode=require&sslrootcert=/nowhere", {}, "postgres.dsn: sslrootcert"),
    ("postgresql://h/db?sslmode=require", {"PGSSLROOTCERT": __file__}, "PGSSLROOTCERT"),
    ("postgresql://h/db", {"PGSSLCERT": "/nowhere"}, "PGSSLCERT"),
    ("postgresql://h/db", {"PGSSLMINPROTOCOLVERSION": "SSLv3"}, "PGSSLMINPROTOCOLVERSION"),
    ("postgresql://h/db?ssl_max_protocol_version=TLSv9", {}, "postgres.dsn: ssl_max_protocol_version"),
    ("postgresql://h/db", {"PGSSLNEGOTIATION": "maybe"}, "PGSSLNEGOTIATION"),
    ("postgresql://h/db?sslnegotiation=direct", {}, "postgres.dsn: sslnegotiation"),
    ("postgresql://h/db", {"PGTARGETSESSIONATTRS": "any-time"}, "PGTARGETSESSIONATTRS"),
    ("postgresql://h/db", {"PGGSSLIB": "x"}, "PGGSSLIB"),
]
GOOD_ENVIRONMENT: list[tuple[str, dict[str, str]]] = [
    ("postgresql://h/db", {}),
    ("postgresql://h1,h2/db", {"PGPORT": "5433"}),
    ("postgresql://h1,h2/db", {"PGPORT": "1,2"}),
    ("postgresql://h/db", {"PGPORT": ""}),
    ("postgresql:///db", {"PGHOST": "h1,[::1]:7,/tmp", "PGPORT": "5433"}),
    ("postgresql:///db?host=h1,h2&port=1,2", {"PGHOST": "::1"}),
    ("postgresql://h/db", {"PGSSLMODE": "require", "PGSSLMINPROTOCOLVERSION": "TLSv1.3", "PGGSSLIB": "gssapi"}),
    ("postgresql://h/db?sslmode=disable", {"PGSSLMODE": "nonsense", "PGSSLROOTCERT": "/nowhere"}),
    ("postgresql://h/db?sslmode=require", {"PGSSLNEGOTIATION": "direct", "PGTARGETSESSIONATTRS": "prefer-standby"}),
]
# fmt: on


def problems(dsn: str) -> list[str]:
    return list(DriverOptions(parse_dsn(dsn), os.environ, Path("/nowhere")).problems())


@pytest.mark.parametrize(("dsn", "variables", "named"), BAD_ENVIRONMENT)
@requirement("settings.errors")
def test_options_that_the_driver_refuses_are_reported(dsn: str, variables: dict[str, str], named: str) -> None:
    with environment(**variables):
        with pytest.raises((ValueError, OSError, IndexError)):
            driver(dsn)
        reported = problems(dsn)
    assert [problem.startswith(f"{named}: ") for problem in reported] == [True]
    assert not any(value in problem for value in variables.values() for problem in reported if len(value) > 3)


@pytest.mark.parametrize(("dsn", "variables"), GOOD_ENVIRONMENT)
@requirement("settings.errors")
def test_options_that_the_driver_accepts_are_not_reported(dsn: str, variables: dict[str, str]) -> None:
    with environment(**variables):
        driver(dsn)
        assert problems(dsn) == []


@requirement("settings.errors")
def test_a_process_without_a_user_name_needs_a_user_in_the_dsn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have an arbitrary user id, with which the driver would raise KeyError."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    with environment():
        with pytest.raises(KeyError):
            driver("postgresql://h/db")
        assert [problem.partition(";")[0] for problem in problems("postgresql://h/db")] == [
            "postgres.dsn: names no user, and the process has none"
        ]
        assert problems("postgresql://u@h/db") == []
    with environment(PGUSER="u"):
        assert problems("postgresql://h/db") == []


def passwords(dsn: str, home: Path) -> set[str]:
    return {option.value for option in DriverOptions(parse_dsn(dsn), os.environ, home).passwords()}


@requirement("secrets.output")
def test_passwords_that_the_driver_reads_from_files_and_variables_are_known(tmp_path: Path) -> None:
    (tmp_path / ".pgpass").write_text("# none\nh:*:*:u:of\\:file\n*:*:*:*:another\n")
    (tmp_path / ".pgpass").chmod(0o600)
    (tmp_path / ".pg_service.conf").write_text("[mine]\nuser=u\npassword=of-service\nsslpassword=of-key\n")
    with environment():
        assert passwords("postgresql://u@h/db", tmp_path) == {"of\\:file", "of:file", "another"}
        assert passwords("postgresql://u:p@h/db", tmp_path) == set()
        assert passwords("postgresql://u:p@h/db?service=mine", tmp_path) == {"of-service", "of-key"}
        assert passwords("postgresql://u@h/db", tmp_path / "nowhere") == set()
    with environment(PGPASSWORD="of-variable"):
        assert passwords("postgresql://u@h/db", tmp_path) == {"of-variable"}
    with environment(PGPASSFILE=str(tmp_path / ".pgpass"), HOME=str(tmp_path)):
        assert driver("postgresql://u@h/db")[1].password in passwords("postgresql://u@h/db", Path("/nowhere"))


@requirement("settings.errors")
def test_files_in_a_folder_that_cannot_be_read_are_none() -> None:
    """As in a container whose user is not the owner of its HOME; root may read any, so here the name is too long."""
    with environment():
        options = DriverOptions(parse_dsn("postgresql://u@h/db?sslmode=require"), os.environ, Path("/", "x" * 300))
        assert list(options.problems()) == []


@pytest.mark.parametrize(
    "content", [b"[mine\n", b"password=x\n[mine]", b"[mine]\npassword=\xff\xfe", b"[mine]\npassword=100%"]
)
@requirement("settings.errors")
def test_an_unreadable_service_file_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".pg_service.conf").write_bytes(content)
    with environment(), pytest.raises(ValueError, match=r"^postgres.dsn: the service file cannot be parsed"):
        DriverOptions(parse_dsn("postgresql://h/db?service=mine"), os.environ, tmp_path)


@requirement("settings.errors")
def test_a_service_is_parsed_as_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / ".pg_service.conf").write_text("[mine]\nsslmode=nonsense\nport=x\n")
    with environment():
        reported = list(DriverOptions(parse_dsn("postgresql:///db?service=mine"), os.environ, tmp_path).problems())
    assert ["sslmode" in reported[0], "port" in reported[1]] == [True, True]


# URLs of servers in the settings: parsed as by the drivers, or refused without showing their content.


CANARY_URLS = "zq7canary"
SCHEMES = ("nats", "tls", "http", "https")


def assert_read_alike_urls(url: str) -> ServerUrl:
    """Assert that the standard library, which the drivers use, parses an accepted URL alike."""
    parsed, parts = parse_url(url, SCHEMES), urlsplit(url)
    assert parsed.scheme == parts.scheme
    assert parsed.host.strip("[]").lower() == parts.hostname
    assert (parsed.port, parsed.path, parsed.query) == (parts.port, parts.path, parts.query)
    assert (parsed.user, parsed.password) == (parts.username, parts.password)
    return parsed


# fmt: off
ACCEPTED_URLS = [
    "nats://h", "NATS://h:4222", "tls://u:p@h:4222", "nats://token@h", "nats://u:p:q@h:1", "nats://u:p%40q@h", "nats://:@h",
    "nats://[::1]", "nats://u:p@[2001:db8::1]:65535", "https://h/v1/traces?x=1", "https://u:p@h:4318/v1/traces",
    "http://h_1.svc.cluster.local.:80/", "http://b\u00fccher.example/", "http://127.0.0.1:1",
]
REFUSED_URLS = [
    CANARY_URLS, f"//{CANARY_URLS}@h", f"ftp://u:{CANARY_URLS}@h", f"nats:{CANARY_URLS}@h", f"nats:/{CANARY_URLS}@h", f"http://{CANARY_URLS}:@",
    *(f"nats://u:{CANARY_URLS}{char}{CANARY_URLS}@h:1" for char in "/?#@[] \t\n\x00\x7f\u00a0\u2028\ud800"),
    *(f"nats://u:1{char}{CANARY_URLS}@h:1" for char in "/?#@"),
    f"nats://{CANARY_URLS}@::1:4222", f"nats://{CANARY_URLS}@::1", f"nats://{CANARY_URLS}@[::1", f"nats://{CANARY_URLS}@[{CANARY_URLS}]",
    f"nats://{CANARY_URLS}@[::1]4222", f"nats://{CANARY_URLS}@h:0", f"nats://{CANARY_URLS}@h:65536", f"nats://{CANARY_URLS}@h:{CANARY_URLS}",
    f"nats://{CANARY_URLS}@h:+1", f"nats://{CANARY_URLS}@h:1_0", f"nats://{CANARY_URLS}@h:\u0665", f"nats://{CANARY_URLS}@h:",
    f"nats://{CANARY_URLS}@{'a' * 64}.b", f"nats://{CANARY_URLS}@a..b", f"nats://{CANARY_URLS}@.a", f"nats://{CANARY_URLS}@h%2fi",
    f"nats://{CANARY_URLS}@h\\i", f"nats://{CANARY_URLS}@h,i", f"nats://{CANARY_URLS}@", f"https://h/{CANARY_URLS}@x", f"https://h?{CANARY_URLS}@x",
    f"https://h/x#{CANARY_URLS}", f"https://{CANARY_URLS}\uff0f@h/",
]
# fmt: on


@each("url", ACCEPTED_URLS)
@requirement("settings.errors")
def test_a_url_is_parsed_as_by_the_drivers(url: str) -> None:
    parsed = assert_read_alike_urls(url)
    assert not any(secret in parsed.shown for secret in parsed.credentials if len(secret) > 1)


@each("url", REFUSED_URLS)
@requirement("settings.errors")
def test_an_ambiguous_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"^(is no|a port|a host|an address)") as refusal:
        parse_url(url, SCHEMES)
    assert CANARY_URLS not in str(refusal.value)
    assert refusal.value.__context__ is None or refusal.value.__suppress_context__


@given(st.text())
@requirement("settings.errors")
def test_any_password_of_a_url_is_parsed_whole_or_refused(password: str) -> None:
    try:
        parsed = assert_read_alike_urls(f"nats://u:{password}@h:4222")
    except ValueError:
        return
    assert (parsed.user, parsed.password, parsed.host, parsed.port) == ("u", password, "h", 4222)


PIECES_URLS = [
    "nats://",
    "u",
    ":",
    "p",
    "@",
    "h",
    ",",
    ":1",
    "/",
    "?",
    "&",
    "#",
    "[",
    "]",
    "[::1]",
    "::1",
    "%40",
    " ",
    "\u00e4",
]


@given(st.lists(st.sampled_from(PIECES_URLS), max_size=12).map(lambda pieces: "nats://" + "".join(pieces)))
@requirement("settings.errors")
def test_any_url_is_refused_or_parsed_as_by_the_drivers(url: str) -> None:
    try:
        parse_url(url, SCHEMES)
    except ValueError:
        return
    assert_read_alike_urls(url)


@requirement("settings.errors")
def test_the_repr_of_a_url_shows_no_password() -> None:
    assert CANARY_URLS not in repr(parse_url(f"nats://{CANARY_URLS}:{CANARY_URLS}@h?{CANARY_URLS}", SCHEMES))


@pytest.mark.parametrize(
    ("variable", "url", "expected"),
    [
        ("NATS_SERVERS", f"nats://u:{CANARY_URLS}/x@h:4222", "nats.user and nats.password"),
        ("NATS_SERVERS", f"nats://h:4222/{CANARY_URLS}", "must end with the host or its port"),
        ("NATS_SERVERS", "nats://h:4222,wss://h:443", "must be all nats:// and tls://"),
        ("OPENAPI_TOOL__EGRESS__PROXY", f"http://u:{CANARY_URLS}@proxy", "with the port"),
        (
            "OPENAPI_TOOL__EGRESS__PROXY",
            f"http://u:{CANARY_URLS}@proxy:99999",
            "EGRESS__PROXY): a port",
        ),
        ("OPENAPI_TOOL__EGRESS__PROXY", f"http://u:{CANARY_URLS}/x@proxy:3128", "/ as %2F"),
        ("OPENAPI_TOOL__EGRESS__PROXY", f"http://u:{CANARY_URLS}@proxy:3128/x", "with the port"),
        ("OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT", f"http://u:{CANARY_URLS}#x@h:4318", "# as %23"),
        ("OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT", f"ftp://u:{CANARY_URLS}@h:4318", "must look like https://"),
    ],
)
@requirement("settings.errors")
def test_each_setting_names_the_remedy_for_a_wrong_url(
    variable: str, url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://h/db")
    monkeypatch.setenv(variable, url)
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert expected in str(wrong.value)
    assert CANARY_URLS not in str(wrong.value)


@requirement("settings.errors", "secrets.output")
def test_every_part_of_an_ambiguous_url_is_masked() -> None:
    """A crash before the settings are read may show any of them."""
    known = likely_secrets({"PG_DSN": f"postgresql://u:{CANARY_URLS}1/{CANARY_URLS}2@h:5432/db"})
    assert {f"{CANARY_URLS}1", f"{CANARY_URLS}2"} <= set(known)
    assert likely_secrets({"PG_DSN": f"postgresql://u:{CANARY_URLS},x@h/db\n"}) == [f"{CANARY_URLS},x"]


# Files for a login to NATS: checked before any connection.


TOKEN = b"header.claims-of-a-user.signature"


def seed(prefix: int = nkeys.PREFIX_BYTE_USER) -> bytes:
    made: bytes = nkeys.encode_seed(os.urandom(32), prefix)
    return made


def credentials(token: bytes, seed: bytes, end: bytes = b"\n") -> bytes:
    lines = [b"-----BEGIN NATS USER JWT-----", token, b"------END NATS USER JWT------", b""]
    lines += [b"-----BEGIN USER NKEY SEED-----", seed, b"------END USER NKEY SEED------", b""]
    return end.join(lines)


GOOD = seed()
OTHER = b"A" if GOOD[20:21] != b"A" else b"B"
BROKEN_SEEDS = {
    "empty": b"",
    "text": b"not a seed at all",
    "one character less": GOOD[:-1],
    "one character more": GOOD + b"A",
    "another character": GOOD[:20] + OTHER + GOOD[21:],
    "lower case": GOOD.lower(),
    "a blank in it": GOOD[:20] + b" " + GOOD[20:],
    "of an account": seed(nkeys.PREFIX_BYTE_ACCOUNT),
    "a public key": bytes(nkeys.from_seed(bytearray(GOOD)).public_key),
    "no text": os.urandom(58),
    "very long": b"A" * 60_000,
}


@pytest.mark.parametrize("broken", BROKEN_SEEDS.values(), ids=BROKEN_SEEDS)
@requirement("settings.errors", "nats.login")
def test_an_invalid_seed_file_is_reported_without_its_content(broken: bytes, tmp_path: Path) -> None:
    file = tmp_path / "user.nk"
    file.write_bytes(broken)
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "nats": {"nkey_seed_file": file}})
    with pytest.raises(SettingsError) as wrong:
        build_bootstrap(settings, {})
    assert str(wrong.value).startswith(f"nats.nkey_seed_file ({file}): holds no seed of a user")
    assert broken[:20] not in str(wrong.value).encode() or not broken


BROKEN_CREDENTIALS = {
    "empty": b"",
    "only a token": b"-----BEGIN NATS USER JWT-----\n" + TOKEN,
    "only a seed": b"-----BEGIN USER NKEY SEED-----\n" + GOOD + b"\n",
    "a mark at the end": b"-----BEGIN NATS USER JWT-----",
    "no token": credentials(b"", GOOD),
    "a token in two parts": credentials(b"header.claims", GOOD),
    "line ends of Windows": credentials(TOKEN, GOOD, b"\r\n"),
    "all in one line": credentials(TOKEN, GOOD, b" "),
    **{f"a seed: {name}": credentials(TOKEN, broken) for name, broken in BROKEN_SEEDS.items()},
}


@pytest.mark.parametrize("broken", BROKEN_CREDENTIALS.values(), ids=BROKEN_CREDENTIALS)
@requirement("settings.errors", "nats.login")
def test_an_invalid_credentials_file_is_reported_without_its_content(broken: bytes, tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_bytes(broken)
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://h/db"}, "nats": {"credentials_file": file}})
    with pytest.raises(SettingsError) as wrong:
        build_bootstrap(settings, {})
    assert str(wrong.value).startswith(f"nats.credentials_file ({file}): no ")
    assert not any(secret in str(wrong.value).encode() for secret in (TOKEN, GOOD))


@requirement("nats.login")
def test_valid_seed_and_credentials_files_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "login"
    for content in (GOOD, GOOD + b"\n", b"\r\n " + GOOD + b"\r\n"):
        file.write_bytes(content)
        assert list(file_problems(NatsOptions(nkey_seed_file=file))) == []
    file.write_bytes(credentials(TOKEN, GOOD))
    assert list(file_problems(NatsOptions(credentials_file=file))) == []


@requirement("settings.errors")
@pytest.mark.parametrize("setting", ["nkey_seed_file", "credentials_file"])
def test_a_file_deleted_after_its_check_is_reported(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "deleted"
    file.touch()
    login: dict[str, Any] = {setting: file}
    options = NatsOptions(**login)
    file.unlink()
    expected = f"nats.{setting} ({file}): cannot be read: No such file or directory"
    assert list(file_problems(options)) == [expected]
