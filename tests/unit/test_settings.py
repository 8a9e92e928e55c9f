"""Settings: sources, validation, and any value that a setting could get."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml
from typer.testing import CliRunner

import openapi_tool
from openapi_tool import __version__, bootstrap
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.options.section import Options
from openapi_tool.service import process
from openapi_tool.service.file_limit import fit_to_file_limit
from openapi_tool.settings import (
    CONFIG_VARIABLE,
    KERNEL_CONFIG_VARIABLE,
    PREFIX,
    SHORT_NAMES,
    Settings,
    SettingsError,
    load_settings,
)
from openapi_tool.settings.sections import fields_of
from openapi_tool.settings.variables import ignored_variables
from openapi_tool.telemetry.redact import MASK
from tests.requirements import requirement
from tests.waiting import WAIT_S

PASTED = "jina_" + "0123456789abcdefghij" * 2
FILE = """
[nats]
servers = ["nats://file:4222"]
ack_wait_s = 8
[executor]
concurrency = 10
[tools.jina]
envs = { api_key = "FILE_KEY" }
[tools.jina.services.jina]
envs = { tenant_token = "FILE_OTHER" }
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OPENAPI_TOOL", "CG_", "NATS_", "PG")) or name == "SSL_CERT_FILE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PG_DSN", "postgresql://db/kernel")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "openapi-tool.toml"
    path.write_text(FILE)
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    return path


@requirement("settings.sources")
def test_defaults_apply_without_any_source() -> None:
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
    assert load_settings().nats.ack_wait_s == 8
    assert load_settings().executor.concurrency == 20
    assert load_settings({"executor": {"concurrency": 30}}).executor.concurrency == 30


def test_service_envs_of_a_target_override_those_of_all_targets(config: Path) -> None:
    assert load_settings().tools.jina.envs_of("jina") == {"api_key": "FILE_KEY", "tenant_token": "FILE_OTHER"}
    assert load_settings().tools.jina.envs_of("elsewhere") == {"api_key": "FILE_KEY"}


@requirement("settings.errors")
def test_all_mistakes_are_named_at_once_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__CONCURRENCY", "513")
    monkeypatch.setenv("OPENAPI_TOOL__POSTGRES__POOL_SIZE", "password-pasted-here")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__SERVER", "nats://x")
    with pytest.raises(SettingsError) as wrong:
        load_settings({"protocol": {"version": "v9"}})
    named = {problem.split(":")[0] for problem in wrong.value.problems}
    assert named == {
        "executor.concurrency (OPENAPI_TOOL__EXECUTOR__CONCURRENCY)",
        "postgres.pool_size (OPENAPI_TOOL__POSTGRES__POOL_SIZE)",
        "nats.server (OPENAPI_TOOL__NATS__SERVER)",
        "protocol.version",
    }
    assert "password-pasted-here" not in str(wrong.value)


REMOVED = "one process serves one kernel; run a second process for the other kernel, as docs/migrating.md shows"


@requirement("settings.errors")
def test_settings_of_a_second_kernel_name_the_document_about_two_processes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('[dialects.v1r3.postgres]\ndsn = "postgresql://older@db/older"\n')
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert [problem.partition(": ")[2] for problem in wrong.value.problems] == [REMOVED]
    config.write_text("")
    variable = f"{PREFIX}DIALECTS__V1R3__POSTGRES__DSN"
    monkeypatch.setenv(variable, "postgresql://older@db/older")
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert wrong.value.problems == [f"{variable}: {REMOVED}"]


