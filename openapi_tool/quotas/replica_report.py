"""What a replica reports in the shared record of a limit: that it runs, and which calls wait at it.

By the reports, replicas leave the turn to calls elsewhere that have waited longer (`replica_turns`). No I/O.
"""

from __future__ import annotations

import math

from openapi_tool.fair_queue import FairQueue, project_key
from openapi_tool.quotas.key_group import WaitingCall
from openapi_tool.quotas.limit_record import MAX_REPLICAS, LimitRecord, Replica, ReportedCalls

REPORT_S = 20.0  # between reports of a replica at which nothing waits; the record drops it after REPLICA_S = 60 s
_WAITING_REPORT_S = 1.0  # the same while calls wait at it: less than half of WAITING_S, for which they count
_NEWS_REPORT_S = 0.2  # the same while others do not know yet what waits at it
_MAX_PROJECTS = 20  # in the report of one replica; fewer if there are more than 50 replicas


def report(record: LimitRecord, replica: str, queue: FairQueue[WaitingCall], now: float, *, is_written: bool) -> bool:
    """Put the report of this replica into the record if it is due, or if the record is written anyway.

    Return whether the record must be written.
    """
    before = record.replicas.get(replica)
    waiting = _first_projects(queue, record)
    if not is_written and not _is_due(record, replica, waiting, now):
        return False
    counted = 0.0 if before is None else before.counted
    record.replicas[replica] = Replica(seen=round(now, 3), waiting=waiting, counted=counted)
    return True


def _first_projects(queue: FairQueue[WaitingCall], record: LimitRecord) -> dict[str, ReportedCalls]:
    """Return the projects that wait here by their short names, those whose turn is next first."""
    counts = queue.counts()
    by_turn = sorted(counts, key=lambda project: record.turns.start(project_key(project)))
    # The size of the record is limited: all replicas together report about as many projects as there may be replicas.
    part = MAX_REPLICAS // max(1, len(record.replicas))
    most = max(1, min(_MAX_PROJECTS, part))
    return {
        project_key(project): ReportedCalls(counts[project], queue.first(project).since) for project in by_turn[:most]
    }


def _is_due(record: LimitRecord, replica: str, waiting: dict[str, ReportedCalls], now: float) -> bool:
    """Return whether a report is due, if the record is not written for another reason.

    A replica that is alone reports seldom: nobody else reads what waits there.
    """
    last = record.replicas.get(replica)
    age_s = math.inf if last is None else now - last.seen
    reported = {} if last is None else last.waiting
    has_others = any(name != replica for name in record.replicas)
    if age_s >= REPORT_S:
        return True
    if _is_news(waiting, reported) and (has_others or reported):
        return age_s >= _NEWS_REPORT_S
    return has_others and bool(waiting) and age_s >= _WAITING_REPORT_S


def _is_news(waiting: dict[str, ReportedCalls], reported: dict[str, ReportedCalls]) -> bool:
    """Return whether other projects wait, or another call is the next one of a project; the numbers do not matter."""
    if waiting.keys() != reported.keys():
        return True
    return any(calls.since != reported[project].since for project, calls in waiting.items())
