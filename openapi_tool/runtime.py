"""Limits of this process (open files, memory), and reload of its policy and keys."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.executor.runner import ToolRunner
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.settings.sources import CONFIG_VARIABLE
from openapi_tool.telemetry.health_server import MAX_CONNECTIONS
from openapi_tool.tools.secrets import FILE_SUFFIX, Secrets

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _LARGE_BYTES = -3, -1, 4 * 2**20  # mallopt(3)
_OTHER_FILES = 128
"""Descriptors for NATS, traces, DNS, files, pipes."""

_YOUNG_OBJECTS = 20_000


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the system-wide limit was lowered below the hard limit
        return soft
    return hard


def file_limit_problem(settings: Settings, limit: int) -> str | None:
    """Return a message with demand and remedy if the settings may need more files than the limit, else None."""
    parts = {
        "egress.max_connections": settings.egress.max_connections,
        "postgres.pool_size": settings.postgres.pool_size,
        "health server": MAX_CONNECTIONS if settings.health.port else 0,
        "reserve": _OTHER_FILES,
    }
    needed = sum(parts.values())
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    demand = ", ".join(f"{name} {number}" for name, number in parts.items())
    return (
        f"this process may open {limit} files and its settings may need {needed} ({demand}): "
        "raise the limit (ulimit -Hn) or lower egress.max_connections"
    )


def set_malloc_thresholds() -> None:
    """Make glibc allocate blocks of 4 MB and more with mmap, so that freeing returns them to the system.

    By default glibc raises that threshold to the largest block ever freed, and responses of 10 MB then fragment the
    heap. Other C libraries do not.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


def collect_garbage_rarely() -> None:
    """Exclude long-lived objects from garbage collection and run it less often: calls create hardly any cycles.

    A collection blocks the event loop for about 0.8 us per young object.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 50, 50)


log = logging.getLogger(__name__)

_POLL_S = 2.0


@dataclass(slots=True)
class Reloader:
    """Reads the settings again with `read`; gives policy and secrets to `runners`, the secrets also to `use_keys`.

    Invalid settings change nothing. Changes other than of the policy and the values of keys are logged; they need a
    restart.
    """

    bootstrap: Bootstrap
    read: Callable[[], Settings]
    environment: Mapping[str, str]
    runners: list[ToolRunner] = field(default_factory=list)
    use_keys: Callable[[Secrets], None] = lambda _: None
    _latest: Bootstrap | None = None

    def add(self, runner: ToolRunner) -> None:
        """Add the runner of a kernel, which may be connected long after the last reload."""
        self.runners.append(runner)
        if self._latest is not None:
            runner.reload(self._latest.authorizer, self._latest.secrets)

    async def run(self, requested: asyncio.Event) -> None:
        """Reload whenever `requested` is set or a file changed, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(self.files, requested), name="files")
            while True:
                await requested.wait()
                requested.clear()
                await self.reload()

    @property
    def files(self) -> list[Path]:
        """Return the configuration file and the files with keys."""
        keys = (f"{variable}{FILE_SUFFIX}" for variable in sorted(self.bootstrap.secrets.allowed))
        named = (self.environment.get(variable) for variable in (CONFIG_VARIABLE, *keys))
        return [Path(name) for name in named if name]

    async def reload(self) -> None:
        """Reload once."""
        try:
            fresh = await asyncio.to_thread(lambda: build_bootstrap(self.read(), self.environment))
        except SettingsError as error:
            log.error(  # noqa: TRY400 - an operator's mistake, not a defect
                "cannot reload the settings; the old ones stay in use: %s",
                "; ".join(error.problems),
                extra={"action": "reload.failed"},
            )
            return
        self.bootstrap.redactor.add(fresh.redactor.known)  # before the first use of a new key
        self._latest = fresh
        self.use_keys(fresh.secrets)
        for runner in self.runners:
            runner.reload(fresh.authorizer, fresh.secrets)
        log.info(
            "reloaded policy and keys",
            extra={"action": "reload.done", "missing": fresh.secrets.missing(), "need_restart": self._differ(fresh)},
        )

    def _differ(self, fresh: Bootstrap) -> list[str]:
        names = set(Settings.model_fields) - {"policy"}
        before, after = self.bootstrap.settings, fresh.settings
        return sorted(name for name in names if getattr(before, name) != getattr(after, name))


async def watch(files: Sequence[Path], changed: asyncio.Event) -> None:
    """Set `changed` whenever files changed."""
    watcher = FileWatcher(files)
    while files:
        if await asyncio.to_thread(watcher.changed):
            changed.set()
        await asyncio.sleep(_POLL_S)


class FileWatcher:
    """Detects changes of files by modification time, size and inode, also behind a link."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._known = self._before = self._states()

    def changed(self) -> bool:
        """Return whether a file changed and has been stable since the last call: a writer may need several steps."""
        now = self._states()
        settled = now == self._before != self._known
        if settled:
            self._known = now
        self._before = now
        return settled

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [_state(file) for file in self._files]


def _state(file: Path) -> tuple[int, int, int] | None:
    """Return values that change with a file's content or the link to it; None if it cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
