"""Export over OTLP of the metrics that /metrics shows; imported only if an endpoint is configured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from openapi_tool import __version__
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import ALL, Distribution, Value
from openapi_tool.telemetry.otlp import session

_ATTRIBUTES = {
    "tool": "openapi_tool.built_in",
    "error_code": "error.type",
    "project": "commonground.project.id",
    "host": "server.address",
}
"""Names of labels in OpenTelemetry's conventions."""


class PeriodicExport:
    """Exports all metrics every `every_s` seconds in its own thread.

    A failed export is not retried: values are totals, so the next export contains them.
    """

    def __init__(self, exporter: MetricExporter, every_s: float, instance: str) -> None:
        self._exporter = exporter
        self._every_s = every_s
        self._since_ns = time.time_ns()
        attributes = {"service.name": "openapi-tool", "service.version": __version__, "service.instance.id": instance}
        self._resource = Resource.create(attributes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics export", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._export()
        self._export()

    def _export(self) -> None:
        self._exporter.export(self.collected())

    def collected(self) -> MetricsData:
        """Return the current values of all metrics."""
        now = time.time_ns()
        converted = [self._converted(metric, now) for metric in ALL if any(True for _ in metric.children())]
        scope = ScopeMetrics(InstrumentationScope("openapi_tool", __version__), converted, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _converted(self, metric: metrics.Metric, now: int) -> Metric:
        unit = "s" if metric.name.endswith("_seconds") else ""
        if isinstance(metric, metrics.Histogram):
            points = [self._distribution(labels, child, now) for labels, child in metric.children()]
            return Metric(metric.name, metric.text, unit, Histogram(points, AggregationTemporality.CUMULATIVE))
        numbers = list(self._numbers(metric, now))
        if isinstance(metric, metrics.Counter):
            summed = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            return Metric(metric.name, metric.text, unit, summed)
        return Metric(metric.name, metric.text, unit, Gauge(numbers))

    def _numbers(self, metric: metrics.Family[Value], now: int) -> Iterator[NumberDataPoint]:
        for labels, child in metric.children():
            yield NumberDataPoint(_attributes(labels), self._since_ns, now, float(child.number))

    def _distribution(self, labels: Mapping[str, str], child: Distribution, now: int) -> HistogramDataPoint:
        counts = list(child.counts)
        attributes, nan = _attributes(labels), float("nan")  # minimum and maximum are not recorded
        return HistogramDataPoint(
            attributes, self._since_ns, now, sum(counts), child.total, counts, child.bounds, min=nan, max=nan
        )

    def shutdown(self) -> None:
        """Export once more and stop; may block for as long as the collector does."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTES.get(name, name): value for name, value in labels.items()}


def open_exporter(endpoint: str, every_s: float, instance: str) -> PeriodicExport:
    """Return an exporter to `endpoint`: the full metrics URL of an OTLP/HTTP collector."""
    return PeriodicExport(OTLPMetricExporter(endpoint=endpoint, session=session()), every_s, instance)
