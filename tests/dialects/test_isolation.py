"""State that the kernels of one process must not share (without servers)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from openapi_tool.bootstrap import build_bootstrap, build_runner, scoped_key
from openapi_tool.settings import Settings
from openapi_tool.telemetry.metrics import list_projects, project_label
from tests.requirements import requirement

KERNELS = {
    "postgres": {"dsn": "postgresql://127.0.0.1/main"},
    "dialects": {"v1r3": {"postgres": {"dsn": "postgresql://127.0.0.1/older"}}},
}
KEY = b"0123456789abcdef"


@requirement("dialects.isolated")
def test_a_project_of_two_kernels_has_separate_shares_of_memory_and_permits() -> None:
    reserved: list[str] = []
    backend = SimpleNamespace(call_context=reserved.append, run=None)
    upstream: Any = SimpleNamespace(backend=backend, errors=SimpleNamespace(value=str), slicer=None)
    main = build_bootstrap(Settings.model_validate(KERNELS), {})
    for kernel in (main, *main.others):
        artifacts: Any = None
        build_runner(kernel, upstream, artifacts, scoped_key(KEY, kernel.version)).call_context("proj")
    assert len(set(reserved)) == 2
    assert reserved[0] == "proj"


@pytest.fixture
def listed() -> Iterator[None]:
    list_projects(["proj"])
    yield
    list_projects([])


@requirement("dialects.isolated")
def test_the_label_of_a_project_is_its_id_in_either_kernel(listed: None) -> None:
    del listed
    labels = [project_label(name) for name in ("proj", "v1r3 proj", "v1r3 other", "other", "", None)]
    assert labels == ["proj", "proj", "", "", "", ""]


@requirement("dialects.isolated")
def test_the_settings_of_one_kernel_contain_nothing_of_the_other() -> None:
    settings = Settings.model_validate({**KERNELS, "nats": {"durable": "mine", "password": "-", "user": "u"}})
    older, main = settings.of_version("v1r3"), settings.of_version("v1r4")
    assert [len(one.kernels) for one in (settings, main, older)] == [2, 1, 1]
    assert (older.postgres.parsed.database, older.durable) == ("older", "tool_jina_openapi_cmd_v1r3")
    assert (main.postgres.parsed.database, main.durable) == ("main", "mine")
    assert (older.actor_id, main.actor_id) == ("tool.openapi.jina", "tool.openapi")
    alone = main.of_version("v1r3")
    assert (alone.postgres, alone.durable) == (main.postgres, older.durable)
