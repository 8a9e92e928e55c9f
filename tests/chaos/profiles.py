"""Chaos profiles besides the standard one: NATS cluster, administrator, clocks, PostgreSQL failover, PgBouncer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import asyncpg
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy
from nats.js.errors import NotFoundError

from openapi_tool.local.postgres_server import PostgresServer
from openapi_tool.local.stack import EmbeddedStack
from tests.chaos import faults
from tests.chaos.checker import COMMANDS, DEAD_LETTERS, dead_lettered, messages
from tests.chaos.harness import (
    DATABASE,
    DURABLE,
    RECORDING,
    Addresses,
    Fault,
    NatsCluster,
    NotInstalled,
    PgBouncer,
    Profile,
    Replica,
    Run,
    Standby,
    Switch,
    execute,
    nats_client,
    outage,
)
from tests.chaos.shifted import JUMP_VARIABLE, OFFSET_VARIABLE
from tests.support import ROLE, dsn_of

LEASES, SESSIONS = "KV_openapi_tool_leases", "KV_openapi_tool"

# Three NATS servers as one cluster, with the command stream on all of them; leaders and the quorum are lost.

DOWN_S = 8.0
"""Longer than AckWait, so that commands are delivered again while the node is down."""

LONG_DOWN_S = 35.0
"""Longer than a worker waits: calls must be answered without the data of this node."""

_UP_S, _POLL_S, _REQUEST_TIMEOUT_S = 30.0, 0.1, 0.5


class Cluster(Profile):
    """Executors know all three servers; `nats.replicas` has its default."""

    rest_s = 4.0

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._cluster: NatsCluster | None = None

    @property
    def cluster(self) -> NatsCluster:
        if self._cluster is None:
            raise AssertionError("the profile was not opened")
        return self._cluster

    async def open(self, exits: AsyncExitStack) -> Addresses:
        del exits  # the stack's guard ends the nodes
        self._cluster = NatsCluster(self.stack)
        await self._cluster.start()
        await until_led(self._cluster.urls, _can_create_stream)
        settings = {"NATS_SERVERS": ",".join(self._cluster.urls)}
        return Addresses(self.stack.postgres.dsn(DATABASE), self._cluster.urls, settings, stream_replicas=3)

    def faults(self) -> Mapping[str, Fault]:
        streams = {"commands": COMMANDS, "durable": COMMANDS, "leases": LEASES, "sessions": SESSIONS}
        streams["letters"] = DEAD_LETTERS
        return {
            "poison": faults.poison,
            "kill_executor": faults.kill,
            "kill_leases": partial(self.lose_leader, "leases", LEASES, "kill", LONG_DOWN_S),
            **{
                f"{how}_{name}": partial(self.lose_leader, name, stream, how, DOWN_S)
                for name, stream in streams.items()
                for how in ("kill", "freeze")
                if (name, how) != ("leases", "kill")
            },
            "quorum_lost": self.lose_quorum,
            "all_frozen": self.freeze_all,
        }

    async def lose_leader(self, name: str, stream: str, how: str, down_s: float, run: Run) -> int:
        """Kill or freeze the leader of a stream or the durable, and kill an executor, whose calls then need leases."""
        leader = await self._leader(name, stream)
        if leader is None:  # not created yet
            return 0
        others = self.cluster.urls_without(leader)
        async with self._down(leader) if how == "kill" else self._frozen(leader):
            await self._led_again(run, f"{how} of the leader of {name}", others)
            hit = await faults.kill(run)
            await run.load.publish_unanswerable()
            await asyncio.sleep(down_s)
        return hit

    async def lose_quorum(self, run: Run) -> int:
        """Stop two of the three servers."""
        names = run.random.sample(sorted(self.cluster.nodes), 2)

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            for name in names:
                await asyncio.to_thread(self.cluster.nodes[name].stop)
            yield
            await asyncio.gather(*(asyncio.to_thread(self.cluster.nodes[name].start) for name in names))
            await until_led(self.cluster.urls, _has_leaders)

        return await outage(run, "quorum of the NATS cluster lost", broken())

    async def freeze_all(self, run: Run) -> int:
        """Freeze all servers: no connection ends."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            async with AsyncExitStack() as exits:
                for name in self.cluster.nodes:
                    await exits.enter_async_context(self._frozen(name))
                yield
            await until_led(self.cluster.urls, _has_leaders)

        return await outage(run, "all NATS servers silent", broken())

    async def _leader(self, name: str, stream: str) -> str | None:
        try:
            async with nats_client(self.cluster.urls) as client:
                jetstream = client.jetstream()
                if name == "durable":
                    found: Any = await jetstream.consumer_info(stream, DURABLE)
                else:
                    found = await jetstream.stream_info(stream)
        except nats.js.errors.NotFoundError:
            return None
        return found.cluster.leader if found.cluster else None

    async def _led_again(self, run: Run, why: str, urls: list[str]) -> None:
        """Wait until command stream and durable have leaders again; the time without them is an outage."""
        began = time.time()
        unled_until = await until_led(urls, _has_leaders)
        times = {"began": began, "since": began, "until": max(began, unled_until), "over": time.time()}
        run.journal.record(outage=why, deliveries=None, **times)

    @asynccontextmanager
    async def _down(self, name: str) -> AsyncIterator[None]:
        await self.cluster.signal(name, signal.SIGKILL)
        try:
            yield
        finally:
            await asyncio.to_thread(self.cluster.nodes[name].start)

    @asynccontextmanager
    async def _frozen(self, name: str) -> AsyncIterator[None]:
        await self.cluster.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            await self.cluster.signal(name, signal.SIGCONT)


