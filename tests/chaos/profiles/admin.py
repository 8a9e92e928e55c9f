"""Somebody changes what executors rely on in NATS: the durable, the buckets, the stream of dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy
from nats.js.errors import NotFoundError

from tests.chaos import faults
from tests.chaos.checker import COMMANDS, DEAD_LETTERS, dead_lettered, messages
from tests.chaos.harness import DURABLE, Fault, Profile, Run, nats_client, outage
from tests.chaos.servers import execute
from tests.role import ROLE

LEASES, SESSIONS = "KV_openapi_tool_leases", "KV_openapi_tool"
OTHER_FILTER = "cg.v1r4.*.*.cmd.tool.other.>"
_POLL_S = 0.25
_REVOKED_S = 9.0
_REDELIVERED_S = 8.0
_LITTLE_PAUSE_S = 0.5
_SHORT_ACK_WAIT_S = 1.0


class Admin(Profile):
    """One server. What executors have not put right in time is put right, so that one change does not hide another.

    A durable that is made again brings back what others lose, so it is deleted first.
    """

    def faults(self) -> Mapping[str, Fault]:
        return {
            "poison": faults.poison,
            "durable_deleted": self.durable_deleted,
            "max_deliver": self.max_deliver,
            "filter": self.filter,
            "paused": self.paused,
            "leases_full": partial(self.full, LEASES, faults.kill),
            "letters_full": partial(self.full, DEAD_LETTERS, _unanswerable),
            "ack_wait": self.ack_wait,
            "buckets_deleted": self.buckets_deleted,
            "letters_deleted": self.letters_deleted,
        }

    async def max_deliver(self, run: Run) -> int:
        """Limit deliveries to three while calls cannot be loaded, so that commands are handed back again and again."""
        before = (await _asked(run, _durable)).config.max_deliver

        @asynccontextmanager
        async def limited() -> AsyncIterator[None]:
            await self._change(run, max_deliver=3)
            await execute(run.site.dsn, f"revoke select on cards from {ROLE}")  # noqa: S608 - constants only
            yield
            await execute(run.site.dsn, f"grant select on cards to {ROLE}")

        hit = await outage(run, "select revoked with max_deliver 3", limited(), _REVOKED_S)
        await asyncio.sleep(_REDELIVERED_S)
        await self._change(run, max_deliver=before)
        return hit

    async def filter(self, run: Run) -> int:
        """Let the durable listen to something else; executors put it back."""

        async def wrong(jetstream: JetStreamContext) -> bool:
            return bool((await _durable(jetstream)).config.filter_subject == OTHER_FILTER)

        before = (await _asked(run, _durable)).config.filter_subject
        change = partial(self._change, run, filter_subject=OTHER_FILTER)
        return await self._until_put_back(run, "filter changed", change, wrong, before)

    async def durable_deleted(self, run: Run) -> int:
        """Delete the durable; executors make it again."""

        async def wrong(jetstream: JetStreamContext) -> bool:
            return DURABLE not in {found.name for found in await jetstream.consumers_info(COMMANDS)}

        delete = partial(_asked, run, lambda jetstream: jetstream.delete_consumer(COMMANDS, DURABLE))
        return await self._until_put_back(run, "durable deleted", delete, wrong)

    async def _until_put_back(
        self,
        run: Run,
        why: str,
        change: Callable[[], Awaitable[Any]],
        wrong: Callable[[JetStreamContext], Awaitable[bool]],
        before: str | None = None,
    ) -> int:
        """Change something and wait for `outage_s` at most until executors have put it back; then do it for them."""
        running, began = await run.running(), time.time()
        await change()
        since = until = time.time()
        while time.time() < since + run.outage_s and await _asked(run, wrong):
            until = time.time()
            await asyncio.sleep(_POLL_S)
        if before is not None and await _asked(run, wrong):
            await self._change(run, filter_subject=before)
        run.journal.note(outage=why, began=began, since=since, until=until, over=time.time(), fetched=None)
        return running

    async def ack_wait(self, run: Run) -> int:
        """Shorten the AckWait to less than the distance of heartbeats, as an executor with another setting would."""
        before = (await _asked(run, _durable)).config.ack_wait
        await self._change(run, ack_wait=_SHORT_ACK_WAIT_S)
        await asyncio.sleep(run.outage_s)
        await self._change(run, ack_wait=before)
        return await run.running()

    async def paused(self, run: Run) -> int:
        """Pause the durable; it resumes when the time is over."""

        @asynccontextmanager
        async def pause() -> AsyncIterator[None]:
            until = datetime.now(UTC) + timedelta(seconds=run.outage_s + _LITTLE_PAUSE_S)
            await _asked(run, lambda jetstream: jetstream.pause_consumer(COMMANDS, DURABLE, until.isoformat()))
            yield
            await asyncio.sleep((until - datetime.now(UTC)).total_seconds())

        return await outage(run, "durable paused", pause())

    async def buckets_deleted(self, run: Run) -> int:
        """Delete both buckets, then freeze an executor: its calls need leases in others that have opened the bucket."""
        deleted = [await _asked(run, partial(_delete, stream)) for stream in (LEASES, SESSIONS)]
        hit = await faults.freeze(run)
        await asyncio.sleep(faults.STOPPED_S + _REDELIVERED_S)
        return hit * any(deleted)

    async def letters_deleted(self, run: Run) -> int:
        """Delete the stream of dead letters while one is due; those that it held were written, and count as such."""
        for call_id, at in dead_lettered(await messages(run.site.nats_urls, DEAD_LETTERS, "")).items():
            run.journal.note(dead_letter=call_id, at=at)
        deleted = await _asked(run, partial(_delete, DEAD_LETTERS))
        await run.load.unanswerable()
        return int(deleted)

    async def full(self, stream: str, then: Fault, run: Run) -> int:
        """Let a stream of ours take no more bytes, and do what needs it."""

        @asynccontextmanager
        async def filled() -> AsyncIterator[None]:
            before = (await _asked(run, lambda jetstream: jetstream.stream_info(stream))).config
            small = before.evolve(max_bytes=1, discard=DiscardPolicy.NEW)
            await _asked(run, lambda jetstream: jetstream.update_stream(small))
            await then(run)
            yield
            await _asked(run, lambda jetstream: jetstream.update_stream(before))

        try:
            return await outage(run, f"{stream} full", filled())
        except NotFoundError:  # nobody has made it yet
            return 0

    async def _change(self, run: Run, **changes: Any) -> None:
        """Change settings of the durable."""

        async def change(jetstream: JetStreamContext) -> None:
            config = (await _durable(jetstream)).config
            await jetstream.add_consumer(COMMANDS, config.evolve(**changes, name=DURABLE))

        await _asked(run, change)


async def _asked(run: Run, question: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    async with nats_client(run.site.nats_urls) as client:
        return await question(client.jetstream())


async def _durable(jetstream: JetStreamContext) -> Any:
    return await jetstream.consumer_info(COMMANDS, DURABLE)


async def _delete(stream: str, jetstream: JetStreamContext) -> bool:
    try:
        return await jetstream.delete_stream(stream)
    except NotFoundError:
        return False


async def _unanswerable(run: Run) -> int:
    await run.load.unanswerable()
    return 1
