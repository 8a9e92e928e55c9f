"""Chaos profile: certificates, CA, keys and passwords are replaced under load, and no executor is restarted.

The NATS server requires client certificates. It gets its new files before the executors, as if the kubelet were slow,
or after them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.harness import DATABASE, Addresses, Fault, Profile, Run, outage
from tests.rotation import GuardedNats, Mount

READY_WITHIN_S = 5.0
_AHEAD_S = 1.0
_KEY_RELOADED_S = 6.0  # the executor looks at its key files every two seconds


class Files(Profile):
    """Half of the executors log in by nkey, the others by password; their key of Jina is in a file, too."""

    ready_within_s = READY_WITHIN_S

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._keys = itertools.cycle(stack.upstream.keys.values())  # all of which the double accepts
        self._nats: GuardedNats | None = None

    @property
    def nats(self) -> GuardedNats:
        if self._nats is None:
            raise AssertionError("the profile was not opened")
        return self._nats

    async def open(self, exits: AsyncExitStack) -> Addresses:
        del exits  # the stack's guard ends the server
        self._nats = GuardedNats(self.stack, "guarded", Mount(self.stack.folder / "mount"))
        self.nats.mount.replace(self._new_key())
        await asyncio.to_thread(self.nats.server.start)
        settings = {"JINA_API_KEY": "", "JINA_API_KEY_FILE": str(self.nats.mount.folder / "jina")}
        return Addresses(self.stack.postgres.dsn(DATABASE), [self.nats.server.url], settings)

    def settings(self, number: int) -> Mapping[str, str]:
        return self.nats.settings("nkey" if number % 2 else "password")

    def faults(self) -> Mapping[str, Fault]:
        changes: dict[str, Sequence[Callable[[GuardedNats], dict[str, bytes]]]] = {
            "ca": [GuardedNats.new_ca],
            "client_certificate": [GuardedNats.new_client_certificate],
            "logins": [GuardedNats.new_nkey, GuardedNats.new_password],
        }
        changes["all"] = [change for group in changes.values() for change in group]
        return {
            "jina_key": self.jina_key,
            **{name: partial(self.late, changed) for name, changed in changes.items()},
            **{f"{name}_ahead": partial(self.ahead, changed) for name, changed in changes.items()},
        }

    async def late(self, changes: Sequence[Callable[[GuardedNats], dict[str, bytes]]], run: Run) -> int:
        """Restart the server with new files, for the length of an outage before the executors get theirs."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            files = self._changed(changes)
            await asyncio.to_thread(self.nats.restart)
            yield
            self.nats.mount.replace(files)

        return await outage(run, "the server has new files, the executors have old ones", broken())

    async def ahead(self, changes: Sequence[Callable[[GuardedNats], dict[str, bytes]]], run: Run) -> int:
        """Replace the files of the executors, and restart the server a second later."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            await asyncio.to_thread(self.nats.server.stop)
            yield
            await asyncio.to_thread(self.nats.server.start)

        self.nats.mount.replace(self._changed(changes))
        await asyncio.sleep(_AHEAD_S)
        return await outage(run, "the server is restarted after all files were replaced", broken())

    async def jina_key(self, run: Run) -> int:
        """Replace the key of Jina."""
        self.nats.mount.replace(self._new_key())
        await asyncio.sleep(_KEY_RELOADED_S)
        return await run.running()

    def _new_key(self) -> dict[str, bytes]:
        return {"jina": next(self._keys).encode()}

    def _changed(self, changes: Sequence[Callable[[GuardedNats], dict[str, bytes]]]) -> dict[str, bytes]:
        return {name: data for change in changes for name, data in change(self.nats).items()}
