"""The SQLite file: private, shared by processes, safe from kills; its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from openapi_tool.gateway.stored import text_name
from openapi_tool.options.budgets import BudgetOptions
from openapi_tool.protocol.errors import BudgetExceeded, Unavailable
from openapi_tool.quotas.budgets import Budgets, Spender
from openapi_tool.state import sqlite, sqlite_file
from openapi_tool.state.change import change
from openapi_tool.state.port import ALL_RECORDS
from openapi_tool.state.sqlite import MEMORY, StateFile
from openapi_tool.state.sqlite_file import StateUnusable, default_path
from openapi_tool.tools.deadlines import Deadline
from tests.requirements import requirement
from tests.waiting import until

_COUNT = """
import asyncio, sys
from pathlib import Path
from openapi_tool.state.change import change
from openapi_tool.state.sqlite import StateFile

async def main():
    records = StateFile.open(Path(sys.argv[1])).records("test")
    for _ in range(int(sys.argv[2])):
        stored = await change(records, "count", lambda value: b"%d" % (int(value or 0) + 1))
        print(stored.value.decode(), flush=True)

asyncio.run(main())
"""

_RESERVE = """
import asyncio, sys, time
from pathlib import Path
from openapi_tool.gateway.stored import text_name
from openapi_tool.options.budgets import BudgetOptions
from openapi_tool.quotas.budgets import Budgets, Spender
from openapi_tool.state.sqlite import StateFile
from openapi_tool.tools.deadlines import Deadline

