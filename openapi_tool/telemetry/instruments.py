"""Counters, gauges and histograms of one definition, read by the Prometheus and the OTLP exporter.

prometheus_client's own instruments lock and validate on every use, and export `_created` series. These are plain
attributes, changed only on the event loop's thread; a few lookups instead of microseconds per call.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Generic, Literal, TypeVar

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Value:
    """Number of one combination of labels."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add to the number."""
        self.number += amount

    def set(self, number: float) -> None:
        """Replace the number."""
        self.number = number


class Distribution:
    """Observations of one combination of labels: their number per bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count an observation; a bucket includes its upper bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


ChildT = TypeVar("ChildT", Value, Distribution)


class Family(Generic[ChildT]):
    """One metric: name without suffix, meaning, label names, and the children by their label values.

    `present` are combinations of label values that exist from the start, at 0: Prometheus sees no increase in a series
    that starts at 1, so an alert would miss the first event. Without labels the only child always exists.
    """

    kind: ClassVar[Kind]

    def __init__(self, name: str, text: str, labels: Labels = (), present: Iterable[Labels] = ()) -> None:
        self.name = f"openapi_tool_{name}"
        self.text = text
        self.label_names = labels
        self._children: dict[Labels, ChildT] = {}
        for values in present if labels else [()]:
            self.labels(*values)

    @abstractmethod
    def _child(self) -> ChildT:
        """Return a new child."""

    def labels(self, *values: str) -> ChildT:
        """Return the child of these label values, in the order of the label names; keep it to save the lookup."""
        try:
            return self._children[values]
        except KeyError:
            child = self._children[values] = self._child()
            return child

    def children(self) -> Iterator[tuple[dict[str, str], ChildT]]:
        """Yield labels and child of each series. An empty label is left out: Prometheus takes both for the same."""
        for values, child in list(self._children.items()):
            yield {name: value for name, value in zip(self.label_names, values, strict=True) if value}, child


class Counter(Family[Value]):
    """Number that only grows."""

    kind = "counter"

    def _child(self) -> Value:
        return Value()

    def inc(self, amount: float = 1) -> None:
        """Add to the only child of a counter without labels."""
        self._children[()].number += amount


class Gauge(Family[Value]):
    """Number that goes up and down; set, or read from sources whenever it is exported.

    `combine` makes one number of the sources of a child: each kernel that the process serves has one.
    """

    kind = "gauge"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        present: Iterable[Labels] = (),
        *,
        combine: Callable[[Iterable[float]], float] = sum,
    ) -> None:
        super().__init__(name, text, labels, present)
        self._combine = combine
        self._sources: dict[Labels, dict[str, Callable[[], float]]] = {}

    def _child(self) -> Value:
        return Value()

    def set(self, number: float) -> None:
        """Set the only child of a gauge without labels."""
        self._children[()].number = number

    def set_function(self, source: Callable[[], float], *values: str, part: str = "") -> None:
        """Read the gauge from `source` at each export, which costs calls nothing.

        A later source of the same `part` of the process, such as a kernel, replaces the earlier one.
        """
        self._sources.setdefault(values, {})[part] = source

    def children(self) -> Iterator[tuple[dict[str, str], Value]]:
        """Yield labels and child of each series, those with a source up to date."""
        for values, sources in self._sources.items():
            self.labels(*values).number = self._combine(source() for source in sources.values())
        return super().children()


class Histogram(Family[Distribution]):
    """Distribution over buckets, whose upper bounds are in the metric's unit."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, labels: Labels = (), present: Iterable[Labels] = (), *, bounds: tuple[float, ...]
    ) -> None:
        self.bounds = bounds
        super().__init__(name, text, labels, present)

    def _child(self) -> Distribution:
        return Distribution(self.bounds)

    def observe(self, value: float) -> None:
        """Count an observation of the only child of a histogram without labels."""
        self._children[()].observe(value)


Metric = Counter | Gauge | Histogram
