"""Many large pages at once in one executor: its memory stays within the limit, and all calls get results."""

from __future__ import annotations

from pathlib import Path

from openapi_tool.jina.byte_semaphore import max_call_memory
from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from tests.conftest import AGENT, PROJECT, StartExecutor, reader_tool
from tests.requirements import requirement
from tests.support import memory_limit

CALLS, PAGE_BYTES, MAX_BYTES = 64, 1_800_000, 2_000_000
BUDGET_BYTES = max_call_memory(MAX_BYTES) + MAX_BYTES
CONCURRENCY, CACHE_BYTES = 64, 4_000_000


@requirement("memory.limit")
async def test_many_large_pages_at_once_are_answered_within_the_limit(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    """64 pages of four bytes a character: `pages_of_ten_megabytes_at_once` of the hostile suite."""
    stack.upstream.rules({"answer": "r-post-json", "body_bytes": PAGE_BYTES})
    await caller.add_tool(PROJECT, reader_tool(suspend_timeout_seconds=100))
    executor = start_executor(
        {
            "OPENAPI_TOOL__EGRESS__MAX_RESPONSE_BYTES": str(MAX_BYTES),
            "OPENAPI_TOOL__EGRESS__BODY_BUDGET_BYTES": str(BUDGET_BYTES),
            "OPENAPI_TOOL__CACHE__TTL_S": "60",
        }
    )
    addresses = [f"https://a.example/{number}" for number in range(CALLS)]
    calls = [
        await caller.place(PROJECT, AGENT, "jina_reader", {"url": address}, suffix="read", publish=False)
        for address in addresses
    ]
    for call in calls:
        await caller.publish(call)
    for call in calls:
        assert (await caller.result(call, 90)).card["content"]["status"] == "success"
    limit = memory_limit(BUDGET_BYTES + CACHE_BYTES, CONCURRENCY)
    assert _peak_bytes(executor.process.pid) < limit


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
