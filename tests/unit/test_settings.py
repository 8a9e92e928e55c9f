from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openapi_tool.settings import CONFIG_VARIABLE, Settings, SettingsError, load_settings
from tests.promises import requirement

FILE = """
[nats]
servers = ["nats://file:4222"]
ack_wait_s = 9
[executor]
concurrency = 10
[tools.jina]
envs = { api_key = "FILE_KEY" }
[tools.jina.services.jina]
envs = { other = "FILE_OTHER" }
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OPENAPI_TOOL") or name in ("PG_DSN", "NATS_SERVERS", "SSL_CERT_FILE"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "openapi-tool.toml"
    path.write_text(FILE)
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    return path


@requirement("settings.sources")
def test_the_defaults_hold_where_nothing_is_said() -> None:
    settings = load_settings()
    assert settings.durable == "tool_jina_openapi_cmd_v1r4"
    assert (settings.executor.concurrency, settings.nats.ack_wait_s) == (64, 6)


@requirement("settings.sources")
def test_each_source_overrides_the_one_below(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().executor.concurrency == 10
    assert load_settings().nats.servers == ("nats://file:4222",)
    monkeypatch.setenv("NATS_SERVERS", "nats://short:1, nats://short:2")
    assert load_settings().nats.servers == ("nats://short:1", "nats://short:2")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__SERVERS", "nats://long:1")
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__CONCURRENCY", "20")
    assert load_settings().nats.servers == ("nats://long:1",)
    assert load_settings().nats.ack_wait_s == 9
    assert load_settings().executor.concurrency == 20
    assert load_settings({"executor": {"concurrency": 30}}).executor.concurrency == 30


def test_service_envs_of_the_target_win_over_those_of_all(config: Path) -> None:
    assert load_settings().tools.jina.envs_of("jina") == {"api_key": "FILE_KEY", "other": "FILE_OTHER"}
    assert load_settings().tools.jina.envs_of("elsewhere") == {"api_key": "FILE_KEY"}


@requirement("settings.errors")
def test_all_mistakes_are_named_at_once_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__CONCURRENCY", "513")
    monkeypatch.setenv("OPENAPI_TOOL__POSTGRES__POOL_SIZE", "password-pasted-here")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__SERVER", "nats://x")
    with pytest.raises(SettingsError) as wrong:
        load_settings({"protocol": {"version": "v9"}})
    named = {problem.split(":")[0] for problem in wrong.value.problems}
    assert named == {"executor.concurrency", "postgres.pool_size", "nats.server", "protocol.version"}
    assert "password-pasted-here" not in str(wrong.value)


@pytest.mark.parametrize("text", ["[nats", "[nats]\nservers = 7", "[nowhere]\nx = 1"])
@requirement("settings.errors")
def test_a_file_that_is_wrong_is_named(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(SettingsError):
        load_settings()


@requirement("settings.errors")
def test_a_file_that_is_missing_is_named(config: Path) -> None:
    config.unlink()
    with pytest.raises(SettingsError, match=r"openapi-tool\.toml"):
        load_settings()


def test_a_narrowed_filter_needs_a_durable_of_its_own() -> None:
    with pytest.raises(SettingsError, match=r"nats\.durable"):
        load_settings({"protocol": {"project": "one"}})
    assert load_settings({"protocol": {"project": "one"}, "nats": {"durable": "mine"}}).durable == "mine"


def test_settings_never_show_the_database_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://user:p%40ss-word@db/kernel")
    monkeypatch.setenv("NATS_SERVERS", "nats://token-of-nats@bus:4222")
    settings = load_settings()
    assert "ss-word" not in repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert {"p%40ss-word", "p@ss-word", "token-of-nats"} <= set(settings.confidential())


@requirement("egress.local")
def test_no_setting_and_no_other_room_can_point_connects_elsewhere() -> None:
    package = Path(sys.modules[Settings.__module__].__file__ or "").parent
    users = [
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "LoopbackResolver" in path.read_text(encoding="utf-8")
    ]
    assert set(users) == {"local"}
    assert not any(word in str(Settings.model_json_schema()).lower() for word in ("resolver", "loopback", "base_url"))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"OPENAPI_TOOL__EXECUTOR__CONCURRENCY": "many"}, "executor.concurrency"),
        ({"OPENAPI_TOOL_CONFIG": "/nowhere.toml"}, "/nowhere.toml"),
        ({"SSL_CERT_FILE": "/nowhere.pem"}, "SSL_CERT_FILE"),
    ],
)
@requirement("settings.errors")
def test_serve_names_a_wrong_configuration_and_exits_with_2(environment: dict[str, str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openapi_tool", "serve"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
