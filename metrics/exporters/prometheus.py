"""Renders a snapshot as text, and reads such text, with prometheus_client.

No other file imports that library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain

from prometheus_client import GCCollector, ProcessCollector
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ..catalog.spec import MetricSpec
from ..recorder import Distribution, LabelValues, Snapshot
from ..recorder import Exemplar as SeenExemplar


def exposition(
    snapshot: Snapshot, rank: int, accept_header: str, *, with_process: bool = False
) -> tuple[str, bytes]:
    """Render every series in the format that the client requests.

    Args:
        snapshot: The metric values. A metric without a value is left out.
        rank: The value of the label `rank`, which is added to every series.
        accept_header: The client's HTTP Accept header. If empty, the format is the classic text
            format.
        with_process: Whether to add prometheus_client's metrics of this process and of Python's
            garbage collector, such as `process_open_fds`.

    Returns:
        The content type and the text.
    """
    registry = CollectorRegistry()
    registry.register(_SnapshotCollector(snapshot, str(rank)))
    if with_process:
        registry.register(_ProcessCollector(str(rank)))
    content_type = content_type_for(accept_header)
    if is_openmetrics(content_type):
        # The catalog's names need no escaping. Checking the names would take a third of the time.
        text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            registry, escaping=openmetrics.ALLOWUTF8
        )
        return content_type, text
    return content_type, generate_latest(registry)


def content_type_for(accept_header: str) -> str:
    """Return the content type of the response to a client with this HTTP Accept header."""
    _, content_type = choose_encoder(accept_header)
    return content_type


def is_openmetrics(content_type: str) -> bool:
    """Whether a content type is OpenMetrics. All versions of OpenMetrics get the same text."""
    return content_type.startswith("application/openmetrics-text")


def read_exposition(text: str, specs: Iterable[MetricSpec]) -> Snapshot:
    """Return the values of some metrics from text in the classic format, as `exposition` renders.

    Histograms are left out. A metric with `serve.detail = "lean"` has fewer label values.

    Args:
        text: The text of one rank.
        specs: The metrics to read; all others are skipped, which saves most of the time.

    Raises:
        ValueError: The text is not in this format.

    Examples:
        >>> _, text = exposition(recorder.snapshot(), 0, "")
        >>> read_exposition(text.decode(), [STEPS]).value(STEPS)
        2.0
    """
    by_name = {spec.name: spec for spec in specs}
    chosen = [line for line in text.split("\n") if _sample_name(line) in by_name]
    values: dict[MetricSpec, dict[LabelValues, float]] = {}
    for family in text_string_to_metric_families("\n".join([*chosen, ""])):
        for sample in family.samples:
            spec = by_name[sample.name]
            known = (sample.labels.get(name) for name in spec.label_names)
            labels = tuple(value for value in known if value is not None)
            values.setdefault(spec, {})[labels] = sample.value
    return Snapshot(values=values, distributions={})


def _sample_name(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]


def process_samples() -> Iterator[tuple[Metric, str, dict[str, str], float]]:
    """Yield each sample of the process and of the garbage collector, without the label `rank`.

    Yields:
        The metric, and the sample's name, labels and value.
    """
    for family in _process_registry().collect():
        for sample in family.samples:
            yield family, sample.name, sample.labels, sample.value


class _SnapshotCollector(Collector):
    """The metric families of one snapshot, sorted by name."""

    def __init__(self, snapshot: Snapshot, rank: str) -> None:
        self._snapshot = snapshot
        self._rank = rank

    def collect(self) -> Iterator[Metric]:
        families = chain(
            (_family(*item, self._rank) for item in self._snapshot.values.items() if item[1]),
            (_histogram(*item, self._rank) for item in self._snapshot.distributions.items()),
        )
        yield from sorted(families, key=lambda family: family.name)


class _ProcessCollector(Collector):
    """prometheus_client's metrics of the process and of the garbage collector, with the rank."""

    def __init__(self, rank: str) -> None:
        self._rank = rank

    def collect(self) -> Iterator[Metric]:
        for family in _process_registry().collect():
            labeled = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                labels = {"rank": self._rank, **sample.labels}
                labeled.add_sample(sample.name, labels, sample.value)
            yield labeled


@functools.cache
def _process_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry)
    return registry


def _family(spec: MetricSpec, series: Mapping[LabelValues, float], rank: str) -> Metric:
    names = ("rank", *spec.label_names)
    if spec.kind == "info":
        facts = InfoMetricFamily(spec.name.removesuffix("_info"), spec.help, labels=names)
        for labels in series:
            facts.add_metric((rank, *labels), {})
        return facts
    if spec.kind == "summary":
        quantiles = Metric(spec.name, spec.help, "summary", spec.unit)
        for labels, value in series.items():
            labeled = zip(names, (rank, *labels), strict=True)
            quantiles.add_sample(spec.name, dict(labeled), value)
        return quantiles
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.name, spec.help, labels=names, unit=spec.unit)
    for labels, value in series.items():
        family.add_metric((rank, *labels), value)
    return family


def _histogram(
    spec: MetricSpec, series: Mapping[LabelValues, Distribution], rank: str
) -> HistogramMetricFamily:
    names = ("rank", *spec.label_names)
    family = HistogramMetricFamily(spec.name, spec.help, labels=names, unit=spec.unit)
    bounds = (*map(str, spec.buckets), "+Inf")
    for labels, seen in series.items():
        buckets = map(_bucket, bounds, accumulate(seen.counts), seen.exemplars)
        family.add_metric((rank, *labels), list(buckets), seen.sum)
    return family


def _bucket(
    bound: str, count: int, exemplar: SeenExemplar | None
) -> tuple[str, float] | tuple[str, float, Exemplar]:
    if exemplar is None:
        return bound, count
    return bound, count, Exemplar(dict(exemplar.labels), exemplar.value, exemplar.unix_seconds)
