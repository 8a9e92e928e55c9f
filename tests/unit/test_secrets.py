"""Secrets: how they are read, stored and masked."""

from __future__ import annotations

import base64
import copy
import errno
import html
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_plus

import httpx
import nkeys
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from pydantic import BaseModel, SecretStr, ValidationError, field_validator
from typer.testing import CliRunner

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app, call
from openapi_tool.cli.call_outcome import CallOutcome
from openapi_tool.environment import likely_secrets
from openapi_tool.jina.byte_semaphore import ByteSemaphore
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.options import RetryOptions
from openapi_tool.jina.request import UpstreamRequest
from openapi_tool.jina.response import Expected
from openapi_tool.kernel.jetstream.dead_letter_records import unmasked_letter, without_secrets
from openapi_tool.local.caller import ResultRows
from openapi_tool.protocol.errors import ToolError, ToolMisconfigured
from openapi_tool.quotas.permits import Permit, PermitRequest, Unlimited
from openapi_tool.service import process as service
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.settings.driver_options import DriverOptions
from openapi_tool.settings.known_secrets import secret_values
from openapi_tool.telemetry.log_writer import LogWriter
from openapi_tool.telemetry.logs import JsonFormatter
from openapi_tool.telemetry.redact import MASK, MIN_SECRET_CHARS, Redactor, is_maskable, of_call
from openapi_tool.tools.deadlines import Deadline
from openapi_tool.tools.secret_variables import Secret, Secrets
from tests.answering import ToolsOverTransport, for_request
from tests.requirements import requirement
from tests.support import delivery, each
from tests.waiting import WAIT_S

AWKWARD = "ké y+/=%&\"'\\<p>~"
NAMES = {"JINA_API_KEY", "EXTRA"}
VALUE = "a-value-of-the-test"
DSN = {"postgres": {"dsn": "postgresql://u:the-password@db/kernel"}}

ENCODINGS: dict[str, Callable[[str], str]] = {
    "exact": str,
    "percent": lambda text: quote(text, safe=""),
    "percent, lower case": lambda text: re.sub("%..", lambda code: code[0].lower(), quote(text, safe="")),
    "percent, a path": quote,
    "percent, a form": quote_plus,
    "percent, twice": lambda text: quote(quote(text, safe=""), safe=""),
    "JSON": json.dumps,
    "JSON, UTF-8": lambda text: json.dumps(text, ensure_ascii=False),
    "JSON in JSON": lambda text: json.dumps(json.dumps({"k": text})),
    "repr": repr,
    "repr with both quotes": lambda text: repr(["it's \"" + text]),
    "repr of bytes": lambda text: repr(text.encode()),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "Basic": lambda text: "Basic " + base64.b64encode(f"user:{text}".encode()).decode(),
    "base64, one before": lambda text: base64.b64encode(f"x{text}y".encode()).decode(),
    "base64, two before": lambda text: base64.b64encode(f"xx{text}yy".encode()).decode(),
    "base64, URL": lambda text: base64.urlsafe_b64encode(f"x{text}yz".encode()).decode(),
    "base64, percent": lambda text: quote(base64.b64encode(f"x{text}y".encode()).decode(), safe=""),
    "markdown": lambda text: re.sub(r"([^\w\s])|(_)", r"\\\1\2", text),
    "markdown of what would be markdown": lambda text: re.sub(r"([\\`*_\[\]])", r"\\\1", text),
    "JSON, slashes": lambda text: json.dumps(text).replace("/", "\\/"),
    "HTML": html.escape,
    "HTML, twice": lambda text: html.escape(html.escape(text)),
    "HTML of a repr": lambda text: html.escape(repr(text)),
    "entities": lambda text: "".join(f"&#{ord(char)};" for char in text),
    "entities, hexadecimal": lambda text: "".join(f"&#x{ord(char):x};" for char in text),
    "entities, upper case": lambda text: "".join(f"&#x{ord(char):X};" for char in text),
    "entities of marks": lambda text: re.sub(r"[^\w\s]", lambda mark: f"&#{ord(mark[0]):04};", text),
    "hexadecimal": lambda text: text.encode().hex(),
    "hexadecimal, upper case": lambda text: f"0x{text.encode().hex().upper()}",
    "lower case": str.lower,
    "upper case": lambda text: text.replace("ß", "\0").upper().replace("\0", "ß"),  # one letter stays one
    "percent of HTML": lambda text: quote(html.escape(text), safe=""),
    "JSON of markdown": lambda text: json.dumps(re.sub(r"([\\`*_\[\]])", r"\\\1", text)),
    "each letter in percent": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "each letter in unicode escapes": lambda text: "".join(f"\\u{ord(char):04x}" for char in text),
    "mixed": lambda text: "".join(quote(char) if place % 2 else html.escape(char) for place, char in enumerate(text)),
}


