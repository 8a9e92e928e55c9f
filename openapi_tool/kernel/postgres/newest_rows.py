"""How many of the newest rows are searched where no index finds the one row."""

from __future__ import annotations

NEWEST_ROWS = 1_000
"""Rows that are searched where no index finds the one row: an agent's inbox, the results of a step."""

TURN_ROWS = 200
"""Newest rows of an agent's inbox, among which those of a turn are searched."""
