"""Export of metrics to an OTLP collector: all instruments of `telemetry.metrics`, in OpenTelemetry's form.

The instruments are prometheus-client's, which this module reads and converts. It is imported only if an endpoint is
configured, since the OpenTelemetry SDK takes 30 MB of memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from itertools import pairwise

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
from openapi_tool.telemetry.metrics import ALL, Described, Sample, samples
from openapi_tool.telemetry.otlp_collector import SCOPE, CollectorSession, resource

log = logging.getLogger(__name__)

_ATTRIBUTE_OF_LABEL = {
    "tool": "openapi_tool.built_in",
    "error_code": "error.type",
    "project": "commonground.project.id",
    "host": "server.address",
}
"""Labels that have another name in OpenTelemetry's conventions."""

_NOT_RECORDED = float("nan")  # the smallest and largest value of a histogram, which Prometheus does not have


def open_exporter(endpoint: str, every_s: float, instance: str) -> PeriodicExport:
    """Start to export to a collector; `endpoint` is its full URL for metrics."""
    return PeriodicExport(OTLPMetricExporter(endpoint=endpoint, session=CollectorSession()), every_s, instance)


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
        stopping = failed_before = False
        while not stopping:  # when it stops it exports once more
            stopping = self._stop.wait(self._every_s)
            try:
                self._exporter.export(self.collected())
                failed_before = False
            except Exception:  # a defect; without this thread no metric would be exported any more
                if not failed_before:
                    log.exception("internal error in the export of metrics", extra={"action": "metrics.not_exported"})
                failed_before = True

    def collected(self) -> MetricsData:
        """Return the current values of all metrics that have one."""
        now_ns = time.time_ns()
        exported = []
        for described in ALL:
            current = list(samples(described.instrument))
            if current:
                exported.append(_metric(described, current, self._since_ns, now_ns))
        scope = ScopeMetrics(InstrumentationScope(SCOPE, __version__), exported, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def shutdown(self) -> None:
        """Export once more; may block for as long as the collector does."""
        self._stop.set()
        self._thread.join()
        self._exporter.shutdown()


def _metric(described: Described, current: list[Sample], since_ns: int, now_ns: int) -> Metric:
    """Return a metric in OpenTelemetry's form, from its samples in that of Prometheus."""
    data: Histogram | Sum | Gauge
    if described.kind == "histogram":
        data = Histogram(_histogram_points(current, since_ns, now_ns), AggregationTemporality.CUMULATIVE)
    else:
        points = [
            NumberDataPoint(_attributes_of_labels(sample.labels), since_ns, now_ns, sample.value) for sample in current
        ]
        if described.kind == "counter":
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(points)
    unit = "s" if described.name.endswith("_seconds") else ""
    return Metric(described.name, described.text, unit, data)


def _histogram_points(current: list[Sample], since_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    """Return a point for each combination of labels.

    Prometheus has a sample for each bucket, in the order of the upper bounds (label `le`), the last of which is
    infinite; then one for the sum of the values. A bucket of Prometheus counts the values of all buckets below, too;
    one of OpenTelemetry counts its own alone.
    """
    points: list[HistogramDataPoint] = []
    upper_bounds: list[float] = []
    cumulative = [0.0]
    for sample in current:
        if sample.name.endswith("_bucket"):
            upper_bounds.append(float(sample.labels["le"]))
            cumulative.append(sample.value)
        elif sample.name.endswith("_sum"):
            point = HistogramDataPoint(
                attributes=_attributes_of_labels(sample.labels),
                start_time_unix_nano=since_ns,
                time_unix_nano=now_ns,
                count=int(cumulative[-1]),
                sum=sample.value,
                bucket_counts=[int(upper - lower) for lower, upper in pairwise(cumulative)],
                explicit_bounds=upper_bounds[:-1],  # OpenTelemetry leaves out the infinite one
                min=_NOT_RECORDED,
                max=_NOT_RECORDED,
            )
            points.append(point)
            upper_bounds, cumulative = [], [0.0]
    return points


def _attributes_of_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {_ATTRIBUTE_OF_LABEL.get(name, name): value for name, value in labels.items()}