@each("encoding", ENCODINGS)
@each("secret", [AWKWARD, "plain-secret", "päßwörter-и-ключи", "a/b?c>d~~~~~e", "jina_own_KEY_0-1", "\\\\srv\\[a]*_b_"])
@requirement("secrets.output")
def test_a_secret_is_masked_in_every_common_encoding(secret: str, encoding: str) -> None:
    text = "before " * 200 + ENCODINGS[encoding](secret) + " after"
    for some in (text, text[-len(text) + 1350 :]):
        masked = Redactor([secret, "another secret"]).text(some)
        assert MASK in masked
        assert secret not in masked
        assert "after" in masked


@pytest.mark.thorough
@given(
    before=st.binary(max_size=40),
    behind=st.binary(max_size=40),
    secret=st.text(min_size=8, max_size=60).filter(is_maskable),  # Hypothesis also tries words of the code
)
@requirement("secrets.output")
def test_nothing_but_the_edges_of_base64_is_left(before: bytes, behind: bytes, secret: str) -> None:
    value = secret.encode("utf-8", "surrogatepass")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(before + value + behind).decode()
        masked = Redactor([secret]).text(text)
        assert MASK in masked
        assert len(masked) - len(MASK) <= len(encode(before)) + len(encode(behind)) + 4


@requirement("secrets.output")
def test_a_key_that_is_in_no_setting_is_masked_as_markdown_writes_it_too() -> None:
    key = "jina_" + "0123456789abcdef" * 4
    for written in (key, key.replace("_", r"\_"), quote(key).replace("_", "%5F"), key + r"\_more-of\-it"):
        assert Redactor().text(f"a {written} b") == f"a {MASK} b"


@given(before=st.integers(65_500, 65_560), text=st.sampled_from(["plain-secret", r"plain\-secret", "PLAIN%2DSECRET"]))
@requirement("secrets.output")
def test_a_secret_on_the_edge_of_two_slices_is_masked(before: int, text: str) -> None:
    masked = Redactor(["plain-secret"]).text("x " * 32_740 + "y" * (before - 65_480) + text + " z" * 70_000)
    assert masked.count(MASK) == 1
    assert "lain" not in masked.lower()


@given(
    chars=st.integers(0, 60), secret=st.sampled_from(["plain-secret", "päßwort"]), form=st.sampled_from([*ENCODINGS])
)
@requirement("secrets.output")
def test_a_head_has_no_half_of_a_secret(chars: int, secret: str, form: str) -> None:
    written = ENCODINGS[form](secret)
    text = "b " * 10 + written + " e" * 100
    head = Redactor([secret]).head(text, chars)
    whole = Redactor([secret]).text(text)
    assert head == whole[: len(head)]
    assert len(head) >= min(chars, len(whole)) - len(written)
    assert len(head) <= chars + len(MASK)


class _PoolPermits(Unlimited):
    """Permits of a pool: each request is sent with the next key."""

    def __init__(self, *keys: str) -> None:
        self._keys = cycle(keys)

    async def acquire(self, wanted: PermitRequest) -> Permit:
        wanted.key = SecretStr(next(self._keys))
        return await super().acquire(wanted)


