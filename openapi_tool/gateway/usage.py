"""What calls of a gateway have cost, from their rows in the state file."""

from __future__ import annotations

from typing import Any

from openapi_tool.state.sqlite import StateFile

FIGURES = {
    "calls": "count(*)",
    "tokens": "sum(tokens)",
    "requests": "sum(requests)",
    "cache_hits": "sum(cached)",
    "errors": "sum(error IS NOT NULL)",
    "truncated": "sum(truncated)",
    "retries": "sum(retries)",
}
"""Name of each figure, and its SQL over the rows of the table `calls`."""

COLUMNS = ", ".join(f"{sql} AS {name}" for name, sql in FIGURES.items())


async def usage_by_tool(state: StateFile, project: str, agent: str, since: float) -> list[dict[str, Any]]:
    """Return the figures of an agent's calls since a time, by tool, the most expensive first. Raises Unavailable."""
    query = (
        f"SELECT tool, {COLUMNS} FROM calls WHERE project = ? AND agent = ? AND at >= ? "  # noqa: S608 - constants
        "GROUP BY tool ORDER BY sum(tokens) DESC, tool"
    )
    names = ("tool", *FIGURES)
    return [dict(zip(names, row, strict=True)) for row in await state.read(query, (project, agent, since))]
