"""Retries with pauses."""

from __future__ import annotations

from tenacity import wait_none

from openapi_tool.concurrency.retries import retried
from tests.requirements import requirement


@requirement("answer.doorbell")
async def test_an_attempt_that_a_lambda_returns_is_awaited_and_repeated() -> None:
    attempts: list[str] = []

    async def publish(name: str) -> str:
        attempts.append(name)
        if len(attempts) == 1:
            raise OSError
        return name

    assert await retried(lambda: publish("a"), on=OSError, wait=wait_none()) == "a"
    assert attempts == ["a", "a"]