async def main():
    accounts = StateFile.open(Path(sys.argv[1])).records("budgets")
    budgets = Budgets("killed", BudgetOptions(session_requests=1), accounts, time.time, lambda: 1)
    await budgets.accounts_of(Spender("proj", "agent", "session", "tool")).reserve(1, Deadline.after(30))
    print("reserved", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def counting(path: Path, times: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _COUNT, str(path), str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - the interpreter


def lines_until_killed(path: Path, seconds: float) -> list[bytes]:
    """Count in a process, kill it this long after its first write, and return its output."""
    with counting(path, 100_000) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return [first, *process.stdout.read().split()]


def reserve_and_die(path: Path) -> None:
    """Reserve the whole budget of a session in a process, and kill it."""
    command = [sys.executable, "-c", _RESERVE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - the interpreter
        assert process.stdout is not None
        assert process.stdout.readline() == b"reserved\n"
        process.send_signal(signal.SIGKILL)


def open_once(path: Path) -> None:
    """Open a state file, and close it again."""
    asyncio.run(StateFile.open(path).aclose())


@requirement("state.file")
async def test_file_and_folder_are_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@requirement("state.file")
def test_a_file_that_others_may_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    path.touch(0o644)
    open_once(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@requirement("state.file")
def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(StateUnusable, match="--state"):
        StateFile.open(tmp_path / "link")
    assert (tmp_path / "target").read_bytes() == b""


@requirement("state.file")
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
@pytest.mark.parametrize("create", [True, False])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int, *, create: bool) -> None:
    path = tmp_path / "shared" / "gateway.sqlite3"
    open_once(path)
    path.parent.chmod(mode)
    with pytest.raises(StateUnusable, match=r"other users can write to.*chmod go-w.*--state"):
        StateFile.open(path, create=create)
    with pytest.raises(StateUnusable, match="shared"):
        StateFile.open(path.parent / "new")
    assert not (path.parent / "new").exists()


@requirement("state.file")
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "shared" / "of" / "its" / "user" / "gateway.sqlite3"
    open_once(path)
    shared = tmp_path / "shared"
    shared.chmod(mode)
    with pytest.raises(StateUnusable, match=rf"{shared} is a folder that other users can write to"):
        StateFile.open(path)
    shared.chmod(mode | stat.S_ISVTX)
    open_once(path)


@requirement("state.file")
def test_a_volume_of_kubernetes_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is; the state file is in a folder of its own below."""
    volume = tmp_path / "volume"
    open_once(volume / "openapi-tool" / "gateway.sqlite3")
    volume.chmod(0o777)
    is_mount = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda path: path == volume or is_mount(path))
    open_once(volume / "openapi-tool" / "gateway.sqlite3")
    with pytest.raises(StateUnusable, match="volume is a folder that other users can write to"):
        StateFile.open(volume / "gateway.sqlite3")


@requirement("state.file")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_below_another_users_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs" / "own" / "gateway.sqlite3"
    open_once(path)
    os.chown(tmp_path / "theirs", 12_345, -1)
    with pytest.raises(StateUnusable, match="theirs is a folder that other users can write to"):
        StateFile.open(path)


@requirement("state.file")
@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_file_beside_it_that_is_not_the_users_is_refused(tmp_path: Path, end: str) -> None:
    (tmp_path / "target").touch()
    path = tmp_path / "gateway.sqlite3"
    path.with_name(path.name + end).symlink_to(tmp_path / "target")
    with pytest.raises(StateUnusable, match=f"{end} is not a file of this user; delete it"):
        StateFile.open(path)
    assert not path.exists()


@requirement("state.file")
@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("kind", ["another program", "a text", "a short text"])
def test_what_is_no_state_file_is_refused_and_left_as_it_is(tmp_path: Path, kind: str, *, create: bool) -> None:
    path = tmp_path / "file"
    if kind == "another program":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
    else:
        path.write_text("my notes" * (1 if kind == "a short text" else 100))
    path.chmod(0o664)
    content = path.read_bytes()
    with pytest.raises(StateUnusable, match="of another program" if kind == "another program" else "is damaged"):
        StateFile.open(path, create=create)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o664, content)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@requirement("state.file")
def test_only_what_serves_makes_a_state_file_of_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch(0o644)
    with pytest.raises(StateUnusable, match="is empty, so it is no state file"):
        StateFile.open(path, create=False)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o644, b"")


def test_the_default_is_in_the_state_folder_of_the_user(tmp_path: Path) -> None:
    assert default_path({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "openapi-tool" / "gateway.sqlite3"
    assert default_path({"XDG_STATE_HOME": "relative"}).is_relative_to(Path.home())


def test_a_relative_home_is_no_place_for_it() -> None:
    code = "import os; from openapi_tool.state.sqlite_file import default_path; print(default_path(os.environ))"
    done = subprocess.run(  # noqa: S603 - the interpreter
        [sys.executable, "-c", code], env={"HOME": "relative"}, capture_output=True, text=True, check=False
    )
    assert "HOME is no absolute path" in done.stderr


@requirement("state.file")
async def test_a_process_writes_nothing_that_it_knew_before_a_purge(tmp_path: Path) -> None:
    heard: list[str] = []
    async with aclosing(StateFile.open(tmp_path / "s")) as state, aclosing(StateFile.open(tmp_path / "s")) as other:
        records = state.records("budgets")
        await records.write("a", b"used", 0)
        await other.purge()
        assert await records.write("a", b"used more", 0) is None
        async with records.watch(lambda name, _: heard.append(name)):
            await until(lambda: ALL_RECORDS in heard)
            assert await records.write("a", b"anew", 0)


@requirement("state.file")
async def test_a_defect_in_what_hears_of_a_change_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def hear(name: str, _: object) -> None:
        if name == "a":
            raise KeyError(name)
        heard.append(name)

    async with aclosing(StateFile.open(tmp_path / "s")) as state:
        records = state.records("budgets")
        async with records.watch(hear):
            await records.write("a", b"used", 0)
            await until(lambda: "internal error in the watch of the state file" in caplog.text)
            await records.write("b", b"used", 0)
            await until(lambda: heard == ["b"])


@requirement("state.file", "gateway.quotas")
async def test_no_acknowledged_write_is_lost_by_kills_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    for number in range(6):
        lines = await asyncio.to_thread(lines_until_killed, path, 0.02 * number)
        acknowledged = int(lines[-1])
        async with aclosing(StateFile.open(path)) as state:
            stored = await state.records("test").read("count")
        assert acknowledged <= int(stored.value or 0) <= acknowledged + 1


@requirement("state.file", "budgets.reservations")
async def test_a_budget_that_a_killed_process_holds_is_named_as_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    await asyncio.to_thread(reserve_and_die, path)
    async with aclosing(StateFile.open(path)) as state:
        records = state.records("budgets")
        budgets = Budgets("next", BudgetOptions(session_requests=1), records, time.time, lambda: 0.01)
        async with aclosing(budgets):
            accounts = budgets.accounts_of(Spender("proj", "agent", "session", "tool"))
            assert accounts is not None
            with pytest.raises(BudgetExceeded, match="is held by requests that have not ended") as refused:
                await accounts.reserve(1, Deadline.after(60))
    assert refused.value.retry_after is not None
    assert 1 <= refused.value.retry_after <= 90


@requirement("state.file")
async def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    processes = [counting(path, 50) for _ in range(2)]
    await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    async with aclosing(StateFile.open(path)) as state:
        assert (await state.records("test").read("count")).value == b"100"


@requirement("state.file")
@pytest.mark.parametrize("damage", ["beginning", "middle"])
async def test_a_damaged_file_is_refused_and_stays_as_it_is(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)) as state:
        for number in range(50):
            await state.records("test").write(f"record.{number}", os.urandom(4_000), 0)
    content = bytearray(path.read_bytes())
    if damage == "beginning":
        content[:100] = b"no database" * 9 + b"."
    else:
        content[8_000:80_000] = bytes(72_000)
    path.write_bytes(content)
    with pytest.raises(StateUnusable, match="is damaged"):
        StateFile.open(path)
    assert path.read_bytes() == bytes(content)


@requirement("state.file")
def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    open_once(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    path.chmod(0o644)
    with pytest.raises(StateUnusable, match="newer version of openapi-tool"):
        StateFile.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@requirement("state.file")
async def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)) as state:
        records = state.records("test")
        revision = await records.write("kept", b"value", 0)
        pages = (await state.read("PRAGMA page_count", ()))[0][0]
        await state.read(f"PRAGMA max_page_count = {pages}", ())  # as if no further page fitted on the disk
        with pytest.raises(Unavailable, match="the disk is full; free some space"):
            await records.write("large", bytes(100_000), 0)
        assert await records.read("kept") == (b"value", revision)
        await state.read("PRAGMA max_page_count = 100000", ())
        assert await records.write("large", bytes(100_000), 0)


@requirement("state.file")
def test_an_error_of_any_statement_of_the_start_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `disk I/O error`, where a full disk has no place for the file of shared memory."""
    monkeypatch.setattr(sqlite, "_LAST_PURGE", "SELECT * FROM nowhere")
    with pytest.raises(StateUnusable, match=r"s cannot be used: no such table: nowhere; check .*--state"):
        StateFile.open(tmp_path / "s")


@requirement("state.file")
async def test_a_process_that_holds_the_lock_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.2)
    path = tmp_path / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)) as state:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waits_ms = []
        for _ in range(3):
            waits_ms += await state.read("PRAGMA busy_timeout", ())
            with pytest.raises(Unavailable, match="another process has written to it"):
                await state.records("test").write("a", b"1", 0)
        assert waits_ms == [(200,), (0,), (0,)]
        other.execute("ROLLBACK")
        other.close()
        assert await state.records("test").write("a", b"1", 0)
        assert await state.read("PRAGMA busy_timeout", ()) == [(200,)]
        other.close()