async def until_led(urls: list[str], led: Callable[[JetStreamContext], Awaitable[bool]]) -> float:
    """Wait until `led` holds. Return when it did not hold for the last time (seconds since the epoch), or 0.

    Raises TimeoutError.
    """
    unled_at = 0.0
    async with asyncio.timeout(_UP_S):
        while not await _is_led(urls, led):
            unled_at = time.time()
            await asyncio.sleep(_POLL_S)
    return unled_at


async def _is_led(urls: list[str], led: Callable[[JetStreamContext], Awaitable[bool]]) -> bool:
    with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(4 * _REQUEST_TIMEOUT_S), nats_client(urls) as client:
            return await led(client.jetstream(timeout=_REQUEST_TIMEOUT_S))
    return False


async def _can_create_stream(jetstream: JetStreamContext) -> bool:
    await jetstream.add_stream(name="probe", subjects=["probe"], num_replicas=3)
    return await jetstream.delete_stream("probe")


async def _has_leaders(jetstream: JetStreamContext) -> bool:
    """Return whether durable and stream have leaders; only a leader responds to these requests."""
    durable, stream = await jetstream.consumer_info(COMMANDS, DURABLE), await jetstream.stream_info(COMMANDS)
    return all(info.cluster is not None and bool(info.cluster.leader) for info in (durable, stream))


# An administrator changes what executors depend on in NATS: the durable, the buckets, the stream of dead letters.


OTHER_FILTER = "cg.v1r4.*.*.cmd.tool.other.>"
_POLL_S_ADMIN = 0.25
_REVOKED_S = 9.0
_REDELIVERED_S = 8.0
_RESUME_MARGIN_S = 0.5
_SHORT_ACK_WAIT_S = 1.0


