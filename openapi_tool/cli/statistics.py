"""Statistics of all replicas of a kernel's executor, or of all processes of a gateway.

Replicas answer over NATS; so do processes of a gateway whose state is in NATS. Other processes of a gateway write into
their state file. Each reports its statistics as one JSON object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.gateway_state import with_state
from openapi_tool.cli.nats_connection import ask_replicas, with_nats
from openapi_tool.cli.output import fail, print_json, print_status
from openapi_tool.cli.selection import selected_state
from openapi_tool.cli.tables import output, redraw
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.operator import ask_statistics
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.state.sqlite import StateFile

if TYPE_CHECKING:
    from rich.console import RenderableType

Statistics = Sequence[Mapping[str, Any]]
"""The statistics of each replica, or of each process of a gateway."""

_NOBODY_ANSWERS = 1
_REPLIES_S = 1.0
_WITHOUT_NATS = (
    "replicas are asked over NATS, so this says nothing about them; "
    "a kernel's commands wait in NATS meanwhile, a gateway's calls go on"
)


def show_statistics(
    state: Path | None,
    *,
    draw: Callable[[Statistics], RenderableType],
    as_object: Callable[[Statistics], Any],
    as_json: bool,
    every_s: float | None = None,
    remark_on_gateway: str = "",
) -> None:
    """Draw the statistics, once or every `every_s` seconds, or print what `as_object` returns as JSON.

    `remark_on_gateway` says what a gateway's statistics lack; it is printed before they are drawn.
    """
    view = _View(draw, as_object, as_json, every_s)
    path = selected_state(state)
    if path is None or path == NATS:
        _show_replicas(view, is_gateway=path is not None)
    else:
        _show_gateway(path, view, remark_on_gateway)


@dataclass(frozen=True, slots=True)
class _View:
    """What to show of statistics, and how."""

    draw: Callable[[Statistics], RenderableType]
    as_object: Callable[[Statistics], Any]
    as_json: bool
    every_s: float | None

    async def show(self, first: Statistics, ask: Callable[[], Awaitable[Statistics]]) -> None:
        """Show the first answers, and what `ask` returns later if the view is to be updated."""

        async def drawn_again() -> RenderableType:
            return self.draw(await ask())

        if self.as_json:
            print_json(self.as_object(first))
        elif self.every_s is None:
            output().print(self.draw(first))
        else:
            await redraw(output(), self.draw(first), drawn_again, self.every_s)


def _show_replicas(view: _View, *, is_gateway: bool) -> None:
    where_else = ask_replicas(is_gateway=is_gateway)

    async def work(bootstrap: Bootstrap, client: BusClient) -> None:
        ask = partial(gather_stats, client, _REPLIES_S, bootstrap.version)
        replicas = await ask()
        if not replicas:
            fail(
                "no replica answers on openapi_tool.stats: none runs, none has a connection to NATS, or its user lacks "
                f"permission\n{where_else}",
                _NOBODY_ANSWERS,
            )
        await view.show(replicas, ask)

    # `top`, `limits` and `budgets` need the same permissions.
    with_nats(work, user=NatsUser.TOP, advice=f"{_WITHOUT_NATS}\n{where_else}")


def _show_gateway(path: Path, view: _View, remark: str) -> None:
    async def work(state: StateFile) -> None:
        processes = await ask_statistics(state)
        if not processes:
            fail(f"{path}: no process of this gateway runs; usage shows what its calls have cost", _NOBODY_ANSWERS)
        if remark and not view.as_json:
            print_status(remark)
        await view.show(processes, partial(ask_statistics, state))

    with_state(path, work)