@pytest.mark.parametrize("actor_id", ["tool.openapi.{tenant}", "tool.{target}.{target", "tool.}", "tool.{}"])
@requirement("settings.errors")
def test_an_author_with_an_unknown_placeholder_is_refused(actor_id: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        load_settings({"protocol": {"actor_id": actor_id}})
    [problem] = wrong.value.problems
    assert problem.startswith("protocol.actor_id: ")
    assert problem.endswith("the only placeholder is {target}")
    known = load_settings({"protocol": {"actor_id": "tool.{target}.{target}"}})
    assert known.actor_id == "tool.jina.jina"


@pytest.mark.parametrize("text", ["[nats", "[nats]\nservers = 7", "[nowhere]\nx = 1"])
@requirement("settings.errors")
def test_an_invalid_file_is_an_error(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(SettingsError):
        load_settings()


@requirement("settings.errors")
def test_a_variable_of_json_that_is_nested_too_deep_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    monkeypatch.setenv("OPENAPI_TOOL__NATS", "[" * 100_000)
    with pytest.raises(SettingsError, match="OPENAPI_TOOL__NATS: is not JSON"):
        load_settings()


@requirement("settings.errors")
def test_tables_that_only_pydantic_finds_too_deep_are_an_error_with_a_text(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/x")
    config.write_text("[tools.jina." + "a." * 1_999 + "a]\nx = 1\n")
    with pytest.raises(SettingsError, match="nested too deep"):
        load_settings()


@requirement("settings.errors")
def test_a_file_of_many_mistakes_is_parsed_once_and_the_first_thousand_are_listed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[budgets.projects]\n" + "\n".join(f"p{n} = {{session_token = 1}}" for n in range(1_200)))
    parse = mock.Mock(side_effect=tomllib.loads)
    monkeypatch.setattr(tomllib, "loads", parse)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert (len(caught.value.problems), caught.value.problems[-1]) == (1_001, "and 200 more")
    assert parse.call_count < 5


@requirement("settings.errors")
def test_a_file_that_is_missing_is_named(config: Path) -> None:
    config.unlink()
    with pytest.raises(SettingsError, match=r"openapi-tool\.toml"):
        load_settings()


@pytest.mark.parametrize(
    "url", ["nats://[abc", "nats://host:port", "nats://host:99999", "http://host:4222", "bus-of-mine"]
)
@requirement("settings.errors")
def test_a_server_that_is_no_url_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://db/kernel")
    monkeypatch.setenv("NATS_SERVERS", url)
    with pytest.raises(SettingsError, match=r"nats\.servers") as refused:
        load_settings()
    assert url not in str(refused.value)


def test_a_narrowed_filter_needs_a_durable_of_its_own() -> None:
    with pytest.raises(SettingsError, match=r"nats\.durable"):
        load_settings({"protocol": {"project": "one"}})
    assert load_settings({"protocol": {"project": "one"}, "nats": {"durable": "mine"}}).durable == "mine"


def test_settings_never_show_the_database_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://user:p%40ss-word@db/kernel")
    monkeypatch.setenv("NATS_SERVERS", "nats://token-of-nats@bus:4222")
    settings = load_settings()
    assert "ss-word" not in repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert {"p%40ss-word", "p@ss-word", "token-of-nats"} <= {value for _, value in settings.secret_values()}


@requirement("egress.hosts")
def test_no_setting_and_only_the_local_package_can_redirect_connections() -> None:
    package = Path(bootstrap.__file__).parent
    users = [
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "LoopbackResolver" in path.read_text(encoding="utf-8")
    ]
    assert set(users) == {"local"}
    assert not any(word in str(Settings.model_json_schema()).lower() for word in ("resolver", "loopback", "base_url"))


BROKEN = yaml.safe_load((Path(__file__).parent.parent / "data" / "broken_settings.yaml").read_text(encoding="utf-8"))
"""Environments that `serve` refuses, and its whole message: the setting, the mistake, and the remedy."""


@requirement("settings.errors")
def test_the_corpus_is_large() -> None:
    assert len(BROKEN) >= 100


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: "-".join(case["environment"]))
@requirement("settings.errors")
def test_serve_names_what_is_wrong_before_any_connection(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_serve", lambda *_: pytest.fail("a connection would have been made"))
    for name, value in case["environment"].items():
        monkeypatch.setenv(name, value if value != "FILE" else __file__)
    result = CliRunner().invoke(app, ["serve"])
    lines = [case["says"]] if isinstance(case["says"], str) else case["says"]
    assert (result.exit_code, result.stdout) == (2, "")
    expected = [line.replace("(FILE)", f"({__file__})") for line in lines]
    assert result.stderr.splitlines() == [f"openapi-tool: {line}" for line in expected]
    assert not re.search(r"Traceback|Errno|the-password", result.output)


@requirement("settings.errors")
def test_deeply_nested_setting_is_refused_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__LIMITS__KEYS", '{"a":' * 520 + "1" + "}" * 520)
    with pytest.raises(SettingsError, match="is not a setting; remove it"):
        load_settings()


@requirement("settings.errors")
def test_one_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_SERVERS", "http://bus:4222")
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    [problem] = wrong.value.problems
    assert problem.startswith("nats.servers.0 (NATS_SERVERS): ")


@requirement("settings.errors")
@pytest.mark.parametrize(
    ("variable", "text", "place"),
    [
        ("OPENAPI_TOOL_CONFIG", "executor.concurrency = 'many'", "executor.concurrency"),
        ("OPENAPI_TOOL_CONFIG", "nats.servers = ['no-url']", "nats.servers.0"),
        ("CG_CONFIG_TOML", "worker.default_timeout_seconds = 'long'", "executor.worker_timeout_s"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_by_its_variable(
    variable: str, text: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(SettingsError, match=re.escape(f"{place} (in {file}): ")):
        load_settings({"postgres": {"dsn": "postgresql://db/kernel"}})


@requirement("settings.errors")
def test_a_mistake_in_a_flag_is_not_attributed_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__CONCURRENCY", "8")
    with pytest.raises(SettingsError, match=r"^executor\.concurrency: "):
        load_settings({"executor": {"concurrency": 0}, "postgres": {"dsn": "postgresql://db/kernel"}})


@requirement("settings.errors")
def test_a_wrong_configuration_of_the_real_process_exits_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openapi_tool", "serve", "--concurrency", "none"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


KERNEL_FILE = """
[protocol]
version = "v1r4"
[nats]
servers = ["nats://kernel:4222"]
tls_enabled = {tls}
cert_dir = "{folder}"
[nats.pull]
batch_size = 1
max_inflight = 7
[worker]
default_timeout_seconds = 45.0
[cardbox]
postgres_dsn = "postgresql://kernel/cardbox"
postgres_min_size = 1
[tools.e2b]
template = ""
[tools.jina]
envs = {{ api_key = "KERNEL_KEY" }}
[tools.jina.services.jina]
envs = {{ tenant_token = "KERNEL_OTHER" }}
"""


@requirement("settings.sources")
def test_the_kernels_config_has_lower_precedence_than_our_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / name).touch()
    file = tmp_path / "config.toml"
    file.write_text(KERNEL_FILE.format(tls="true", folder=tmp_path))
    monkeypatch.setenv(KERNEL_CONFIG_VARIABLE, str(file))
    monkeypatch.delenv("PG_DSN")
    settings = load_settings()
    assert settings.nats.servers == ("nats://kernel:4222",)
    assert (settings.nats.tls, settings.nats.key_file) == (True, tmp_path / "client.key")
    assert settings.postgres.dsn.get_secret_value() == "postgresql://kernel/cardbox"
    assert (settings.executor.concurrency, settings.executor.worker_timeout_s) == (7, 45.0)
    assert settings.tools.jina.envs_of("jina") == {"api_key": "KERNEL_KEY", "tenant_token": "KERNEL_OTHER"}
    assert settings.remarks == []
    ours = tmp_path / "ours.toml"
    ours.write_text("[executor]\nconcurrency = 9\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(ours))
    assert load_settings().executor.concurrency == 9


def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Settings:
    """Return the settings with this `config.toml` of the kernel."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    monkeypatch.setenv(KERNEL_CONFIG_VARIABLE, str(file))
    return load_settings()


@requirement("settings.sources")
@pytest.mark.parametrize(
    ("worker", "seconds"),
    [
        ("suspend_timeout_seconds = 50", 50),
        ("default_timeout_seconds = 9\nsuspend_timeout_seconds = 50", 50),
        ("", 30),
    ],
)
def test_the_worker_timeout_is_the_suspend_timeout_else_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, seconds: float
) -> None:
    assert kernel_file(tmp_path, monkeypatch, f"[worker]\n{worker}").executor.worker_timeout_s == seconds


@requirement("settings.sources")
def test_max_inflight_1_of_the_kernels_config_does_not_limit_concurrency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = kernel_file(tmp_path, monkeypatch, "[nats.pull]\nmax_inflight = 1")
    assert settings.executor.concurrency == 64
    (remark,) = settings.remarks
    assert remark.startswith("nats.pull.max_inflight = 1 of CG_CONFIG_TOML is ignored: ")


@requirement("settings.sources")
@pytest.mark.parametrize(("worker_timeout_s", "runs"), [(30, 3), (21, 2), (15.5, 2), (15, 1), (5, 1)])
def test_a_short_worker_timeout_lowers_max_lost_runs_with_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_timeout_s: float, runs: int
) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__EXECUTOR__REQUEUE_DELAY_S", "1")
    settings = kernel_file(tmp_path, monkeypatch, f"[worker]\ndefault_timeout_seconds = {worker_timeout_s}")
    assert settings.executor.max_lost_runs == runs
    lowered = [remark for remark in settings.remarks if f"is lowered from 3 to {runs}" in remark]
    assert len(lowered) == len(settings.remarks) == (runs < 3)


@requirement("settings.sources")
def test_api_keys_of_the_kernel_executors_sections_have_lower_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        [openapi]
        envs = { api_key = "FIRST", page = "NOT_A_KEY" }
        [openapi.services.jina]
        envs = { api_key = "OF_JINA" }
        [tools.openapi]
        envs = { api_key = "SECOND" }
        [tools.openapi_services.web.envs]
        api_key = "OF_WEB"
        [tools.openapi.services]
        odd = { envs = 3 }
        odder = 7
    """
    tools = kernel_file(tmp_path, monkeypatch, text).tools
    keys = {target: tools.jina.envs_of(target) for target in ("jina", "web", "odd", "other")}
    assert keys == {
        "jina": {"api_key": "OF_JINA"},
        "web": {"api_key": "OF_WEB"},
        "odd": {"api_key": "SECOND"},
        "other": {"api_key": "SECOND"},
    }
    ours = '[tools.jina]\nenvs = { api_key = "OURS" }\n[tools.jina.services.jina]\nenvs = { api_key = "OURS_OF_JINA" }'
    tools = kernel_file(tmp_path, monkeypatch, text + ours).tools
    assert [tools.jina.envs_of(target) for target in ("jina", "other")] == [
        {"api_key": "OURS_OF_JINA"},
        {"api_key": "OURS"},
    ]


@requirement("settings.sources")
def test_certificates_of_the_kernels_config_apply_only_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(KERNEL_FILE.format(tls="false", folder="/nowhere"))
    monkeypatch.setenv(KERNEL_CONFIG_VARIABLE, str(file))
    assert load_settings().nats.ca_file is None


@requirement("settings.sources")
def test_settings_are_shown_as_in_effect_and_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://user:the-password@db/kernel?sslmode=require")
    monkeypatch.setenv("NATS_SERVERS", "nats://the-token@bus:4222")
    monkeypatch.setenv("OPENAPI_TOOL__SESSION__KEY", "the-password-of-sessions")
    shown = load_settings().shown()
    assert shown["postgres"]["dsn"] == "postgresql://***@db/kernel"
    assert shown["nats"]["servers"] == ["nats://***@bus:4222"]
    assert shown["executor"]["concurrency"] == 64
    assert "the-" not in str(shown)


@requirement("settings.reference")
def test_every_flag_names_its_variable() -> None:
    command = typer.main.get_command(app)
    serve = command.commands["serve"]  # type: ignore[attr-defined] # the app is a group
    text = " ".join(CliRunner().invoke(app, ["serve", "--help"], terminal_width=500).output.split())
    variables = {f"{PREFIX}{section.upper()}__{key.upper()}" for section, key in _paths()} | {
        *SHORT_NAMES,
        CONFIG_VARIABLE,
    }
    for option in serve.params:
        if option.name == "help":
            continue
        described = text.split(f"--{option.name.replace('_', '-')} ")[1].split("]")[0]
        assert any(described.endswith(variable) for variable in variables), option.name


def _paths() -> list[tuple[str, str]]:
    return [(section, key) for section, field in Settings.model_fields.items() for key in fields_of(field.annotation)]


@requirement("settings.errors")
def test_a_file_that_vanishes_after_the_load_does_not_spoil_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are derived again at each reload, while another process may replace the file."""
    file = tmp_path / "seed"
    file.write_text("x")
    monkeypatch.setenv(f"{PREFIX}NATS__NKEY_SEED_FILE", str(file))
    settings = load_settings()
    file.unlink()
    assert fit_to_file_limit(settings, 64).nats.nkey_seed_file == file
    with pytest.raises(SettingsError):
        build_bootstrap(settings, os.environ)


@requirement("settings.errors", "secrets.output")
def test_a_key_pasted_as_the_name_of_a_setting_is_not_shown(config: Path) -> None:
    config.write_text(f'[nats]\n"{PASTED}" = 1\n[limits.keys.{PASTED}]\nx = 1\n')
    with pytest.raises(SettingsError) as failed:
        load_settings()
    assert PASTED not in str(failed.value)
    assert f"nats.{MASK} (in {config}): is not a setting; remove it" in failed.value.problems


MAPPINGS = {
    "FAIRNESS__WEIGHTS": {"p": 2.0},
    "TOOLS__JINA__ENVS": {"tenant_x": "A_KEY"},
    "TOOLS__JINA__SERVICES": {"t": {"envs": {"tenant_x": "A_KEY"}}},
    "POLICY__PROJECTS": {"p": {"allow": ["jina.search"]}},
    "LIMITS__KEYS": {"JINA_API_KEY": {"search_concurrent": 3}},
    "LIMITS__POOLS": {"JINA_API_KEY": {"keys": ["A_KEY", "B_KEY"]}},
    "BUDGETS__PROJECTS": {"p": {"session_requests": 3}},
    "NATS": {"servers": ["nats://a", "nats://b"]},
}


@pytest.mark.parametrize("variable", MAPPINGS)
@requirement("settings.sources")
def test_a_variable_may_contain_an_object_as_json(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}{variable}", json.dumps(MAPPINGS[variable]))
    shown: Any = load_settings().model_dump(mode="json")
    for part in variable.lower().split("__"):
        shown = shown[part]
    assert _without_defaults(shown, MAPPINGS[variable]) == MAPPINGS[variable]


def _without_defaults(shown: Any, given: Any) -> Any:
    return {key: _without_defaults(shown[key], given[key]) for key in given} if isinstance(given, dict) else shown


@requirement("settings.sources")
def test_options_of_components_contain_sections_and_repeat_none_of_their_keys() -> None:
    """The exceptions are values of their own, such as the replicas that the command stream has."""
    keys = {key for _, key in _paths()}
    repeated = set()
    for module in pkgutil.walk_packages(openapi_tool.__path__, "openapi_tool."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if re.fullmatch(r"[A-Z]\w*Options", name) and not issubclass(kind, Options):
                repeated |= {f"{name}.{key}" for key in getattr(kind, "__dataclass_fields__", {}) if key in keys}
    versions = {"DurableOptions.version", "PoolOptions.version"}
    others = {"ConsumerOptions.durable", "ConsumerOptions.replicas", "PipelineOptions.actor_id"}
    connections = {"BusOptions.nats", "DurableOptions.nats"}  # the section `nats` itself, or that of quotas
    assert repeated == versions | others | connections


@requirement("settings.errors")
def test_service_variables_of_kubernetes_are_ignored_and_others_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OPENAPI_TOOL_SERVICE_HOST", "OPENAPI_TOOL_SERVICE_PORT_HEALTH", "OPENAPI_TOOL_PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    for name in ("OPENAPI_TOOL_COLOUR", "OPENAPI_TOOL_CONFIG_PORT", "openapi_tool__executer__concurrency"):
        monkeypatch.setenv(name, "8")
    assert load_settings().remarks == []
    assert ignored_variables(os.environ) == [
        "OPENAPI_TOOL_COLOUR is no setting and has no effect",
        "OPENAPI_TOOL_CONFIG_PORT is no setting and has no effect",
        "openapi_tool__executer__concurrency is no setting and has no effect",
    ]


@requirement("cli.help")
@pytest.mark.parametrize("columns", [80, 50])
@pytest.mark.parametrize("group", [(), ("tools",), ("deadletters",), ("sql",), ("nats",)], ids=" ".join)
def test_no_command_summary_is_truncated_in_a_narrow_terminal(group: tuple[str, ...], columns: int) -> None:
    shown = CliRunner().invoke(app, [*group, "-h"], terminal_width=columns)
    assert shown.exit_code == 0
    assert [line for line in shown.stdout.partition("\n\n")[2].splitlines() if line.endswith("...")] == []
    assert max(map(len, shown.stdout.splitlines())) <= columns
    assert "--no-version" not in shown.stdout


@requirement("cli.help")
@pytest.mark.parametrize("words", [("--version",), ("-h",), ("tools", "lint", "-h"), ("nats", "durable", "--help")])
def test_help_works_for_every_command_and_version_for_the_program(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, words)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Usage:" if "version" not in words[0] else __version__)


@requirement("cli.help")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tools", "export", "--format", "bogus"), "Invalid value for '--format': 'bogus' is not one of 'openai', "),
        (("usage", "--project", "p", "--by", "colour"), "Invalid value for '--by': 'colour' is not one of 'tool', "),
        (("demo", "--protocol", "v9"), "Invalid value for '--protocol': 'v9' is not one of 'v1r4', 'v1r3'."),
        (("call", "x", "--timeout", "abc"), "Invalid value for '--timeout': must be a valid number\n"),
        (("call", "--version"), "put --version before the command: openapi-tool --version\n"),
        (("tools", "lint", "--version"), "put --version before the command: openapi-tool --version\n"),
    ],
)
def test_a_wrong_option_is_refused_in_plain_words(words: tuple[str, ...], expected: str) -> None:
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert f"Error: {expected}" in refused.stderr


@requirement("cli.help")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("openapi-tool de", ["demo", "dev", "deadletters"]),
        ("openapi-tool tools ex", ["export"]),
        ("openapi-tool tools export --for", ["--format"]),
    ],
)
def test_shell_completion_knows_commands_and_options(typed: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    shown = CliRunner().invoke(app, env={"_OPENAPI_TOOL_COMPLETE": "complete_bash", **words}, prog_name="openapi-tool")
    assert sorted(shown.stdout.split()) == sorted(completed)


CANARY = "zq7canary"
WRONG = [
    CANARY,
    f"-{CANARY}",
    f"{{{CANARY}",
    f'["{CANARY}',
    f'{{"a": "{CANARY}"}}',
    f'[{{"a": ["{CANARY}"]}}]',
    f"{CANARY}\udcff",
    f"{CANARY}\n{CANARY}\x1b[31m",
    f"http://u:{CANARY}/x@h:1",
    f"nats://u:{CANARY}?x@h:1",
    f"nats://{CANARY}@::1:4222",
    f"https://[{CANARY}",
    f"{CANARY},,{CANARY},",
    f"/nowhere/{CANARY}",
    f"%{CANARY}%00",
    "9" * 400,
    "9" * 5_000,
    "-1e999",
    "nan",
    "null",
    "[]",
    "\u0665",
]
ODD = [
    3,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    True,
    [],
    [CANARY],
    [1, "x"],
    {},
    {"a": CANARY},
    [[CANARY]],
    CANARY,
]


def paths(section: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all sections and settings."""
    for name, field in fields_of(section).items():
        yield (*above, name)
        if fields_of(field.annotation):
            yield from paths(field.annotation, (*above, name))


PATHS = list(paths(Settings))


@pytest.fixture
def _cached(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in ("tls_context", "entry_points"):  # the same for every value but of one setting
        monkeypatch.setattr(bootstrap, slow, cache(getattr(bootstrap, slow)))


def problems() -> str:
    """Return the error of the settings, empty for valid ones. Any exception but SettingsError is a failure."""
    try:
        build_bootstrap(load_settings(), os.environ)
    except SettingsError as error:
        assert error.problems
        assert all(problem.isprintable() for problem in error.problems)
        return str(error)
    return ""


@pytest.mark.thorough
@pytest.mark.usefixtures("_cached")
@pytest.mark.parametrize("path", PATHS, ids=".".join)
@requirement("settings.errors")
def test_a_wrong_value_in_the_environment_is_named_and_not_shown(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in WRONG:
        monkeypatch.setenv(PREFIX + "__".join(path).upper(), value)
        assert CANARY not in problems().replace(f"/nowhere/{CANARY}", "")


@pytest.mark.usefixtures("_cached")
@pytest.mark.parametrize("path", PATHS, ids=".".join)
@requirement("settings.errors")
def test_a_wrong_value_in_a_file_is_named_and_not_shown(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    if path[0] == "postgres":
        monkeypatch.delenv("PG_DSN")
    for value in (*ODD, f"{CANARY}\x00", f"{CANARY}\n"):
        file.write_text(".".join(path) + " = " + toml(value))
        assert CANARY not in problems()


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else str(value)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\tb", "a\x1b[1mb", "a\x7fb", "a\x85b", "a\udcffb", "\x00"])
@pytest.mark.parametrize("path", [("nats", "password"), ("session", "key"), ("policy", "hooks"), ("tools", "jina")])
@requirement("settings.errors")
def test_a_value_with_control_characters_or_invalid_utf8_is_refused(path: tuple[str, str], text: str) -> None:
    section, name = path
    value: Any = {"hooks": [text], "jina": {"services": {"x": {"envs": {text: "A"}}}}}.get(name, f"{text} of 16 bytes")
    with pytest.raises(SettingsError, match=rf"{section}\.{name}: contains a line break"):
        load_settings({section: {name: value}})


@requirement("settings.errors")
def test_white_space_around_a_value_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted file that becomes a variable often ends with a line break."""
    monkeypatch.setenv("PG_DSN", " postgresql://u:of-file@db/kernel\n")
    monkeypatch.setenv("OPENAPI_TOOL__NATS__TOKEN", "of-file\r\n")
    settings = load_settings()
    assert settings.postgres.parsed.password == "of-file"
    assert settings.nats.token
    assert settings.nats.token.get_secret_value() == "of-file"


@requirement("settings.errors")
def test_a_value_over_16000_characters_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"nats\.user: is longer than 16000 characters"):
        load_settings({"nats": {"user": "x" * 16_001, "password": "y"}})
