"""`make bench`: print the cost of a call as a table, plots in benchmarks/out, and a JSON object on the last line."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvloop

from benchmarks.calls import Ask
from benchmarks.double import unique_query
from benchmarks.harness import Harness
from benchmarks.load import Load
from benchmarks.report import plot, show
from benchmarks.rounds import Rounds, ScenarioResult, as_json
from benchmarks.scenarios import DEFAULT_RUNS, PROFILES, Profile, Scenario
from benchmarks.without import PARTS

OUT = Path(__file__).parent / "out"
_ECHO_CALLS = 8_000
_IDLE_S = 10.0
_CONNECTIONS, _REQUESTS = 32, 8_000
_SIZE = 2_000
_HOST = "s.jina.ai"


async def bench(
    scenarios: Sequence[Scenario],
    runs: int,
    *,
    extras: bool,
    without: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[ScenarioResult], dict[str, Any]]:
    """Measure scenarios one after the other; with `extras` also the limits of the benchmark, and SQL statements.

    `settings` are variables of the executors, which the floor does not read.
    """
    async with Harness(without, settings) as harness, Load.connect(harness.nats.url) as load:
        database = await harness.database()
        rounds = Rounds(harness, load, database)
        results, more = [], {}
        try:
            if extras:
                more = await _extras(harness, rounds)
            for number, scenario in enumerate(scenarios, start=1):
                _print_status(f"{number}/{len(scenarios)} {scenario.name}")
                results.append(await rounds.scenario(scenario, runs))
        finally:
            await database.close()
    return results, more


async def _extras(harness: Harness, rounds: Rounds) -> dict[str, Any]:
    _print_status("limits of load generator and double, cost of idling, SQL statements per call")
    echo = await rounds.echo(_ECHO_CALLS)
    return {
        "load_limit_calls_per_s": round(echo["calls_per_s"]),
        "double_limit_requests_per_s": round(await double_limit(harness)),
        "idle_per_s": {name: round(value, 2) for name, value in (await rounds.idle(_IDLE_S)).items()},
        "sql_statements": {tool: round(await rounds.statements(Ask(tool)), 2) for tool in ("search", "reader")},
    }


def _print_status(text: str) -> None:
    sys.stderr.write(text + "\n")


def _chosen(profile: Profile, only: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of a profile, or the named ones of any profile. Exits on an unknown name."""
    if not only:
        return list(PROFILES[profile])
    known = {scenario.name: scenario for scenario in (*PROFILES["full"], *PROFILES[profile])}
    if unknown := set(only) - known.keys():
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [known[name] for name in only]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="standard", help="which scenarios")
    parser.add_argument("--runs", type=int, help="rounds of floor and executor; medians are shown")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these scenarios, of any profile")
    parser.add_argument("--without", choices=tuple(PARTS), help="disable a part of the executor")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="VARIABLE=VALUE",
        help="variable of the executors, such as OPENAPI_TOOL__POSTGRES__POOL_SIZE=4",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object to a file, too")
    return parser.parse_args()


def main() -> None:
    """Measure, show, plot, and end with the JSON object."""
    arguments = _arguments()
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    scenarios = _chosen(arguments.profile, arguments.only)
    runs = arguments.runs or DEFAULT_RUNS[arguments.profile]
    quick = arguments.profile == "quick"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        extras = not quick and not arguments.only
        settings = dict(setting.split("=", 1) for setting in arguments.setting)
        measuring = bench(scenarios, runs, extras=extras, without=arguments.without, settings=settings)
        results, more = runner.run(measuring)
    result = {
        "profile": arguments.profile,
        "without": arguments.without,
        "settings": settings,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **more,
        "scenarios": {scenario.scenario.name: as_json(scenario) for scenario in results},
    }
    show(results, more)
    if not quick:
        plot(results, OUT)
    line = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")


class _Client(asyncio.Protocol):
    """Sends the next request as soon as a response is complete."""

    def __init__(self, sent: list[int], done: asyncio.Event) -> None:
        self._sent = sent
        self._done = done
        self._request = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._sent[0] += 1
        query = unique_query(0, _SIZE, self._sent[0])
        self._transport.write(f"GET /?q={query} HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head = data.index(b"\r\n\r\n") + 4
            self._left = head + int(data[:head].rpartition(b"Content-Length: ")[2])
        self._left -= len(data)
        if self._left:
            return
        if self._sent[0] < _REQUESTS:
            self._send()
        else:
            self._transport.close()
            self._done.set()


async def double_limit(harness: Harness) -> float:
    """Return the limit of the double in requests per second, over several connections of a minimal client."""
    tls = ssl.create_default_context(cafile=harness.stack.certificates.ca)
    loop, sent, done = asyncio.get_running_loop(), [0], asyncio.Event()
    began = time.perf_counter()
    clients = [
        loop.create_connection(
            lambda: _Client(sent, done), "127.0.0.1", harness.upstream_port, ssl=tls, server_hostname=_HOST
        )
        for _ in range(_CONNECTIONS)
    ]
    opened = await asyncio.gather(*clients)
    await done.wait()
    seconds = time.perf_counter() - began
    for transport, _ in opened:
        transport.abort()
    return _REQUESTS / seconds


if __name__ == "__main__":
    main()
