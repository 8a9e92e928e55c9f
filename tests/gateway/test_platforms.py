"""The MCP door on a system that is not Linux, as far as Linux can show it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openapi_tool.isolation import worker
from openapi_tool.local.stack import UpstreamDouble
from tests.gateway.conftest import PAGE
from tests.gateway.test_stdio import RawClient
from tests.requirements import requirement
from tests.waiting import WAIT_S

_AS_MACOS = """
import ctypes, os, runpy, sys, psutil, urllib.request, zoneinfo  # the last three need files of the platform
sys.platform = "darwin"
def refused(*_): raise AssertionError("a call of Linux")
ctypes.CDLL = refused
os.process_cpu_count = os.cpu_count  # as where there is no `sched_getaffinity`
for name in ("sched_setaffinity", "sched_getaffinity", "eventfd", "memfd_create", "pidfd_open", "posix_fadvise"):
    setattr(os, name, refused)
runpy.run_module("openapi_tool.local.door_server", run_name="__main__", alter_sys=True)
"""


@requirement("mcp.eras")
def test_no_call_of_linux_is_on_the_path_of_the_door(
    double: UpstreamDouble, environment: dict[str, str], tmp_path: Path
) -> None:
    options = ["mcp", "--upstream-port", str(double.port), "--state", str(tmp_path / "state")]
    with subprocess.Popen(  # noqa: S603 - the interpreter
        [sys.executable, "-c", _AS_MACOS, *options],
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        client = RawClient(process)
        client.shake_hands()
        assert client.answer(client.call("jina_read", {"url": PAGE}))["result"]["isError"] is False
        client.stdin.close()
        assert process.wait(WAIT_S) == 0


@requirement("mcp.eras")
@pytest.mark.parametrize(("platform", "limits_memory"), [("linux", True), ("darwin", False)])
def test_a_worker_limits_its_address_space_only_where_that_is_possible(
    monkeypatch: pytest.MonkeyPatch, *, platform: str, limits_memory: bool
) -> None:
    limited: list[int] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _: limited.append(kind))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("builtins.open", _missing)
    worker._limit_itself(1_000)  # noqa: SLF001 - it runs in a process of its own only
    assert (resource.RLIMIT_AS in limited) is limits_memory
    assert resource.RLIMIT_CORE in limited


def _missing(*_: object, **__: object) -> None:
    raise FileNotFoundError
