"""Statistics of all replicas of a kernel's executor, or of all processes of a gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openapi_tool.cli import gateway, kernel

if TYPE_CHECKING:
    from rich.console import RenderableType


def show_statistics_of(
    state: Path | None,
    draw: Callable[[kernel.Replicas], RenderableType],
    select: Callable[[kernel.Replicas], Any],
    *,
    as_json: bool,
    every_s: float | None = None,
    gateway_lacks: str = "",
) -> None:
    """Draw the statistics, once or every `every_s` seconds, or print what `select` returns as JSON.

    `gateway_lacks` says what is shown only of an executor; it is printed for a gateway.
    """
    if (path := gateway.selected_file(state)) is not None:
        gateway.show_statistics(path, draw, select, as_json=as_json, every_s=every_s, lacks=gateway_lacks)
    else:
        kernel.show_statistics(draw, select, as_json=as_json, every_s=every_s)
