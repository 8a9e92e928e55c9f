"""Write the pictures of the documents: the dashboard's panels and the page, both from a run on the embedded stack.

`make pictures` takes two minutes. It needs Debian's packages prometheus, which evaluates the dashboard's own queries,
and chromium. The upstream fails for a while in the middle of the run, so that the panels show errors.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.dev import FALLBACKS
from openapi_tool.local.sample_arguments import SAMPLE_CALLS
from openapi_tool.local.sample_calls import demo_tools
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack, kernel_schema

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "helm" / "openapi-tool" / "files" / "dashboard.json"
OUT = ROOT / "docs" / "pictures"
MAX_BYTES = 150_000
PROJECT, AGENT, DATABASE = "proj_demo", "agent_demo", "pictures"
RUN_S, STORM_AT_S, STORM_S, PER_SECOND, STEP_S = 100, 45, 15, 8, 2
"""Length of the run, start and length of the upstream's failure, calls per second, seconds between points."""

_RATE_INTERVAL = "15s"
_COLUMNS = 4
_LABELS = {"namespace": "demo", "pod": "demo-openapi-tool-0"}
_UNNAMED = (*_LABELS, "__name__", "instance", "job")
_COLOURS = 48  # few, for small files
_BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000")
_STORM = {"statuses": [503, 429, 503] * 200, "retry_after": "0"}  # more statuses than the failure has requests


async def run() -> None:
    """Run the calls and write both pictures. Raises SystemExit if a program is missing or a picture is too large."""
    programs = [shutil.which(name) for name in ("prometheus", "chromium")]
    if None in programs:
        raise SystemExit("make pictures needs prometheus and chromium: apt-get install prometheus chromium")
    OUT.mkdir(exist_ok=True)
    port = free_port()
    with EmbeddedStack() as stack, _prometheus(str(programs[0]), port) as url:
        await prepare_database(stack.postgres.dsn(), DATABASE, kernel_schema())
        settings = {
            "OPENAPI_TOOL__HEALTH__PORT": str(port),
            "OPENAPI_TOOL__HEALTH__PAGE": "true",
            "OPENAPI_TOOL__TELEMETRY__PROJECTS": PROJECT,
        }
        executor = stack.executor("executor", DATABASE, settings)
        executor.start()
        began = time.time()
        await _load(stack)
        await asyncio.to_thread(_draw, url, began, time.time())
        await asyncio.to_thread(_photograph, str(programs[1]), f"http://127.0.0.1:{port}/")
        executor.stop()
    for picture in OUT.glob("*.png"):
        _reduce_colours(picture)
        if picture.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{picture} has more than {MAX_BYTES} bytes")


def _reduce_colours(picture: Path) -> None:
    image = import_module("PIL.Image").open(picture).convert("RGB").quantize(_COLOURS)
    image.save(picture, optimize=True)


async def _load(stack: EmbeddedStack) -> None:
    """Send calls at a steady rate; the upstream fails for a while."""
    rules: tuple[Mapping[str, Any], ...] = ({**FALLBACKS[0], "delay_s": 0.3}, {**FALLBACKS[1], "delay_s": 0.15})
    stack.upstream.rules(*rules)
    async with Caller.connect(stack.postgres.dsn(DATABASE), stack.nats.url) as caller:
        await caller.set_up_project(PROJECT, AGENT, demo_tools())
        for number in range(RUN_S * PER_SECOND):
            if number == STORM_AT_S * PER_SECOND:
                stack.upstream.rules(_STORM, *rules)
            if number == (STORM_AT_S + STORM_S) * PER_SECOND:
                stack.upstream.rules(*rules)
            tool, arguments = SAMPLE_CALLS["double"][number % 3]
            varied = arguments if number % 2 else _different(arguments, number)
            await caller.place(PROJECT, AGENT, tool, varied)
            await asyncio.sleep(1 / PER_SECOND)


def _different(arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return arguments that no call had before, so that no response is cached."""
    return {name: f"{value} {number}" if name == "query" else value for name, value in arguments.items()}


@contextmanager
def _prometheus(program: str, target: int) -> Iterator[str]:
    """Run Prometheus, which scrapes the executor once a second; yields its URL."""
    port = free_port()
    with TemporaryDirectory() as folder:
        scrape = {
            "job_name": "openapi-tool",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": _LABELS}],
        }
        config = Path(folder, "prometheus.json")  # JSON is YAML
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        listen = f"--web.listen-address=127.0.0.1:{port}"
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", listen]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _series(url: str, query: str, began: float, ended: float) -> list[dict[str, Any]]:
    for name, value in (("$__rate_interval", _RATE_INTERVAL), ("$namespace", _LABELS["namespace"])):
        query = query.replace(name, value)
    parameters = urllib.parse.urlencode({"query": query, "start": began, "end": ended, "step": STEP_S})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{parameters}", timeout=30) as answer:  # noqa: S310 - on loopback
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def _draw(url: str, began: float, ended: float) -> None:
    """Draw every panel of the dashboard."""
    plt = import_module("matplotlib.pyplot")  # only the extra has it
    plt.switch_backend("Agg")
    panels = [panel for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"] if "targets" in panel]
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, grid = plt.subplots(rows, _COLUMNS, figsize=(4 * _COLUMNS, 1.9 * rows), sharex=True, layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_title(panel["title"], fontsize=8)
        axes.tick_params(labelsize=6)
        for target in panel["targets"]:
            _draw_series(axes, _series(url, target["expr"], began, ended), began)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=5, loc="upper left", framealpha=0.6)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    figure.savefig(OUT / "dashboard.png", dpi=90)


def _draw_series(axes: Any, result: list[dict[str, Any]], began: float) -> None:
    for series in result:
        points = [(at - began, float(value)) for at, value in series["values"] if value != "NaN"]
        named = [value for name, value in series["metric"].items() if name not in _UNNAMED]
        if points:
            axes.plot(*zip(*points, strict=True), linewidth=0.9, label=", ".join(named) or None)


def _photograph(program: str, url: str) -> None:
    """Take a screenshot of the page."""
    with TemporaryDirectory() as folder:
        options = [f"--user-data-dir={folder}", f"--screenshot={OUT / 'page.png'}", "--window-size=1000,1650"]
        subprocess.run([program, *_BROWSER, *options, url], check=True, capture_output=True, timeout=120)  # noqa: S603


if __name__ == "__main__":
    sys.stdout.write("two minutes\n")
    asyncio.run(run())
