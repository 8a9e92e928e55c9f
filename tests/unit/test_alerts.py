"""The alerts of the chart in promtool: each fires when it must, is quiet otherwise, and has its runbook section."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts import CHART, objects_of
from tests.requirements import requirement

PROMTOOL = shutil.which("promtool")
RUNBOOK = Path(__file__).parent.parent.parent / "docs" / "runbook.md"
POD = 'namespace="n",pod="r-openapi-tool-abc12-x1y2z"'
MINUTES = 45

# Series as `name{labels}: values`, in promtool's notation for one sample a minute; what fires, what stays quiet.
FIRE: dict[str, dict[str, str]] = {
    "OpenapiToolMissing": {"up": "0x60"},
    "OpenapiToolDependencyDown": {'dependency_up{dependency="postgres"}': "0x60"},
    "OpenapiToolDeadLetters": {'dead_letters_total{reason="stale_turn"}': "0x40 1x20"},
    "OpenapiToolDeadLettersDiscarded": {'dead_letters_discarded_total{cause="full"}': "0x40 1x20"},
    "OpenapiToolCallsFail": {
        'calls_total{status="failed",error_code="auth_failed"}': "0+30x60",
        'calls_total{status="success"}': "0+60x60",
    },
    "OpenapiToolCommandsRequeued": {"commands_requeued_total": "0+2x60"},
    "OpenapiToolSlow": {
        'call_seconds_bucket{le="20.0"}': "0+50x60",
        'call_seconds_bucket{le="30.0"}': "0+60x60",
        'call_seconds_bucket{le="+Inf"}': "0+60x60",
    },
    "OpenapiToolSaturated": {"commands_waiting": "5x60"},
    "OpenapiToolWorkersNotWoken": {"doorbells_missed_total": "0x40 1x20"},
    "OpenapiToolEventLoopBlocked": {
        'event_loop_lag_seconds_bucket{le="0.5"}': "0+50x60",
        'event_loop_lag_seconds_bucket{le="1.0"}': "0+60x60",
        'event_loop_lag_seconds_bucket{le="+Inf"}': "0+60x60",
    },
    "OpenapiToolKeyRefused": {'key_unusable{variable="JINA_API_KEY",state="invalid"}': "0x40 1x20"},
    "OpenapiToolLimitUsedUp": {'rate_limited_total{endpoint="search"}': "0+5x60"},
    "OpenapiToolKeyPaused": {'limit_paused_seconds{variable="JINA_API_KEY",endpoint="search"}': "7 0 0 " * 20},
    "OpenapiToolUpstreamFails": {
        'upstream_request_seconds_count{error_code="rate_limited"}': "0+30x60",
        "upstream_request_seconds_count": "0+60x60",
    },
    "OpenapiToolDatabaseSlow": {
        'phase_seconds_bucket{phase="commit",le="1.0"}': "0+50x60",
        'phase_seconds_bucket{phase="commit",le="2.5"}': "0+60x60",
        'phase_seconds_bucket{phase="commit",le="+Inf"}': "0+60x60",
    },
    "OpenapiToolBacklog": {'durable_pending{version="v1r4"}': "200x60"},
    "OpenapiToolDurableFull": {
        'durable_unacknowledged{version="v1r4"}': "10x60",
        'durable_max_unacknowledged{version="v1r4"}': "100000x60",
        'durable_unacknowledged{version="v1r3"}': "95000x60",
        'durable_max_unacknowledged{version="v1r3"}': "100000x60",
    },
    "OpenapiToolCommandHeldLong": {"oldest_held_command_seconds": "200x60"},
    "OpenapiToolFlood": {"commands_returned_total": "0x40 5x20"},
    "OpenapiToolRedeliveries": {"redeliveries_total": "0x40 50x20"},
    "OpenapiToolSpansDropped": {"spans_dropped_total": "0x40 5x20"},
    "OpenapiToolResponseMemory": {"response_memory_waiting": "2x60"},
    "OpenapiToolBudgetLow": {'budget_used_ratio{scope="project_day"}': "0.7x40 0.85x20"},
    "OpenapiToolLimitsNotShared": {'limit_not_shared{variable="JINA_API_KEY",endpoint="search"}': "1x60"},
    "OpenapiToolBudgetsNotShared": {"budgets_not_shared": "1x60"},
    "OpenapiToolClockOffset": {"clock_offset_seconds": "-28x60"},
}
QUIET = {
    'dependency_up{dependency="postgres"}': "1x60",
    'dead_letters_total{reason="stale_turn"}': "7x60",
    'dead_letters_discarded_total{cause="full"}': "0x60",
    'calls_total{status="failed",error_code="auth_failed"}': "0+1x60",
    'calls_total{status="success"}': "0+60x60",
    'call_seconds_bucket{le="20.0"}': "0+60x60",
    'call_seconds_bucket{le="+Inf"}': "0+60x60",
    "commands_waiting": "0x20 9x5 0x40",
    "calls_running": "3x60",
    "doorbells_missed_total": "2x60",
    'keys_refused_total{variable="JINA_API_KEY"}': "0x60",
    'key_unusable{variable="JINA_API_KEY",state="invalid"}': "0x60",
    'rate_limited_total{endpoint="search"}': "0x40 5x20",
    'limit_paused_seconds{variable="JINA_API_KEY",endpoint="search"}': "0x40 9x2 0x20",
    "upstream_request_seconds_count": "0+60x60",
    'phase_seconds_bucket{phase="commit",le="1.0"}': "0+60x60",
    'phase_seconds_bucket{phase="commit",le="+Inf"}': "0+60x60",
    'durable_pending{version="v1r4"}': "60x60",
    'durable_pending{version="v1r3"}': "60x60",
    'durable_unacknowledged{version="v1r4"}': "64x60",
    'durable_max_unacknowledged{version="v1r4"}': "100000x60",
    'durable_unacknowledged{version="v1r3"}': "0x60",
    'durable_max_unacknowledged{version="v1r3"}': "0x60",
    "oldest_held_command_seconds": "12x60",
    "commands_returned_total": "0x60",
    "redeliveries_total": "0x40 3x20",
    "spans_dropped_total": "0x60",
    "commands_requeued_total": "0x5 3x55",
    "response_memory_waiting": "0x20 3x2 0x40",
    "clock_offset_seconds": "0.2x60",
    'budget_used_ratio{scope="project_day"}': "0.79x60",
    'budget_used_ratio{scope="session"}': "1x60",
    "budgets_not_shared": "0x20 1x2 0x40",
    'limit_not_shared{variable="JINA_API_KEY",endpoint="search"}': "0x20 1x2 0x40",
}


@functools.cache
def rules() -> list[dict[str, Any]]:
    (rule,) = objects_of({"monitoring": {"rules": True}})["PrometheusRule"]
    parsed: list[dict[str, Any]] = rule["spec"]["groups"][0]["rules"]
    return parsed


def firing_alerts(series: Mapping[str, str], folder: Path, minute: int) -> set[str]:
    """Return the alerts that fire at a minute of these series."""
    return _fired([(series, [rule["alert"] for rule in rules()])], folder, minute)


def _fired(runs: Iterable[tuple[Mapping[str, str], Iterable[str]]], folder: Path, minute: int) -> set[str]:
    """Return the alerts that fire at a minute; a run is a set of series with the expected alerts."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules()}]}))
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in names],
        }
        for series, names in runs
    ]
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    assert PROMTOOL is not None
    command = [PROMTOOL, "test", "rules", str(folder / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - found above
    output = done.stdout + done.stderr
    fired = set(re.findall(r"alertname: (\w+), time:", output))
    assert bool(fired) == (done.returncode != 0), output
    return fired


def _named(series: Mapping[str, str]) -> dict[str, str]:
    """Return series under their whole names, of one pod."""
    parts = {name: name.partition("{") for name in series}
    labels = {name: ",".join(filter(None, (POD, part[2].rstrip("}")))) for name, part in parts.items()}
    return {f"openapi_tool_{parts[name][0]}{{{labels[name]}}}": values for name, values in series.items()}


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")


@needs_promtool
@requirement("chart.metrics")
def test_each_alert_fires_for_its_condition(tmp_path: Path) -> None:
    runs = [(_named(series), [alert]) for alert, series in FIRE.items()]
    assert _fired(runs, tmp_path, MINUTES) == FIRE.keys()


@needs_promtool
@requirement("chart.metrics")
def test_no_alert_fires_for_quiet_metrics(tmp_path: Path) -> None:
    assert firing_alerts(_named(QUIET), tmp_path, MINUTES) == set()


@requirement("chart.metrics")
def test_each_alert_has_its_case_and_its_section_in_the_runbook() -> None:
    sections = {line[3:] for line in RUNBOOK.read_text(encoding="utf-8").splitlines() if line.startswith("## ")}
    alerts = {rule["alert"]: rule for rule in rules()}
    assert alerts.keys() == FIRE.keys() == sections
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


@needs_promtool
@requirement("chart.metrics")
def test_promtool_accepts_each_rule_and_each_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', (CHART / "files" / "dashboard.json").read_text())
    shown = [
        query.replace('\\"', '"').replace("$__rate_interval", "5m").replace("$namespace", "n") for query in queries
    ]
    recorded = [{"record": f"panel{place}", "expr": query} for place, query in enumerate(shown)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [*rules(), *recorded]}]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(recorded) > 20