@pytest.mark.parametrize(
    "values", [{"url": "https://a.example/"}, {"urls": ["https://a.example/", "https://b.example/"]}]
)
@requirement("secrets.output", "keys.pools")
async def test_the_keys_of_all_attempts_and_items_of_a_call_are_masked(values: dict[str, Any]) -> None:
    keys = ("first-key-of-the-pool", "second-key-of-the-pool", "third-key-of-the-pool")
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"].removeprefix("Bearer "))
        if len(sent) == 1:
            return httpx.Response(503, content=b"{}")
        return httpx.Response(
            200, json={"code": 200, "data": {"title": "t", "content": " ".join([*sent, "unsent-key-of-a-pool"])}}
        )

    tools = ToolsOverTransport(answer, options={"retry": RetryOptions(2, 0.01, 0.01)}, permits=_PoolPermits(*keys))
    fields, _, _ = await tools.card(key="a-key-that-is-not-sent", **values)
    card = orjson.dumps(fields).decode()
    assert len(set(sent)) == len(values.get("urls", [0])) + 1
    assert not [key for key in sent if key in card]
    assert "unsent-key-of-a-pool" in card


@requirement("secrets.output")
def test_a_secret_that_comes_back_as_a_number_is_masked() -> None:
    redactor = Redactor(["12345678"])
    assert redactor.value({"pages": 12345678, "x": [1.5, 12345678.0]}) == {"pages": MASK, "x": [1.5, f"{MASK}.0"]}
    assert redactor.value([123, True]) == [123, True]


@pytest.mark.parametrize("secret", ["123456789012345999999999", "41777631706690749", "1234567890129999999"])
@pytest.mark.parametrize("form", ["r", ".0f", ".14e", ".15e", ".16e"])
@requirement("secrets.output")
def test_a_long_number_is_masked_however_it_is_rounded(secret: str, form: str) -> None:
    """If rounding carries, the rounded digits differ from those of the secret."""
    number = float(secret)
    text = f"pages: {number!r}" if form == "r" else f"pages: {number:{form}}"
    assert Redactor([secret]).text(text) == f"pages: {MASK}"


@requirement("secrets.output")
def test_masked_values_are_counted_by_place() -> None:
    def counted(where: str) -> float:
        return REGISTRY.get_sample_value("openapi_tool_masked_values_total", {"where": where}) or 0.0

    before = counted("answer"), counted("error")
    assert of_call(["plain-secret"]).text("plain-secret, plain-secret") == f"{MASK}, {MASK}"
    Redactor(["plain-secret"]).with_label("error").text("nothing, plain-secret")
    assert (counted("answer") - before[0], counted("error") - before[1]) == (2, 1)


HOSTILE_TEXTS = (
    "plain-secreT",
    "plain\\",
    "\\",
    "%25",
    "&amp;",
    "&#112;",
    "plain",
    "jina_",
    "jina\\_0",
    "cGxhaW4tc2Vj",
    "%5c",
)


