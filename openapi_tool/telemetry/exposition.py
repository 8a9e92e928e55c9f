"""The metrics in Prometheus' text format, together with those of the process and of Python."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import Metric as Exposed
from prometheus_client.registry import Collector

from openapi_tool.telemetry.instruments import Distribution, Metric
from openapi_tool.telemetry.metrics import ALL

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _Collector(Collector):
    """Converts the instruments when they are scraped; without `_created` series, which nothing here reads."""

    def collect(self) -> Iterator[Exposed]:
        return map(_exposed, ALL)


def _exposed(metric: Metric) -> Exposed:
    exposed = Exposed(metric.name, metric.text, metric.kind)
    for labels, child in metric.children():
        if isinstance(child, Distribution):
            _add_distribution(exposed, labels, child)
        else:
            exposed.add_sample(metric.name + ("_total" if metric.kind == "counter" else ""), labels, child.number)
    return exposed


def _add_distribution(exposed: Exposed, labels: dict[str, str], child: Distribution) -> None:
    bounds = [*map(str, child.bounds), "+Inf"]
    counts = list(accumulate(child.counts))
    for bound, count in zip(bounds, counts, strict=True):
        exposed.add_sample(f"{exposed.name}_bucket", {**labels, "le": bound}, count)
    exposed.add_sample(f"{exposed.name}_sum", labels, child.total)
    exposed.add_sample(f"{exposed.name}_count", labels, counts[-1])


REGISTRY.register(_Collector())


def exposition() -> bytes:
    """Return the text of /metrics; it takes milliseconds."""
    return generate_latest(REGISTRY)
