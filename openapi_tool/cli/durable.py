"""`openapi-tool nats durable`: the durable, and its hand-over to the kernel's executor.

The *durable* is JetStream's record of which commands are delivered and acknowledged. The kernel's own executor needs
other settings of it than `serve`.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.dev_choice import say_dev_in_use
from openapi_tool.cli.kernel import names_database, result_lookup
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import USAGE, fail, print_json, print_line, print_status
from openapi_tool.kernel.jetstream.durable import DurableMissing
from openapi_tool.kernel.jetstream.handover import HandOver, StillPulled, durable_shown, hand_to_kernel
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser

_REFUSED = 1


def durable(*, restore: bool, as_json: bool) -> None:
    """Print the durable consumer, or restore it for the kernel's own executor."""
    say_dev_in_use()
    done = with_nats(partial(_show_or_restore, restore=restore), user=NatsUser.DURABLE)
    commands_were_checked = done.acknowledged is not None
    if restore and not commands_were_checked and done.before.unacknowledged:
        print_status(
            f"openapi-tool: PG_DSN is not set, so none of {done.before.unacknowledged} unacknowledged commands was "
            "checked: the kernel's executor fails on those that have a result already, up to three times for 30 s each"
        )
    before, after = asdict(done.before), asdict(done.after)
    if as_json and restore:
        print_json({"before": before, "after": after, "acknowledged": done.acknowledged})
        return
    if as_json:
        print_json(after)
        return
    for name, value in after.items():
        was = f" (was {before[name]})" if before[name] != value else ""
        print_line(f"{name}: {value}{was}")
    if done.acknowledged is not None:
        print_line(f"acknowledged, as they have a result: {done.acknowledged}")


async def _show_or_restore(bootstrap: Bootstrap, client: BusClient, *, restore: bool) -> HandOver:
    try:
        if restore:
            return await _restore(bootstrap, client)
        state = await durable_shown(client, bootstrap.durable)
    except StillPulled as refusal:
        fail(f"{refusal}: stop every replica of the executor first, then try again", _REFUSED)
    except DurableMissing as missing:
        fail(f"{missing}: no executor has used it yet, or nats.durable names another", USAGE)
    return HandOver(state, state, None)


async def _restore(bootstrap: Bootstrap, client: BusClient) -> HandOver:
    if not names_database(bootstrap):
        return await hand_to_kernel(client, bootstrap.durable, None)
    async with result_lookup(bootstrap) as has_result:
        return await hand_to_kernel(client, bootstrap.durable, has_result)
