"""Find out, after a commit wrote nothing, whether the database would store any result at all.

The kernel's database belongs to others, who may add triggers and constraints to its tables. If one of these refuses
every result, an operator must act, and no command must be fetched until then. If only this result is refused, it is a
defect of one call.
"""

from __future__ import annotations

from dataclasses import replace

import asyncpg

from openapi_tool.kernel.postgres.commit import Mode, artifact_values
from openapi_tool.kernel.postgres.failures import ADMIT_RESULTS, kind_of, refusal_of
from openapi_tool.kernel.postgres.statements import Statements
from openapi_tool.protocol.cards import ResultCard, new_id, result_card
from openapi_tool.protocol.errors import NeedsOperator
from openapi_tool.protocol.report import Report

_TEST_ID = "openapi_tool"  # id of project, agent and turn, and name of the function, of a result that is only tried


async def require_writable(connection: asyncpg.Connection, statements: Statements, report: Report) -> None:
    """Raise NeedsOperator if the database refuses or discards the rows of any result, not only those of this one.

    Two small results are tried and rolled back. One is of another call of this agent, for a database that admits only
    projects that it knows. The other is of an agent and project that do not exist, for a database that refuses all
    results of this project.
    """
    refusals = []
    for project_id in (report.project_id, _TEST_ID):
        test_card, test_report = _test_result(report, project_id)
        refusals.append(await _refusal(connection, statements, test_card, test_report))
    if all(refusals):
        raise NeedsOperator(f"PostgreSQL: no result can be written: {refusals[0]}", ADMIT_RESULTS)


def _test_result(report: Report, project_id: str) -> tuple[ResultCard, Report]:
    """Return card and report of a small result like that of `report`, of a call that does not exist.

    In another project than that of `report`, agent and turn do not exist either.
    """
    identity = replace(report.acceptance.identity, tool_call_id=new_id("test_"))
    turn = report.acceptance.waiting_turn
    if project_id != report.project_id:
        identity = replace(identity, project_id=project_id, agent_id=project_id, agent_turn_id=project_id)
        turn = replace(turn, agent_turn_id=project_id)
    acceptance = replace(report.acceptance, identity=identity, waiting_turn=turn, request_edge_id=new_id("edge_"))
    card = result_card(
        actor_id=report.actor_id,
        function_name=_TEST_ID,
        identity=identity,
        call_card=None,
        status="success",
        after_execution="suspend",
        result="",
        error=None,
        tool_output=None,
    )
    return card, replace(report, acceptance=acceptance, inbox_id=new_id("inbox_"), edge_id=new_id("edge_"))


async def _refusal(connection: asyncpg.Connection, statements: Statements, card: ResultCard, report: Report) -> str:
    """Return why the database does not store a small result; empty if it does. Nothing stays stored."""
    values = *statements.report_values(card.card_id, report, Mode.TEST, None), card.content, card.metadata
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute("set constraints all immediate")  # else some are checked only at the end
        row = await connection.fetchrow(statements.COMMIT, *values, *artifact_values(None))
    except asyncpg.PostgresError as error:
        if kind_of(error.sqlstate) != "defect":
            raise
        return refusal_of(error)
    finally:
        await transaction.rollback()
    discarded: str = row["discarded"]  # tables of rows that were not stored
    if not discarded:
        return ""
    return f"the database discards new rows of {discarded}, as a trigger does that returns null"
