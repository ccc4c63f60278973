"""Renders a snapshot as text, and reads such text, with prometheus_client.

No other file imports that library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

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
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..catalog.spec import MetricSpec
from ..recorder import Distribution, LabelValues, Snapshot
from ..recorder import Exemplar as SeenExemplar

_OPENMETRICS_END = "# EOF\n"
# Alerts read it, so it is served with any `serve.detail`.
_PROCESS_START = "process_start_time_seconds"


def exposition(
    snapshot: Snapshot,
    rank: int,
    accept_header: str,
    *,
    with_process: bool = False,
    rendered: RenderedFamilies | None = None,
    between_families: Callable[[], object] = lambda: None,
) -> tuple[str, bytes]:
    """Render every series in the format that the client requests.

    Args:
        snapshot: The metric values. A metric without a value is left out.
        rank: The value of the label `rank`, which is added to every series.
        accept_header: The client's HTTP Accept header. If empty, the format is the classic text
            format.
        with_process: Whether to add prometheus_client's metrics of this process and of Python's
            garbage collector, such as `process_open_fds`. The start time of the process is added
            in any case.
        rendered: What was rendered before, of the same rank. It saves most of the time.
        between_families: Called after each family, so that rendering need not take all at once.

    Returns:
        The content type and the text.
    """
    content_type = content_type_for(accept_header)
    openmetrics = is_openmetrics(content_type)
    rendered = RenderedFamilies() if rendered is None else rendered
    texts: list[tuple[str, str]] = []
    for part in _snapshot_parts(snapshot, str(rank)):
        texts.append(rendered.render(part, openmetrics=openmetrics))
        between_families()
    texts.sort(key=itemgetter(0))
    for part in _process_parts(str(rank), with_process=with_process):
        texts.append(rendered.render(part, openmetrics=openmetrics))
        between_families()
    end = _OPENMETRICS_END if openmetrics else ""
    return content_type, ("".join(text for _, text in texts) + end).encode()


@dataclass(frozen=True, slots=True)
class _Part:
    """A family that is to be rendered.

    Attributes:
        key: Identifies the family.
        series: Identifies the family's samples and their order. None if they have exemplars.
        values: The values of the samples.
        build: Returns the family.
    """

    key: object
    series: object | None
    values: Sequence[float]
    build: Callable[[], Metric]


class RenderedFamilies:
    """The text of each family of one rank when it was rendered last. Not thread-safe.

    prometheus_client renders a family whose series are new. Afterwards only the values that have
    changed are rendered, because names and labels take most of the time.
    """

    def __init__(self) -> None:
        self._families: dict[tuple[object, bool], _RenderedFamily] = {}

    def render(self, part: _Part, *, openmetrics: bool) -> tuple[str, str]:
        """Return the name and the text of a family."""
        known = self._families.get((part.key, openmetrics))
        if known is not None and known.series == part.series:
            known.update(part.values)
            return known.name, known.text
        family = part.build()
        text = _text_of(family, openmetrics=openmetrics)
        if part.series is not None:
            new = _RenderedFamily(family.name, part.series, part.values, text)
            if new.text == text:  # else the library writes samples in an order of its own
                self._families[part.key, openmetrics] = new
        return family.name, text


class _RenderedFamily:
    """The lines of a family, each as its beginning and a value."""

    __slots__ = ("_comments", "_heads", "_lines", "_values", "name", "series", "text")

    def __init__(self, name: str, series: object, values: Sequence[float], text: str) -> None:
        self.name, self.series, self._values = name, series, values
        lines = text.split("\n")
        self._comments = "".join(f"{line}\n" for line in lines if line.startswith("#"))
        samples = (line for line in lines if line and not line.startswith("#"))
        self._heads = [line.rpartition(" ")[0] for line in samples]
        self._lines = list(map(_line, self._heads, values))
        self.text = self._comments + "".join(self._lines)

    def update(self, values: Sequence[float]) -> None:
        """Render the values that have changed."""
        if values == self._values:
            return
        for index, (was, value) in enumerate(zip(self._values, values, strict=True)):
            if was != value:
                self._lines[index] = _line(self._heads[index], value)
        self.text = self._comments + "".join(self._lines)
        self._values = values


def _line(head: str, value: float) -> str:
    return f"{head} {floatToGoString(value)}\n"  # type: ignore[no-untyped-call]


def _text_of(family: Metric, *, openmetrics: bool) -> str:
    """Render a family with prometheus_client."""
    collector = _OneFamily(family)
    if not openmetrics:
        return generate_latest(collector).decode()
    # The catalog's names need no escaping. Checking the names would take a third of the time.
    text: bytes = openmetrics_exposition.generate_latest(  # type: ignore[no-untyped-call]
        collector, escaping=openmetrics_exposition.ALLOWUTF8
    )
    return text.decode().removesuffix(_OPENMETRICS_END)


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


def process_samples(*, with_process: bool) -> Iterator[tuple[Metric, str, dict[str, str], float]]:
    """Yield the samples of the process, without the label `rank`.

    Args:
        with_process: Whether to yield all samples of the process and of the garbage collector, or
            the start time of the process only.

    Yields:
        The metric, and the sample's name, labels and value.
    """
    for family in _process_families(with_process=with_process):
        for sample in family.samples:
            yield family, sample.name, sample.labels, sample.value


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _snapshot_parts(snapshot: Snapshot, rank: str) -> Iterator[_Part]:
    for spec, series in snapshot.values.items():
        if series:
            values = [1.0] * len(series) if spec.kind == "info" else list(series.values())
            build = functools.partial(_family, spec, series, rank)
            yield _Part((spec, rank), tuple(series), values, build)
    for spec, distributions in snapshot.distributions.items():
        values = [value for seen in distributions.values() for value in _histogram_values(seen)]
        has_exemplars = any(any(seen.exemplars) for seen in distributions.values())
        labels = None if has_exemplars else tuple(distributions)
        yield _Part(
            (spec, rank), labels, values, functools.partial(_histogram, spec, distributions, rank)
        )


def _histogram_values(seen: Distribution) -> Iterator[float]:
    """Yield the values of a histogram's samples: the buckets, the count and the sum."""
    yield from accumulate(seen.counts)
    yield seen.count
    yield seen.sum


def _process_parts(rank: str, *, with_process: bool) -> Iterator[_Part]:
    """Yield prometheus_client's metrics of the process and of the garbage collector."""
    for family in _process_families(with_process=with_process):
        series = tuple((sample.name, *sample.labels.items()) for sample in family.samples)
        values = [sample.value for sample in family.samples]
        build = functools.partial(_with_rank, family, rank)
        yield _Part((family.name, rank), series, values, build)


def _with_rank(family: Metric, rank: str) -> Metric:
    labeled = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        labeled.add_sample(sample.name, {"rank": rank, **sample.labels}, sample.value)
    return labeled


def _process_families(*, with_process: bool) -> Iterable[Metric]:
    return _process_registry().collect() if with_process else _start_of_process(os.getpid())


@functools.cache
def _start_of_process(process_id: int) -> tuple[Metric, ...]:
    """Return the start time of this process, read once: a forked child has another one."""
    families = ProcessCollector(pid=lambda: process_id, registry=None).collect()
    return tuple(family for family in families if family.name == _PROCESS_START)


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