@pytest.mark.parametrize("pump", HOSTILE_TEXTS)
@requirement("secrets.output", "loop.answers")
def test_no_text_makes_the_search_for_secrets_slow(pump: str) -> None:
    redactor = Redactor(["plain-secret", "\\\\a\\\\\\b", AWKWARD])

    def is_slow() -> bool:
        began = time.thread_time()
        redactor.text(pump * (300_000 // len(pump)))
        return time.thread_time() - began >= 0.75  # some 50 ms

    assert not all(is_slow() for _ in range(3))  # a collection of garbage may lengthen one


@requirement("secrets.output")
def test_values_that_are_no_json_are_masked_too() -> None:
    redactor = Redactor(["a-secret"])
    odd = {"bytes": b"a-secret", "path": Path("/x/a-secret"), "error": ValueError("a-secret"), 1: {"a-secret"}}
    assert "a-secret" not in str(redactor.value(odd))
    assert redactor.value([None, True, 1, 1.5]) == [None, True, 1, 1.5]


class Model(BaseModel):
    key: Secret

    @field_validator("key")
    @classmethod
    def _refuse(cls, key: Secret) -> Secret:
        if key.get_secret_value() == "refused-value":
            raise ValueError(f"{key} {key!r}")
        return key


@requirement("secrets.output")
def test_a_secret_shows_in_no_text_json_or_traceback() -> None:
    secret = Secret(VALUE)
    model = Model(key=secret)
    try:
        raise ValueError(secret, [secret], {"k": secret})  # noqa: TRY301
    except ValueError:
        shown = [traceback.format_exc(), *map(str, (secret, repr(secret), model, [secret]))]
    shown += [f"{secret}", f"{secret!r:>40}", "%s %r" % (secret, secret), model.model_dump_json()]  # noqa: UP031
    shown += [str(model.model_dump()), orjson.dumps(secret, default=str).decode()]
    assert not [text for text in shown if VALUE in text]
    with pytest.raises(TypeError):
        json.dumps(secret)
    with pytest.raises(ValidationError) as refused:
        Model(key=Secret("refused-value"))
    assert "refused-value" not in str(refused.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@requirement("secrets.output")
def test_a_secret_is_not_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps({"a": Secret(VALUE)}, protocol)
    secret = Secret(VALUE)
    assert copy.deepcopy([secret])[0] is copy.copy(secret) is secret


OWN = (
    *("PG_DSN", "PG_DSN_FILE", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "NATS_SERVERS", "NATS_TOKEN"),
    *("OPENAPI_TOOL__SESSION__KEY", "OPENAPI_TOOL_CONFIG", "CG_CONFIG_TOML", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HTTPS_PROXY_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)


@each("name", [*OWN, *(name.lower() for name in OWN)])
@requirement("options.envs")
def test_a_variable_of_the_executor_itself_is_never_handed_out(name: str) -> None:
    secrets = Secrets({name: VALUE}, {name})
    with pytest.raises(ToolMisconfigured, match=f"{name}.*never given"):
        secrets(name)
    assert secrets.values() == {}


@pytest.mark.parametrize(
    "name", ["JINA_API_KEY", "SEARCH_KEY_FILE", "MY_PG_KEY", "HTTP_PROXY_KEY", "SSL_KEY", "NATSUKI"]
)
@requirement("options.envs")
def test_a_variable_that_only_looks_like_one_of_them_is_a_tools(name: str) -> None:
    assert Secrets({name: VALUE}, {name})(name).get_secret_value() == VALUE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{VALUE}\n")
    return path


@requirement("secrets.files")
def test_a_value_comes_from_the_file_that_its_variable_names(file: Path) -> None:
    secrets = Secrets({"JINA_API_KEY_FILE": str(file), "OTHER_FILE": str(file)}, NAMES)
    assert secrets("JINA_API_KEY").get_secret_value() == VALUE
    assert secrets.values() == {"JINA_API_KEY": VALUE}
    assert (secrets.missing(), secrets.problems) == (["EXTRA"], [])
    file.write_text("changed")
    assert secrets("JINA_API_KEY").get_secret_value() == VALUE


@requirement("secrets.files")
def test_a_byte_order_mark_is_no_part_of_a_value(file: Path) -> None:
    """Windows editors and PowerShell write one before a text; such a key passed the start, and failed in every call."""
    for content in (b"\xef\xbb\xbf" + VALUE.encode(), b"\xef\xbb\xbf " + VALUE.encode() + b"\r\n"):
        file.write_bytes(content)
        secrets = Secrets({"JINA_API_KEY_FILE": str(file)}, NAMES)
        assert (secrets.problems, secrets.values()) == ([], {"JINA_API_KEY": VALUE})
    file.write_bytes(b"\xef\xbb\xbf")
    assert "must hold one value" in Secrets({"JINA_API_KEY_FILE": str(file)}, NAMES).problems[0]


def _unusable(file: Path) -> dict[str, tuple[dict[str, str], str]]:
    folder = file.parent
    for name, content in {"empty": b"\n", "no-text": b"\xff\xfe", "lines": b"a\nb", "huge": b"x" * 65_537}.items():
        (folder / name).write_bytes(content)
    return {
        "both": ({"JINA_API_KEY": "x", "JINA_API_KEY_FILE": str(file)}, "are both set; unset one of them"),
        "missing": ({"JINA_API_KEY_FILE": str(folder / "nowhere")}, "cannot be read: No such file or directory"),
        "folder": ({"JINA_API_KEY_FILE": str(folder)}, "cannot be read: Is a directory"),
        "NUL": ({"JINA_API_KEY_FILE": "a\0b"}, "JINA_API_KEY_FILE: the file that it names cannot be read"),
        "empty": ({"JINA_API_KEY_FILE": str(folder / "empty")}, "must hold one value"),
        "no-text": ({"JINA_API_KEY_FILE": str(folder / "no-text")}, "it is not UTF-8 text"),
        "huge": ({"JINA_API_KEY_FILE": str(folder / "huge")}, "cannot be read: larger than 65,536 bytes"),
        "lines": ({"JINA_API_KEY_FILE": str(folder / "lines")}, "contains a line break"),
        "variable": ({"JINA_API_KEY": "a\r\nX-Evil: 1"}, "contains a line break"),
        "umlaut": ({"JINA_API_KEY": "X-Evil-schlüssel"}, "JINA_API_KEY: contains a non-ASCII character"),
        "mark": ({"JINA_API_KEY": "\ufeffX-Evil"}, "JINA_API_KEY: contains a non-ASCII character"),
    }


@pytest.mark.parametrize(
    "case",
    ["both", "missing", "folder", "NUL", "empty", "no-text", "huge", "lines", "variable", "umlaut", "mark"],
)
@requirement("secrets.files")
def test_unusable_value_is_named_at_start_without_path_and_content(case: str, file: Path) -> None:
    environment, says = _unusable(file)[case]
    with pytest.raises(SettingsError, match=says) as wrong:
        build_bootstrap(Settings.model_validate(DSN), environment)
    assert "JINA_API_KEY" in str(wrong.value)
    assert str(file.parent) not in str(wrong.value)
    assert "X-Evil" not in str(wrong.value)


@requirement("secrets.output")
def test_a_secret_that_is_too_short_to_be_masked_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://u:pw@db/kernel"}})
    bootstrap = build_bootstrap(settings, {"JINA_API_KEY": "x" * (MIN_SECRET_CHARS - 1)})
    assert bootstrap.unmasked == ["JINA_API_KEY", "postgres.dsn"]
    with caplog.at_level(logging.WARNING):
        service._log_configuration(bootstrap, {})  # noqa: SLF001 - its log lines are tested
    warned = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "secret.short"]
    assert [message.partition(" ")[0] for message in warned] == bootstrap.unmasked
    assert build_bootstrap(Settings.model_validate(DSN), {"JINA_API_KEY": "x" * MIN_SECRET_CHARS}).unmasked == []


@requirement("secrets.output", "start.reasons")
def test_the_password_of_a_sample_spoils_no_message_and_is_warned_of() -> None:
    settings = Settings.model_validate({"postgres": {"dsn": "postgresql://postgres:Postgres@db/kernel"}})
    bootstrap = build_bootstrap(settings, {})
    reason = "PostgreSQL at db:5432 (database kernel): connection refused; check postgres.dsn (PG_DSN)"
    assert bootstrap.redactor.text(reason) == reason
    assert bootstrap.unmasked == ["postgres.dsn"]
    longer = Settings.model_validate({"postgres": {"dsn": "postgresql://postgres:postgres1@db/kernel"}})
    assert build_bootstrap(longer, {}).redactor.text("postgres1") == MASK


@requirement("secrets.output")
def test_every_value_in_use_is_known(tmp_path: Path) -> None:
    credentials = tmp_path / "user.creds"
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
    token = "header.the-token-of-a-user.signature"
    credentials.write_text(f"-----BEGIN NATS USER JWT-----\n{token}\n-----BEGIN USER NKEY SEED-----\n{seed}\n")
    environment = {
        "JINA_API_KEY": "key-of-jina",
        "SERVICE_KEY": "key-of-the-service",
        "NOT_ALLOWED": "not-ours",
        "PGPASSWORD": "password-of-libpq",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20token-of-collector,x-key=key-of-collector",
    }
    sections = {
        "postgres": {"dsn": "postgresql://u:p%40ss-word@db/kernel?password=password-of-query&sslpassword=key-of%20key"},
        "nats": {"servers": ("nats://user:password-of-nats@bus",), "credentials_file": credentials},
        "tools": {"jina": {"envs": {"api_key": "SERVICE_KEY"}}},
        "session": {"key": "key-of-all-the-sessions"},
        "egress": {"proxy": "http://user:password-of-proxy@proxy:3128"},
        "telemetry": {"otlp_endpoint": "https://user:password-of-otlp@collector/v1/traces"},
    }
    settings = Settings.model_validate(sections)
    bootstrap = build_bootstrap(settings, environment)
    libpq = DriverOptions(settings.postgres.parsed, environment, None)
    known = [value for _, value in secret_values(settings, bootstrap.secrets, environment, libpq)]
    hidden = {
        *("key-of-jina", "key-of-the-service", "password-of-libpq", "token-of-collector", "key-of-collector"),
        *("p%40ss-word", "p@ss-word", "password-of-query", "password-of-nats", token, seed),
        *("key-of-all-the-sessions", "password-of-proxy", "password-of-otlp", "key-of key"),
    }
    assert hidden <= set(known)
    assert "not-ours" not in known
    shown = json.dumps(settings.shown())
    assert not [value for value in hidden if value in shown]
    assert not [value for value in hidden if value in bootstrap.redactor.text(" ".join(hidden))]


@pytest.mark.parametrize("name", ["credentials_file", "nkey_seed_file"])
@requirement("settings.errors")
def test_a_login_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "login"
    file.touch()
    settings = Settings.model_validate({**DSN, "nats": {name: file}})

    usual = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:  # root may read everything
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied")
        return usual(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SettingsError, match=rf"nats.{name} \({file}\): cannot be read"):
        build_bootstrap(settings, {})


@requirement("settings.errors", "secrets.output")
def test_no_error_of_the_settings_shows_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://u:the-password@db/x")
    monkeypatch.setenv("OPENAPI_TOOL__EGRESS__PROXY", "https://u:the-password@proxy:1")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__TOKEN", "the-password")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__USER", "the-password")
    monkeypatch.setenv("OPENAPI_TOOL__SESSION__KEY", "the-password")
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    named = {problem.partition(":")[0].partition(" ")[0] for problem in wrong.value.problems}
    assert named == {"egress.proxy", "nats", "session.key"}
    assert "the-password" not in str(wrong.value)


@requirement("secrets.output")
def test_dead_letter_is_stored_without_our_secrets() -> None:
    made = unmasked_letter(
        delivery({"CG-Agent-Id": VALUE}, data=b'{"k": "%s"}\xff' % VALUE.encode()), "reason", "message"
    )
    kept = without_secrets(made, Redactor([VALUE]))
    assert (kept.headers, kept.data) == ({"CG-Agent-Id": MASK}, b'{"k": "[redacted]"}\xff')
    assert without_secrets(made, Redactor(["another"])) == made


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize("status", ["success", "failed"])
@requirement("secrets.output")
def test_what_call_prints_is_masked(status: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the card was written by a client that does not mask."""
    content = {"status": status, "result": VALUE, "error": {"code": "x", "message": VALUE}}
    answer = ResultRows({"content": content}, {"inbox": VALUE}, {}, {"headers": {"X": VALUE}}, 1.0)
    placed = SimpleNamespace(trace_id="trace", tool_call_id="call")

    async def answered(*_: object) -> object:
        return CallOutcome(placed, answer, {"placed": 0})  # type: ignore[arg-type]

    monkeypatch.setattr(call, "_call", answered)
    environment = {"PG_DSN": "postgresql://u@db/kernel", "NATS_SERVERS": "nats://bus", "JINA_API_KEY": VALUE}
    done = CliRunner().invoke(app, ["call", "a_tool", *flags], env=environment)
    assert done.exit_code == (0 if status == "success" else 1), done.output
    assert VALUE not in done.output
    assert MASK in done.output


def test_before_settings_are_read_whatever_looks_secret_is_known() -> None:
    environment = {"A_KEY": "one", "PG_DSN": "postgresql://u:two@db", "NATS_SERVERS": "nats://a:3@b,nats://four@c"}
    assert set(likely_secrets({**environment, "HOME": "five", "X_PROXY": "http://["})) == {
        *("one", "two", "3", "four", "http://[")
    }


@pytest.mark.parametrize("status", [400, 422, 451, 200])
@requirement("secrets.output")
async def test_a_secret_is_masked_before_a_text_is_cut(status: int) -> None:
    for before in range(250, 300):
        said = {"code": 422 if status == 200 else status, "readableMessage": "x" * before + VALUE}
        answer = httpx.Response(status, json=said)
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        client = JinaClient(transport, 10_000)
        request = UpstreamRequest("POST", "s.jina.ai", "/", {}, b"{}", Expected("search"))
        with pytest.raises(ToolError) as failed:
            await client.fetch(request, Secret(VALUE), Deadline.after(5), for_request(ByteSemaphore(20_000).for_call()))
        assert VALUE[:6] not in failed.value.message
        assert before > 290 or MASK in failed.value.message


_CRASHING = """
import os, typer
from openapi_tool import cli

cli.app = typer.Typer(pretty_exceptions_enable=False)

@cli.app.command()
def crash():
    exec(os.environ["CRASH"], {"SECRET": os.environ["JINA_API_KEY"]})

cli.main()
"""  # `openapi-tool` with one command that runs the code in CRASH
CRASHES = {
    "main": "raise ValueError(SECRET)",
    "chain": "try:\n  int(SECRET)\nexcept ValueError as e:\n  raise RuntimeError([SECRET]) from e",
    "thread": "import threading\nt = threading.Thread(target=int, args=(SECRET,)); t.start(); t.join()",
    "unraisable": "class A:\n  def __del__(self): raise ValueError(SECRET)\nA()",
    "warning": "import warnings; warnings.warn(SECRET)",
    "log": "import logging; logging.getLogger('x').warning('%d', SECRET)",
    "loop": "import asyncio\nasync def f():\n  asyncio.get_running_loop().call_soon(int, SECRET)\n"
    "  await asyncio.sleep(0.01)\nasyncio.run(f())",
    "task": "import asyncio\nasync def g(): raise ValueError(SECRET)\nasync def f():\n  t = asyncio.create_task(g())\n"
    "  await asyncio.sleep(0); del t\nasyncio.run(f())",
}


@pytest.mark.parametrize("crash", CRASHES)
@requirement("secrets.output")
def test_however_the_process_crashes_its_output_shows_no_secret(crash: str) -> None:
    secret = "a-key-that-is 'quoted'"
    done = subprocess.run(  # noqa: S603 - this program
        [sys.executable, "-c", _CRASHING],
        env={"JINA_API_KEY": secret, "CRASH": CRASHES[crash]},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == (1 if crash in ("main", "chain") else 0), done.stderr
    assert "a-key-that-is" not in done.stdout + done.stderr
    assert (MASK if crash != "log" else "could not be written") in done.stderr, done.stderr


@requirement("secrets.output")
def test_a_record_that_cannot_be_redacted_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ValueError(VALUE)

    handler = LogWriter(sys.stderr)  # configure_logging would change the whole process
    handler.setFormatter(JsonFormatter(Redactor([VALUE])))
    handler.handle(logging.makeLogRecord({"msg": "%s", "args": (Unprintable(),)}))
    written = capsys.readouterr().err
    assert VALUE not in written
    assert "could not be written: ValueError" in written
