"""Benchmark of the export of spans: its collectors hang and drop as intended, and every kind is measured."""

from __future__ import annotations

import socket

import pytest

from benchmarks.collector import black_hole, hanging
from benchmarks.otlp import KINDS, Measured, holds, measure, summary
from benchmarks.windows import Figures, median_interval
from tests.requirements import requirement


@requirement("performance")
def test_a_black_hole_takes_no_connection_and_a_hanging_collector_never_answers() -> None:
    with black_hole() as port, pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.5)
    with hanging() as port, socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(0.2)
        connection.sendall(b"POST /v1/traces HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)


@requirement("performance")
def test_the_interval_holds_the_median_with_at_least_95_percent() -> None:
    assert median_interval(list(range(10))) == (1, 8)
    assert median_interval(list(range(12))) == (2, 9)
    assert median_interval([2, 1, 3]) == (1, 3), "too few for 95 %, so all of them"


@requirement("performance")
def test_limits_are_compared_with_the_rounds() -> None:
    even = {"calls_per_s": 100.0, "p99_ms": 50.0, "cpu_ms": 1.0, "rss_mb": 100.0}
    changes = {"calls_per_s": 94.0, "p99_ms": 63.0, "rss_mb": 131.0}
    assert set(holds(_measured(dict.fromkeys(KINDS, even))).values()) == {True}
    for figure, value in changes.items():
        bad = {**dict.fromkeys(KINDS, even), "hanging": {**even, figure: value}}
        assert [kind for kind, ok in holds(_measured(bad)).items() if not ok] == ["hanging"], figure
    expensive = {
        **dict.fromkeys(KINDS, even),
        "unsampled": {**even, "cpu_ms": 1.04},
        "sampled": {**even, "cpu_ms": 1.21},
    }
    assert [kind for kind, ok in holds(_measured(expensive)).items() if not ok] == ["unsampled", "sampled"]


def _measured(a_round: dict[str, Figures]) -> Measured:
    return Measured({}, [a_round] * 10, [a_round] * 10)


@pytest.mark.alone
@requirement("performance", "traces")
async def test_every_kind_is_measured() -> None:
    result = summary(await measure(1, 40, warm=40))
    kinds = result["kinds"]
    assert isinstance(kinds, dict)
    assert list(kinds) == list(KINDS)
    assert all(kind["calls_per_s"] > 0 for kind in kinds.values())
    assert all(kinds[kind]["cpu_ms"] > 0 for kind in ("off", "unsampled", "sampled"))
