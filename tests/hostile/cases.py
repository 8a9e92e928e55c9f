"""All cases by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.hostile import answers, arguments, definitions, health, keys, rows, shares, terminal, wire
from tests.hostile.case import Case

CASES: Mapping[str, Case] = {
    **wire.CASES,
    **definitions.CASES,
    **keys.CASES,
    **arguments.CASES,
    **answers.CASES,
    **health.CASES,
    **terminal.CASES,
    **rows.CASES,
    **shares.CASES,
}