class Admin(Profile):
    """One server. Each change is undone if executors have not undone it, so that it does not hide the next one.

    The durable is deleted before other changes: a new durable redelivers commands, which would hide later losses.
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
        """Limit deliveries to three while calls cannot be loaded, so that commands are handed back repeatedly."""
        before = (await _on_jetstream(run, _durable)).config.max_deliver

        @asynccontextmanager
        async def limited() -> AsyncIterator[None]:
            await self._change(run, max_deliver=3)
            await execute(run.addresses.dsn, f"revoke select on cards from {ROLE}")  # noqa: S608 - constants only
            yield
            await execute(run.addresses.dsn, f"grant select on cards to {ROLE}")

        hit = await outage(run, "select revoked with max_deliver 3", limited(), _REVOKED_S)
        await asyncio.sleep(_REDELIVERED_S)
        await self._change(run, max_deliver=before)
        return hit

    async def filter(self, run: Run) -> int:
        """Change the filter of the durable; executors restore it."""

        async def wrong(jetstream: JetStreamContext) -> bool:
            return bool((await _durable(jetstream)).config.filter_subject == OTHER_FILTER)

        before = (await _on_jetstream(run, _durable)).config.filter_subject
        change = partial(self._change, run, filter_subject=OTHER_FILTER)
        return await self._until_restored(run, "filter changed", change, wrong, before)

    async def durable_deleted(self, run: Run) -> int:
        """Delete the durable; executors create it again."""

        async def wrong(jetstream: JetStreamContext) -> bool:
            return DURABLE not in {found.name for found in await jetstream.consumers_info(COMMANDS)}

        delete = partial(_on_jetstream, run, lambda jetstream: jetstream.delete_consumer(COMMANDS, DURABLE))
        return await self._until_restored(run, "durable deleted", delete, wrong)

    async def _until_restored(
        self,
        run: Run,
        why: str,
        change: Callable[[], Awaitable[Any]],
        wrong: Callable[[JetStreamContext], Awaitable[bool]],
        before: str | None = None,
    ) -> int:
        """Make a change and wait at most `outage_s` until executors have undone it; else restore filter `before`."""
        running, began = await run.running(), time.time()
        await change()
        since = until = time.time()
        while time.time() < since + run.outage_s and await _on_jetstream(run, wrong):
            until = time.time()
            await asyncio.sleep(_POLL_S_ADMIN)
        if before is not None and await _on_jetstream(run, wrong):
            await self._change(run, filter_subject=before)
        run.journal.record(outage=why, began=began, since=since, until=until, over=time.time(), deliveries=None)
        return running

    async def ack_wait(self, run: Run) -> int:
        """Shorten the AckWait to less than the interval of heartbeats, as an executor with another setting would."""
        before = (await _on_jetstream(run, _durable)).config.ack_wait
        await self._change(run, ack_wait=_SHORT_ACK_WAIT_S)
        await asyncio.sleep(run.outage_s)
        await self._change(run, ack_wait=before)
        return await run.running()

    async def paused(self, run: Run) -> int:
        """Pause the durable for the length of the outage."""

        @asynccontextmanager
        async def pause() -> AsyncIterator[None]:
            until = datetime.now(UTC) + timedelta(seconds=run.outage_s + _RESUME_MARGIN_S)
            await _on_jetstream(run, lambda jetstream: jetstream.pause_consumer(COMMANDS, DURABLE, until.isoformat()))
            yield
            await asyncio.sleep((until - datetime.now(UTC)).total_seconds())

        return await outage(run, "durable paused", pause())

    async def buckets_deleted(self, run: Run) -> int:
        """Delete both buckets, then freeze an executor: the others, which had opened the bucket, need leases."""
        deleted = [await _on_jetstream(run, partial(_delete, stream)) for stream in (LEASES, SESSIONS)]
        hit = await faults.freeze(run)
        await asyncio.sleep(faults.FROZEN_S + _REDELIVERED_S)
        return hit * any(deleted)

    async def letters_deleted(self, run: Run) -> int:
        """Delete the stream of dead letters, recording those in it as written; then cause another dead letter."""
        for call_id, at in dead_lettered(await messages(run.addresses.nats_urls, DEAD_LETTERS, "")).items():
            run.journal.record(dead_letter=call_id, at=at)
        deleted = await _on_jetstream(run, partial(_delete, DEAD_LETTERS))
        await run.load.publish_unanswerable()
        return int(deleted)

    async def full(self, stream: str, then: Fault, run: Run) -> int:
        """Limit a stream of the executor to 1 byte, and run `then`, a fault that needs it."""

        @asynccontextmanager
        async def filled() -> AsyncIterator[None]:
            before = (await _on_jetstream(run, lambda jetstream: jetstream.stream_info(stream))).config
            small = before.evolve(max_bytes=1, discard=DiscardPolicy.NEW)
            await _on_jetstream(run, lambda jetstream: jetstream.update_stream(small))
            await then(run)
            yield
            await _on_jetstream(run, lambda jetstream: jetstream.update_stream(before))

        try:
            return await outage(run, f"{stream} full", filled())
        except NotFoundError:  # not created yet
            return 0

    async def _change(self, run: Run, **changes: Any) -> None:
        """Change settings of the durable."""

        async def change(jetstream: JetStreamContext) -> None:
            config = (await _durable(jetstream)).config
            await jetstream.add_consumer(COMMANDS, config.evolve(**changes, name=DURABLE))

        await _on_jetstream(run, change)


async def _on_jetstream(run: Run, request: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    async with nats_client(run.addresses.nats_urls) as client:
        return await request(client.jetstream())


async def _durable(jetstream: JetStreamContext) -> Any:
    return await jetstream.consumer_info(COMMANDS, DURABLE)


async def _delete(stream: str, jetstream: JetStreamContext) -> bool:
    try:
        return await jetstream.delete_stream(stream)
    except NotFoundError:
        return False


async def _unanswerable(run: Run) -> int:
    await run.load.publish_unanswerable()
    return 1


# Executors whose wall clock is off: 28 s ahead, 28 s behind, 5 s ahead, and one that jumps by an hour.


OFFSETS_S = (28.0, -28.0, 5.0, 0.0)
JUMPS = 3
"""The replica whose clock jumps."""

BEHIND = 1
"""The replica whose clock is behind; it starts first after all replicas were stopped."""

BACKLOG_S = 36.0
"""Longer than a worker waits: the oldest calls must not send upstream requests any more."""

_SLOW_S, _REDELIVERED_S_CLOCKS = 4.0, 7.5


class Clocks(Profile):
    """Every replica has its own clock offset; the servers' clocks are right."""

    replicas = len(OFFSETS_S)
    executor = "tests.chaos.shifted"
    rest_s = faults.FROZEN_S + 1

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._jump = stack.folder / "jump"

    def settings(self, number: int) -> Mapping[str, str]:
        return {OFFSET_VARIABLE: str(OFFSETS_S[number]), JUMP_VARIABLE: str(self._jump_of(number))}

    def _jump_of(self, number: int) -> str:
        return str(self._jump if number == JUMPS else self._jump.with_suffix(".never"))

    def faults(self) -> Mapping[str, Fault]:
        return {
            "kill": faults.kill,
            "jump": self.jump,
            "kill_leased": self.kill_leased,
            "freeze": faults.freeze,
            "backlog": self.backlog,
        }

    async def jump(self, run: Run) -> int:
        """Set one clock forward by an hour."""
        self._jump.touch()
        return await run.replicas[JUMPS].running()

    async def kill_leased(self, run: Run) -> int:
        """Kill a replica, and once its calls run elsewhere with a lease, the one whose clock has jumped."""
        await asyncio.to_thread(
            run.stack.upstream.rules, {"answer": RECORDING, "delay_s": _SLOW_S}, *run.normal_rules()
        )
        await asyncio.sleep(_SLOW_S)
        _kill(run, run.replicas[JUMPS - 1])
        await asyncio.sleep(_REDELIVERED_S_CLOCKS)
        hit = await run.replicas[JUMPS].running()
        _kill(run, run.replicas[JUMPS])
        await run.rules()
        return hit

    async def backlog(self, run: Run) -> int:
        """Stop all executors, so that commands wait for longer than their callers."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            for replica in run.replicas:
                replica.under_fault = True
            await asyncio.gather(*(asyncio.to_thread(replica.process.stop) for replica in run.replicas))
            yield
            await asyncio.to_thread(run.replicas[BEHIND].process.start)
            others = [replica for replica in run.replicas if not replica.alive]
            await asyncio.gather(*(asyncio.to_thread(replica.process.start) for replica in others))
            for replica in run.replicas:
                replica.under_fault = False

        return await outage(run, "no executor", broken(), BACKLOG_S)


def _kill(run: Run, replica: Replica) -> None:
    run.journal.record(crash=time.time())
    replica.process.signal(signal.SIGKILL)


# PostgreSQL with a streaming standby: read-only periods, a full disk, an operator's mistakes, and a promotion.


_POLL_S_FAILOVER = 0.05
_NO_SPACE = f"""
create function public.no_space() returns trigger language plpgsql as $$ begin
  if current_user = '{ROLE}' then
    raise exception 'could not extend file: No space left on device' using errcode = '53100';
  end if;
  return new;
