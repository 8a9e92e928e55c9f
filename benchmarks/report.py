"""Figures as a table and as plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from benchmarks.rounds import ScenarioResult

COLUMNS = {
    "calls_per_s": ("calls/s", 0),
    "cpu_ms": ("CPU ms", 2),
    "added_p50_ms": ("added p50", 1),
    "added_p95_ms": ("p95", 1),
    "added_p99_ms": ("p99", 1),
    "added_max_ms": ("max ms", 0),
    "rss_mb": ("RSS MB", 0),
    "nats_sent": ("NATS sent", 2),
    "nats_received": ("received", 2),
    "connections": ("upstream conn.", 2),
    "load_cpu_ms": ("load CPU", 2),
    "double_cpu_ms": ("double CPU", 2),
    "nats_cpu_ms": ("NATS CPU", 2),
    "postgres_cpu_ms": ("PG CPU", 2),
}
_RATIOS = ("calls_per_s", "cpu_ms", "added_p50_ms", "added_p95_ms", "added_p99_ms", "rss_mb", "nats_sent")
_PLOTS = {
    "cpu_ms": "CPU per call (ms)",
    "calls_per_s": "calls per second",
    "added_p99_ms": "added latency, p99 (ms)",
    "rss_mb": "resident memory (MB)",
}
_BAR, _LABELS, _WIDTH = 14, 210, 760
_COLOURS = {"floor": "#8fb3d9", "executor": "#d9822b"}


def show(results: Sequence[ScenarioResult], more: Mapping[str, Any]) -> None:
    """Print the table: floor, executor and their ratio for each scenario, medians over all rounds."""
    table = Table(title="medians over rounds; per call")
    table.add_column("scenario", no_wrap=True)
    table.add_column("")
    for title, _ in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        for kind in result.rounds:
            table.add_row(result.scenario.name, kind, *_cells(result.medians(kind), COLUMNS))
        if ratios := result.ratios():
            table.add_row("", "ratio", *_cells(ratios, _RATIOS, 2), end_section=True)
    console = Console(width=200)
    console.print(table)
    for name, value in more.items():
        console.print(f"{name}: {value}")


def _cells(figures: Mapping[str, float], names: Iterable[str], places: int | None = None) -> list[str]:
    """Return a cell for each column, empty for a figure that is not requested or missing."""
    shown = figures.keys() & set(names)
    return [
        f"{figures[name]:.{default_places if places is None else places}f}" if name in shown else ""
        for name, (_, default_places) in COLUMNS.items()
    ]


def plot(results: Sequence[ScenarioResult], folder: Path) -> None:
    """Write one SVG file with bars for each figure."""
    folder.mkdir(exist_ok=True)
    for name, title in _PLOTS.items():
        bars = [
            (f"{result.scenario.name} ({kind})", kind, result.medians(kind)[name])
            for result in results
            for kind in result.rounds
        ]
        (folder / f"{name}.svg").write_text(_bars(title, bars), encoding="utf-8")


def _bars(title: str, bars: Sequence[tuple[str, str, float]]) -> str:
    height = (len(bars) + 2) * (_BAR + 4)
    largest = max([value for _, _, value in bars] + [1e-9])
    rows = [
        row
        for number, (label, kind, value) in enumerate(bars, start=1)
        for row in _bar(number * (_BAR + 4), label, kind, value, max(value, 0) / largest)
    ]
    size = f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    heading = f'<text x="4" y="{_BAR}" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, heading, *rows, "</svg>\n"])


def _bar(top: int, label: str, kind: str, value: float, share: float) -> list[str]:
    width = max(1, round(share * (_WIDTH - _LABELS - 70)))
    base = top + _BAR - 3
    return [
        f'<text x="{_LABELS - 6}" y="{base}" text-anchor="end">{escape(label)}</text>',
        f'<rect x="{_LABELS}" y="{top}" width="{width}" height="{_BAR}" fill="{_COLOURS[kind]}"/>',
        f'<text x="{_LABELS + width + 4}" y="{base}">{value:.2f}</text>',
    ]
