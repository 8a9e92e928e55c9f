"""How many rows are searched where the kernel's tables have no index that finds the wanted row.

The limits bound the cost of a query, however many rows a hostile project has written.
"""

from __future__ import annotations

NEWEST_ROWS = 1_000
"""Rows of an agent's inbox, newest first, in which a turn's row is searched; results of a step, for the newest one."""

TURN_ROWS = 200
"""Newest rows of an agent's inbox in which the unread results and commands of a turn are searched."""