end $$
"""


class Failover(Profile):
    """Executors reach the database through a `Switch`, which keeps open connections when it moves."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self.primary: PostgresServer = stack.postgres
        self.standby: PostgresServer = stack.postgres
        self.executors = self.kernel = Switch(stack.postgres.port)

    async def open(self, exits: AsyncExitStack) -> Addresses:
        folder = self.stack.folder / "standby"
        folder.mkdir()
        self.standby = Standby(folder, self.stack.guard, self.primary)
        await asyncio.to_thread(self.standby.start)
        await execute(self.primary.dsn(), "alter system set synchronous_standby_names = '*'", "select pg_reload_conf()")
        self.executors = await exits.enter_async_context(Switch(self.primary.port).listening())
        self.kernel = await exits.enter_async_context(Switch(self.primary.port).listening())
        kernel = self.primary.dsn(DATABASE).replace(f":{self.primary.port}/", f":{self.kernel.port}/")
        nats_urls = [self.stack.nats.url]
        return Addresses(f"{kernel}?default_transaction_read_only=off", nats_urls, {"PG_DSN": self._executor_dsn()})

    def _executor_dsn(self) -> str:
        return dsn_of(self.stack, DATABASE, at=f"127.0.0.1:{self.executors.port}")

    def faults(self) -> Mapping[str, Fault]:
        return {
            "read_only": self.read_only,
            "to_standby": self.to_standby,
            "disk_full": self.disk_full,
            "revoked": self.revoked,
            "renamed": self.renamed,
            "promotion": self.promotion,
        }

    async def read_only(self, run: Run) -> int:
        """Make new transactions of the primary read-only, those of open connections, too."""
        return await outage(run, "primary read-only", self._altered(_read_only("on"), _read_only("off")))

    async def to_standby(self, run: Run) -> int:
        """Route new connections to the standby for a while; those opened meanwhile stay there."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            self.executors.move(self.standby.port, drop=True)
            yield
            self.executors.move(self.primary.port, drop=False)

        return await outage(run, "connections lead to the standby", broken())

    async def disk_full(self, run: Run) -> int:
        """Simulate a full disk: every result is refused with 53100."""
        trigger = "create trigger no_space before insert on cards for each row execute function public.no_space()"
        broken = self._altered([_NO_SPACE, trigger], ["drop function public.no_space() cascade"])
        return await outage(run, "disk full (53100)", broken)

    async def revoked(self, run: Run) -> int:
        """Revoke a privilege (42501)."""
        broken = self._altered([f"revoke insert on cards from {ROLE}"], [f"grant insert on cards to {ROLE}"])
        return await outage(run, "insert revoked (42501)", broken)

    async def renamed(self, run: Run) -> int:
        """Rename a column that only executors write (42703)."""
        rename = "alter table state.execution_edges rename column {} to {}"
        broken = self._altered([rename.format("metadata", "meta")], [rename.format("meta", "metadata")])
        return await outage(run, "column renamed (42703)", broken)

    async def promotion(self, run: Run) -> int:
        """Promote the standby and move the switch; the old primary stays up, read-only."""
        running, began = await run.running(), time.time()
        await execute(self.primary.dsn(), *_read_only("on"))
        since = time.time()
        await self._wait_for_replay()
        await execute(self.standby.dsn(), "select pg_promote()")
        self.primary, self.standby = self.standby, self.primary
        until = time.time()
        self.executors.move(self.primary.port, drop=False)
        self.kernel.move(self.primary.port, drop=True)
        run.journal.record(outage="promotion", began=began, since=since, until=until, over=time.time(), deliveries=None)
        return running

    async def _wait_for_replay(self) -> None:
        """Wait until the standby has replayed what the primary has written."""
        primary, standby = await asyncpg.connect(self.primary.dsn()), await asyncpg.connect(self.standby.dsn())
        try:
            written = await primary.fetchval("select pg_current_wal_flush_lsn()::text")
            replayed = "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
            while not await standby.fetchval(replayed, written):  # noqa: ASYNC110 - only the standby knows
                await asyncio.sleep(_POLL_S_FAILOVER)
        finally:
            await primary.close()
            await standby.close()

    @asynccontextmanager
    async def _altered(self, change: list[str], undo: list[str]) -> AsyncIterator[None]:
        """Change the primary's database and undo it, even while it is read-only by default."""
        dsn = f"{self.primary.dsn(DATABASE)}?default_transaction_read_only=off"
        await execute(dsn, *change)
        try:
            yield
        finally:
            await execute(dsn, *undo)