@requirement("state.file")
async def test_a_purge_leaves_no_byte_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)) as state:
        await state.texts("test", 60).put("name", b"a-distinctive-text" * 1_000)
        await change(state.records("test"), "record", lambda _: b"a-distinctive-record")
        await state.purge()
        contents = [file.read_bytes() for file in tmp_path.iterdir()]  # noqa: ASYNC240 - in memory
        assert not any(b"distinctive" in content for content in contents)
        assert (await state.records("test").read("record")).value is None


async def test_texts_beyond_the_limit_leave_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MAX_TEXTS_BYTES", 2_500)
    async with aclosing(StateFile.open(MEMORY)) as state:
        texts = state.texts("test", 60)
        for name in "abc":
            await texts.put(name, bytes(1_000))
        assert [await texts.get(name) is not None for name in "abc"] == [False, True, True]


async def test_texts_of_one_kind_do_not_take_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MAX_TEXTS_BYTES", 2_500)
    async with aclosing(StateFile.open(MEMORY)) as state:
        soon, later = state.texts("soon", 60), state.texts("later", 6_000)
        await soon.put("result", bytes(500))
        for name in "abc":
            await later.put(name, bytes(1_000))
        assert await soon.get("result") is not None
        assert [await later.get(name) is not None for name in "abc"] == [False, True, True]


async def test_texts_of_one_project_do_not_take_the_place_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MAX_TEXTS_BYTES", 4_500)
    async with aclosing(StateFile.open(MEMORY)) as state:
        texts, quiet = state.texts("whole", 60), text_name("quiet", "a", "1")
        flood = [text_name("flood", "a", number) for number in range(6)]
        for name in (quiet, *flood):
            await texts.put(name, bytes(1_000))
        assert await texts.get(quiet) is not None
        assert [await texts.get(name) is not None for name in flood] == [False] * 3 + [True] * 3


async def test_a_text_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "MAX_TEXT_BYTES", 10)
    async with aclosing(StateFile.open(MEMORY)) as state:
        with pytest.raises(Unavailable, match="larger than"):
            await state.texts("test", 60).put("name", bytes(11))


@requirement("state.file", "gateway.untracked")
async def test_an_expired_text_leaves_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sqlite3"
    async with aclosing(StateFile.open(path)) as state:
        await state.texts("test", 0.05).put("name", b"a-distinctive-text" * 1_000)
        await asyncio.sleep(0.1)
        await state.texts("test", 60).put("another", b"text")
        await state.read("PRAGMA wal_checkpoint(TRUNCATE)", ())
        contents = [file.read_bytes() for file in tmp_path.iterdir()]  # noqa: ASYNC240 - in memory
    assert not any(b"distinctive" in content for content in contents)
