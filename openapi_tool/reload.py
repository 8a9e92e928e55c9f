"""SIGHUP: reload the policy and mounted keys while calls run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.executor.runner import ToolRunner
from openapi_tool.settings import Settings, SettingsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reloader:
    """Reads the settings again with `read`, and gives policy and secrets to `runner`.

    After a mistake in the settings everything stays as it is. Changes of anything but the policy and the values of keys
    need a restart; they are logged.
    """

    bootstrap: Bootstrap
    runner: ToolRunner
    read: Callable[[], Settings]
    environment: Mapping[str, str]

    async def run(self, asked: asyncio.Event) -> None:
        """Reload whenever `asked` is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            await self.reload()

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
        self.bootstrap.redactor.learn(fresh.redactor.known)  # before the first use of a new key
        self.runner.use(fresh.authorizer, fresh.secrets)
        log.info(
            "reloaded policy and keys",
            extra={"action": "reload.done", "missing": fresh.secrets.missing(), "need_restart": self._differ(fresh)},
        )

    def _differ(self, fresh: Bootstrap) -> list[str]:
        """Return the changed sections that need a restart."""
        names = set(Settings.model_fields) - {"policy"}
        before, after = self.bootstrap.settings, fresh.settings
        return sorted(name for name in names if getattr(before, name) != getattr(after, name))