class FailoverHosts(Failover):
    """Executors know both servers by `target_session_attrs=read-write` instead of a switch."""

    def _executor_dsn(self) -> str:
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"{dsn_of(self.stack, DATABASE, at=hosts)}?target_session_attrs=read-write"

    def faults(self) -> Mapping[str, Fault]:
        return {name: fault for name, fault in super().faults().items() if name != "to_standby"}


def _read_only(value: str) -> list[str]:
    return [f"alter system set default_transaction_read_only = {value}", "select pg_reload_conf()"]


# PgBouncer in transaction mode between executors and PostgreSQL, with `postgres.prepared_statements` off.


_RESTART_S, _PAUSE_S = 1.0, 3.0


class Bouncer(Profile):
    """Executors use PgBouncer, whose pool is smaller than theirs; the kernel connects to PostgreSQL directly."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._bouncer: PgBouncer | None = None

    @property
    def bouncer(self) -> PgBouncer:
        if self._bouncer is None:
            raise AssertionError("the profile was not opened")
        return self._bouncer

    async def open(self, exits: AsyncExitStack) -> Addresses:
        if why := PgBouncer.missing():
            raise NotInstalled(why)
        self._bouncer = start_bouncer(self.stack)
        settings = {
            "PG_DSN": dsn_of(self.stack, DATABASE, at=f"127.0.0.1:{self.bouncer.port}"),
            "OPENAPI_TOOL__POSTGRES__PREPARED_STATEMENTS": "false",
        }
        addresses = await super().open(exits)
        return Addresses(addresses.dsn, addresses.nats_urls, settings)

    def faults(self) -> Mapping[str, Fault]:
        return {
            "restart": self.restart,
            "pause": self.pause,
            "kill_executor": faults.kill,
            "backends_ended": faults.end_backends,
            "long_pause": self.long_pause,
            "postgres_restart": faults.restart_postgres,
            "stopped": self.stopped,
        }

    async def restart(self, run: Run) -> int:
        """Restart PgBouncer after a second; the connections of its clients end."""
        return await outage(run, "PgBouncer restarted", self._stopped(), _RESTART_S)

    async def stopped(self, run: Run) -> int:
        """Stop PgBouncer for the length of an outage."""
        return await outage(run, "PgBouncer stopped", self._stopped())

    async def pause(self, run: Run) -> int:
        """Pause PgBouncer: statements wait, no connection ends."""
        return await outage(run, "PgBouncer paused shortly", self._paused(), _PAUSE_S)

    async def long_pause(self, run: Run) -> int:
        """Pause PgBouncer for longer than a statement may take."""
        return await outage(run, "PgBouncer paused", self._paused())

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.bouncer.stop)
        yield
        await asyncio.to_thread(self.bouncer.start)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        self.bouncer.signal(signal.SIGUSR1)
        yield
        self.bouncer.signal(signal.SIGUSR2)


def start_bouncer(stack: EmbeddedStack) -> PgBouncer:
    """Start a PgBouncer before the stack's PostgreSQL. Raises ServerFailed."""
    folder = stack.folder / "pgbouncer"
    folder.mkdir()
    bouncer = PgBouncer(folder, stack.guard, stack.postgres, [dsn_of(stack, DATABASE)])
    bouncer.start()
    return bouncer
