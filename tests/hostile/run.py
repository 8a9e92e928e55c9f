"""`make hostile`: measure how each attack affects another project, the victim.

The victim sends requests that take 250 ms upstream, first alone, then during the attack, which is repeated. Its 99th
percentile may grow by at most 250 ms, an iteration of the event loop may take at most 50 ms, no call may be lost, and
the executor must stay within its limits. The last line printed is one JSON object; the exit code is 0 only if every
case passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from openapi_tool.local.placed_call import VERSION
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.protocol.dialect import ProtocolVersion
from tests.hostile.case import Case
from tests.hostile.play import CASES, CaseResult, attacking, broken_limits, make_world, play, replace_executor
from tests.hostile.scene import Stage
from tests.hostile.victim import Pace
from tests.hostile.wire import LARGE_BYTES, LARGE_COMMANDS
from tests.support import make_role

DATABASE = "hostile"
UPSTREAM_MS, MARGIN_MS, MAX_LAG_MS = 250, 250.0, 50.0
MAX_ROUNDS = 200
_SCRATCH = "hostile_scratch"
_WIDTHS = (58, 5, 9, 9, 9, 9, 8, 8, 7)
_COLUMNS = ("case", "item", "p50 alone", "p99 alone", "p50", "p99", "MB", "lag ms", "rounds")


@dataclass(slots=True)
class Measured:
    """Result of a case: the victim's latencies without and during the attack in ms, and the executor's vital signs."""

    item: str
    alone_p50_ms: float = 0.0
    alone_p99_ms: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    peak_mb: float = 0.0
    lag_ms: float = 0.0
    log_kb: float = 0.0
    lost: int = 0
    rounds: int = 0
    wrong: list[str] = field(default_factory=list)


async def _nothing(_: object) -> None:
    """No attack."""


QUIET = Case("quiet", "", _nothing, dict, sys.maxsize, float("inf"), sys.maxsize, float("inf"))


async def measure(case: Case, stage: Stage, pace: Pace) -> Measured:
    """Run the victim alone, then during the attack."""
    found = Measured(case.item)
    found.alone_p50_ms, found.alone_p99_ms = _percentiles(await play(QUIET, stage, pace))
    try:
        await _use_memory(stage)
        result = await play(case, stage, pace, MAX_ROUNDS)
    except (AssertionError, OSError, ValueError, TimeoutError) as error:
        found.wrong.append(f"{type(error).__name__}: {str(error)[:300]}")
        return found
    found.p50_ms, found.p99_ms = _percentiles(result)
    found.peak_mb, found.lag_ms = round(result.vitals.peak_bytes / 1e6, 1), round(result.vitals.lag_s * 1000, 1)
    found.log_kb, found.lost = round(result.vitals.log_bytes / 1e3, 1), len(result.outcomes.lost)
    found.rounds = result.rounds
    found.wrong += broken_limits(case, result)
    if found.lag_ms > MAX_LAG_MS:
        found.wrong.append(f"an iteration of the event loop took more than {MAX_LAG_MS:.0f} ms")
    if found.p99_ms > found.alone_p99_ms + MARGIN_MS:
        found.wrong.append(f"the victim's p99 grew by more than {MARGIN_MS:.0f} ms")
    return found


async def _use_memory(stage: Stage) -> None:
    """Store and delete 71 MB in NATS: a virtual machine gets memory slowly from its host; do not measure that."""
    async with attacking(stage) as scene:
        jetstream = scene.caller.client.jetstream()
        await jetstream.add_stream(name=_SCRATCH, subjects=[_SCRATCH])
        for _ in range(LARGE_COMMANDS):
            await scene.caller.client.publish(_SCRATCH, bytes(LARGE_BYTES))
            await scene.caller.client.flush()
        await jetstream.delete_stream(_SCRATCH)


def _percentiles(result: CaseResult) -> tuple[float, float]:
    """Return median and 99th percentile in ms."""
    latencies = [latency * 1000 for latency in result.outcomes.latencies_s] or [0.0, 0.0]
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return round(cuts[49], 1), round(cuts[98], 1)


def _row(cells: Iterable[object]) -> str:
    texts = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    first, *others = zip(texts, _WIDTHS, strict=True)
    return f"{first[0]:<{first[1]}}" + " ".join(f"{text:>{width}}" for text, width in others) + "\n"


async def _measured(cases: Sequence[Case], pace: Pace, version: str) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    with EmbeddedStack() as stack:
        await make_world(stack, DATABASE, None, kernel_schema(version), version)
        await make_role(stack.postgres.dsn(DATABASE))
        with Stage(stack, DATABASE, version=version) as stage:
            sys.stdout.write(_row(_COLUMNS))
            for case in cases:
                one = found[case.name] = await measure(case, stage, pace)
                _print_row(case.name, one)
                if one.wrong:
                    await replace_executor(stage)
    return found


def _print_row(name: str, one: Measured) -> None:
    cells = (one.alone_p50_ms, one.alone_p99_ms, one.p50_ms, one.p99_ms, one.peak_mb, one.lag_ms, one.rounds)
    sys.stdout.write(_row((name, one.item, *cells)))
    sys.stdout.writelines(f"    {text}\n" for text in one.wrong)
    sys.stdout.flush()


def main() -> int:
    """Measure the chosen cases; return 1 if one breaks a limit."""
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--only", action="append", default=[], help="only cases with this item, or with this text in the name"
    )
    parser.add_argument("--calls", type=int, default=60, help="the victim's calls, alone and beside each attack")
    parser.add_argument("--per-second", type=float, default=20.0, help="the victim's calls a second")
    parser.add_argument(
        "--protocol", choices=list(ProtocolVersion), default=VERSION, help="protocol version of the kernel"
    )
    options = parser.parse_args()
    cases = [case for case in CASES.values() if options.protocol in case.versions]
    chosen = [case for case in cases if not options.only or any(_is_named(case, word) for word in options.only)]
    pace = Pace(1 / options.per_second, options.calls, UPSTREAM_MS)
    found = asyncio.run(_measured(chosen, pace, options.protocol))
    failed = {name: one.wrong for name, one in found.items() if one.wrong}
    figures = {name: asdict(one) for name, one in found.items()}
    sys.stdout.write(json.dumps({"cases": len(found), "failed": sorted(failed), "figures": figures}) + "\n")
    return int(bool(failed) or not found)


def _is_named(case: Case, word: str) -> bool:
    return word == case.item or word in case.name


if __name__ == "__main__":
    sys.exit(main())
