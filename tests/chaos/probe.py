"""Asks `/readyz` of every replica all the time and writes each answer into the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from tests.chaos.harness import Replica
from tests.chaos.load import Journal

EVERY_S = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=1.0)


async def probe(replicas: Sequence[Replica], journal: Journal) -> None:
    """Probe until cancelled."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, asyncio.TaskGroup() as group:
        for number, replica in enumerate(replicas):
            group.create_task(_probe_one(session, number, replica.port, journal))


async def _probe_one(session: aiohttp.ClientSession, number: int, port: int, journal: Journal) -> None:
    while True:
        at = time.time()
        ready, why = await _ask(session, f"http://127.0.0.1:{port}/readyz")
        journal.note(probe=number, at=at, ready=ready, why=why)
        await asyncio.sleep(max(0.0, at + EVERY_S - time.time()))


async def _ask(session: aiohttp.ClientSession, url: str) -> tuple[bool, str]:
    """The status of an answer, and its text where it is not ready; a process that does not answer is not ready."""
    try:
        async with session.get(url) as answer:
            return answer.ok, "" if answer.ok else await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        return False, type(error).__name__
