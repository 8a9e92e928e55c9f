"""The embedded stack and the demo."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from openapi_tool.cli import app, demo
from openapi_tool.local import servers
from openapi_tool.local.guard import Guard
from openapi_tool.local.postgres_server import reachable_by_all
from openapi_tool.local.sample_calls import CompletedCall
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.requirements import requirement

HOLD = textwrap.dedent(
    """
    import sys, time
    from openapi_tool.local.stack import EmbeddedStack
    with EmbeddedStack() as stack:
        pids = [server.process.pid for server in (stack.postgres, stack.nats, stack.upstream)]
        print(stack.folder, *pids, sep="\\t", flush=True)
        time.sleep(60)
    """
)


class Interrupted(subprocess.Popen[bytes]):
    """Process during whose `poll` another thread runs."""

    meanwhile: threading.Thread | None = None

    def poll(self) -> int | None:
        if self.meanwhile is not None:
            thread, self.meanwhile = self.meanwhile, None
            thread.start()
            thread.join(0.2)  # the other thread may have to wait for this one
        return super().poll()


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "HOME": str(folder)}


@pytest.fixture
def spaced(tmp_path: Path) -> Path:
    """Return a folder with a space in its name that every user can reach."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    for part in (folder, *folder.parents):
        if part.stat().st_uid == os.geteuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o011)
    return folder


def have_ended(pids: list[int]) -> bool:
    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(runs(pid) for pid in pids)


@requirement("local.stack")
def test_a_free_port_is_none_that_an_outgoing_connection_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", first := free_port()))
        free.bind(("127.0.0.1", second := free_port()))
        monkeypatch.setattr(servers, "_PORTS", [first])
        with pytest.raises(OSError, match="no free port found"):
            free_port()
    assert first != second
    assert max(first, second) < 32_768, "Linux takes ports of connections from here on"


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@requirement("local.stack")
def test_no_process_or_file_remains_however_the_parent_ends(number: signal.Signals, spaced: Path) -> None:
    with subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(spaced),
    ) as parent:
        assert parent.stdout is not None
        folder, *pids = parent.stdout.readline().rstrip().split("\t")
        assert Path(folder).is_dir()
        assert not have_ended([int(pid) for pid in pids])
        parent.send_signal(number)
    give_up = time.monotonic() + 15
    while not have_ended([int(pid) for pid in pids]) or Path(folder).exists():
        assert time.monotonic() < give_up, "something stayed behind"
        time.sleep(0.02)


@requirement("local.stack")
def test_the_stack_comes_up_while_the_usual_ports_are_taken_and_stops_cleanly() -> None:
    with ExitStack() as exits:
        for port in (4222, 5432, 443):
            taken = exits.enter_context(socket.socket())
            try:
                taken.bind(("127.0.0.1", port))
                taken.listen()
            except OSError:  # already in use, or not permitted: either is fine
                continue
        with EmbeddedStack() as stack:
            folder = stack.folder
            assert {stack.postgres.port, stack.upstream.port}.isdisjoint({4222, 5432, 443})
    assert not folder.exists()


def test_a_folder_that_other_users_cannot_reach_is_detected(tmp_path: Path) -> None:
    closed = tmp_path / "home" / "bin"
    closed.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    assert not reachable_by_all(closed)
    assert reachable_by_all(Path("/usr/bin"))


@requirement("local.demo")
def test_the_demo_shows_a_search_a_batch_and_a_long_page_in_two_parts(spaced: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openapi_tool", "demo", "--json"],
        env=environment(spaced),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    calls: list[Mapping[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    names = [call["tool_name"] for call in calls]
    assert names == ["jina_search", "jina_read_many", "jina_read", "jina_read"]
    for call in calls:
        assert call["status"] == "success"
        assert all(request["headers"]["Accept"] == "application/json" for request in call["upstream_requests"])
        assert call["doorbell"]["headers"]["traceparent"].split("-")[1] == call["trace_id"]
        steps = list(call["steps"].values())
        assert steps == sorted(steps)
    _, batch, first, second = calls
    assert len(batch["upstream_requests"]) >= 3
    assert batch["content"].startswith("1 of 3 succeeded. Without the page: 1, see the warning below. Failed: 1,")
    assert "Failed (upstream_rejected): " in batch["content"]
    assert first["tool_output"]["truncated"]
    assert second["arguments"] == {"cursor": first["tool_output"]["next_cursor"]}
    assert second["upstream_requests"] == []
    assert second["tool_output"]["usage"] == {"tokens": 0, "requests": 0}
    assert "double-" not in done.stdout + done.stderr
    assert list(spaced.iterdir()) == []


@requirement("local.demo", "dialects.commands")
def test_the_demo_says_that_a_double_answers_and_how_to_use_the_real_one(spaced: Path) -> None:
    """With a kernel of protocol v1r3; the test above has one of v1r4."""
    done = subprocess.run(
        [sys.executable, "-m", "openapi_tool", "demo", "--protocol", "v1r3"],
        env=environment(spaced),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--upstream real" in done.stdout
    assert "Stopped: the executor, PostgreSQL, NATS and the double. Their data is deleted" in done.stderr
    assert f"  {shlex.quote(sys.executable)} -m openapi_tool dev" in done.stderr
    assert "double" in done.stdout
    assert "cg.v1r3.proj_demo.public.cmd.agent.worker_generic.wakeup" in done.stdout.replace("\n", "")
    assert '{"agent_id":"agent_demo"}' in done.stdout


@requirement("local.demo")
def test_the_demo_fails_when_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CompletedCall("t", {}, {}, [], "failed", "", {}, {"code": "x", "message": "y"}, {}, {}, "", {})
    monkeypatch.setattr(demo, "_run", lambda *_, **__: [failed])
    assert CliRunner().invoke(app, ["demo", "--json"]).exit_code == 1


@requirement("local.demo")
def test_the_real_upstream_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JINA_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["demo", "--upstream", "real"])
    assert result.exit_code == 2
    assert "JINA_API_KEY" in result.stderr


def test_processes_started_concurrently_are_all_stopped() -> None:
    guard = Guard()
    first, second, third = [Interrupted([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    guard.stop_at_end(first)
    first.meanwhile = other = threading.Thread(target=guard.stop_at_end, args=(second,))
    guard.stop_at_end(third)
    other.join()
    guard.close()
    assert [child.returncode for child in (first, second, third)] == [-signal.SIGTERM] * 3
    for child in (first, second, third):
        child.communicate()
