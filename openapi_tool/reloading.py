"""Reload of the settings by a running process, at SIGHUP or when a watched file has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.concurrency.background import repeat
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.settings import CONFIG_VARIABLE, Settings, SettingsError
from openapi_tool.settings.sources import named_by
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.tools.policy import Policy
from openapi_tool.tools.secret_variables import FILE_SUFFIX, Secrets

log = logging.getLogger(__name__)

POLL_S = 2.0  # between two looks at the watched files


@dataclass(slots=True)
class Reloader:
    """Reads the settings again. Policy, keys and limits (but not their pools) take effect; the rest needs a restart.

    Invalid settings change nothing. Neither does a file that has become empty: it is being written, or its disk is
    full, and it would lift every denial of the policy.

    - `bootstrap`: what the process has started with; `read` reads the settings from all sources.
    - `runners`: engines that get the new policy and keys.
    - `use_keys`, `use_limits`: called with the new keys and limits.
    """

    bootstrap: Bootstrap
    read: Callable[[], Settings]
    environment: Mapping[str, str]
    runners: list[ToolRunner] = field(default_factory=list)
    use_keys: Callable[[Secrets], None] = lambda _: None
    use_limits: Callable[[LimitOptions], None] = lambda _: None
    _latest: Bootstrap | None = None  # of the last reload
    _had_content: bool = field(init=False)
    _watcher: FileWatcher = field(init=False)

    def __post_init__(self) -> None:
        self._had_content = self._config_bytes() > 0
        self._watcher = FileWatcher(self.files)  # now: a file may change before `run`

    def add(self, runner: ToolRunner) -> None:
        """Add the runner of a kernel, which may connect long after the last reload."""
        self.runners.append(runner)
        if self._latest is not None:
            runner.reload(self._latest.authorizer, self._latest.secrets)

    @property
    def policy(self) -> Policy:
        """Return the policy in use."""
        return (self._latest or self.bootstrap).settings.policy

    async def run(self, requested: asyncio.Event) -> None:
        """Reload whenever `requested` is set or a file has changed."""

        async def request_if_changed() -> None:
            if await asyncio.to_thread(self._watcher.changed):
                requested.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(repeat(request_if_changed, POLL_S, "the watch of the settings"), name="files")
            while True:
                await requested.wait()
                requested.clear()
                await self.reload()

    @property
    def files(self) -> list[Path]:
        """Return the watched files: the settings file, and those of keys (in `JINA_API_KEY_FILE`, for example)."""
        of_keys = [f"{variable}{FILE_SUFFIX}" for variable in sorted(self.bootstrap.secrets.allowed)]
        names = [self.environment.get(variable) for variable in (CONFIG_VARIABLE, *of_keys)]
        return [Path(name) for name in names if name]

    async def reload(self) -> None:
        """Reload once; no error ends the process, or the task that reloads."""
        try:
            await self._reload()
        except SettingsError as error:
            log.error(  # noqa: TRY400 - an operator's mistake, not a defect
                "cannot reload the settings; the old ones stay in use: %s",
                "; ".join(error.problems),
                extra={"action": "reload.failed"},
            )
        except Exception:  # a defect
            log.exception(
                "internal error in the reload; some of the settings may be in use", extra={"action": "reload.failed"}
            )

    async def _reload(self) -> None:
        has_content = self._config_bytes() > 0
        if self._had_content and not has_content:
            raise _emptied()
        fresh = await asyncio.to_thread(lambda: build_bootstrap(self.read(), self.environment))
        self._had_content = has_content
        self.bootstrap.redactor.add(fresh.redactor.known)  # before the first use of a new key
        self._latest = fresh
        self.use_keys(fresh.secrets)
        self.use_limits(fresh.settings.limits)
        for runner in self.runners:
            runner.reload(fresh.authorizer, fresh.secrets)
        RECENT_WARNINGS.solve("reload.failed")
        need_restart = _need_restart(self.bootstrap.settings, fresh.settings)
        log.info(
            "reloaded policy, keys and limits",
            extra={"action": "reload.done", "missing": fresh.secrets.missing(), "need_restart": need_restart},
        )

    def _config_bytes(self) -> int:
        name = self.environment.get(CONFIG_VARIABLE)
        state = _state(Path(name)) if name else None
        return 0 if state is None else state.size


def _need_restart(before: Settings, after: Settings) -> list[str]:
    """Return the sections that have changed and that a reload does not use."""
    sections = set(Settings.model_fields) - {"policy", "limits"}
    changed = [section for section in sections if getattr(before, section) != getattr(after, section)]
    if before.limits.pools != after.limits.pools:
        changed.append("limits.pools")
    return sorted(changed)


def _emptied() -> SettingsError:
    return SettingsError([f"{named_by(CONFIG_VARIABLE)}: the file has become empty; to have no settings, restart"])


class _FileState(NamedTuple):
    modified_ns: int
    inode: int
    size: int


class FileWatcher:
    """Detects changes of files, also behind a link; `files` is iterated each time, so it may be a folder."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = files
        self._reported = self._states()  # when `changed` was true the last time
        self._before = self._reported  # at the last call of `changed`

    def changed(self) -> bool:
        """Return whether a file changed and is stable again: a writer may need several steps."""
        now = self._states()
        is_stable = now == self._before
        has_changed = now != self._reported
        self._before = now
        if is_stable and has_changed:
            self._reported = now
            return True
        return False

    def _states(self) -> list[tuple[Path, _FileState | None]]:
        return [(file, _state(file)) for file in self._files]


def _state(file: Path) -> _FileState | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return _FileState(status.st_mtime_ns, status.st_ino, status.st_size)
