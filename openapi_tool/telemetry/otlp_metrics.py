"""Export of metrics over OTLP; imported only if an endpoint is configured."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

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
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from openapi_tool import __version__
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.metrics import ALL, Distribution
from openapi_tool.telemetry.otlp import CollectorSession, resource

_ATTRIBUTES = {
    "tool": "openapi_tool.built_in",
    "error_code": "error.type",
    "project": "commonground.project.id",
    "host": "server.address",
}
"""Names of labels in OpenTelemetry's conventions."""


class PeriodicExport:
    """Exports all metrics every `every_s` seconds in its own thread; no retries, since values are totals."""

    def __init__(self, exporter: MetricExporter, every_s: float, instance: str) -> None:
        self._exporter = exporter
        self._every_s = every_s
        self._since_ns = time.time_ns()
        self._resource = resource(instance)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics export", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(self._every_s)
            self._exporter.export(self.collected())

    def collected(self) -> MetricsData:
        """Return the current values."""
        now = time.time_ns()
        converted = [self._converted(metric, now) for metric in ALL if any(metric.children())]
        scope = ScopeMetrics(InstrumentationScope("openapi_tool", __version__), converted, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _converted(self, metric: metrics.Metric, now: int) -> Metric:
        unit = "s" if metric.name.endswith("_seconds") else ""
        data: Histogram | Sum | Gauge
        if isinstance(metric, metrics.Histogram):
            points = [self._distribution(labels, child, now) for labels, child in metric.children()]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        else:
            numbers = [
                NumberDataPoint(_attributes(labels), self._since_ns, now, float(child.number))
                for labels, child in metric.children()
            ]
            counts = isinstance(metric, metrics.Counter)
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(numbers)
        return Metric(metric.name, metric.text, unit, data)

    def _distribution(self, labels: Mapping[str, str], child: Distribution, now: int) -> HistogramDataPoint:
        counts = list(child.counts)
        attributes, nan = _attributes(labels), float("nan")  # minimum and maximum are not recorded
        return HistogramDataPoint(
            attributes, self._since_ns, now, sum(counts), child.total, counts, child.bounds, min=nan, max=nan
        )

    def shutdown(self) -> None:
        """Export once more; may block for as long as the collector does."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTES.get(name, name): value for name, value in labels.items()}


def open_exporter(endpoint: str, every_s: float, instance: str) -> PeriodicExport:
    """Return an exporter to the full metrics URL of an OTLP/HTTP collector."""
    return PeriodicExport(OTLPMetricExporter(endpoint=endpoint, session=CollectorSession()), every_s, instance)
