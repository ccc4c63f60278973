"""Leaves out series in runs of many ranks: the setting `serve.detail`.

The recorder and the metrics log always hold all series. Only what is scraped or sent leaves some
out, so that advice, reports and the tuner work alike with either setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from ..catalog.spec import Lean, MetricSpec
from ..recorder import Distribution, LabelValues, Snapshot
from ..settings import Detail


def served(snapshot: Snapshot, detail: Detail) -> Snapshot:
    """Return the part of a snapshot that is exported with `serve.detail = detail`.

    Examples:
        >>> recorder.add(COMM_SECONDS, 2, "dp")
        >>> recorder.add(COMM_SECONDS, 3, "tp")
        >>> served(recorder.snapshot(), "lean").value(lean_spec(COMM_SECONDS))
        5.0
    """
    if detail == "full":
        return snapshot
    return Snapshot(
        values={
            lean_spec(spec): _lean_series(spec, spec.lean, series)
            for spec, series in snapshot.values.items()
            if spec.lean is not None
        },
        distributions={
            lean_spec(spec): {labels: _without_buckets(seen) for labels, seen in series.items()}
            for spec, series in snapshot.distributions.items()
            if spec.lean is not None
        },
    )


@cache
def lean_spec(spec: MetricSpec) -> MetricSpec:
    """Return the spec under which a metric is served if `serve.detail` is "lean"."""
    if spec.lean is None or not (spec.lean.without or spec.buckets):
        return spec
    kept = tuple(label for label in spec.labels if label.name not in spec.lean.without)
    return replace(spec, labels=kept, buckets=())


def _lean_series(
    spec: MetricSpec, lean: Lean, series: Mapping[LabelValues, float]
) -> dict[LabelValues, float]:
    if not lean.without and not lean.only:
        return dict(series)
    chosen: dict[LabelValues, float] = {}
    for labels, value in series.items():
        by_name = dict(zip(spec.label_names, labels, strict=True))
        if all(by_name[name] in values for name, values in lean.only.items()):
            kept = tuple(text for name, text in by_name.items() if name not in lean.without)
            chosen[kept] = chosen.get(kept, 0.0) + value
    return chosen


def _without_buckets(seen: Distribution) -> Distribution:
    return Distribution(counts=(seen.count,), sum=seen.sum, exemplars=(None,))
