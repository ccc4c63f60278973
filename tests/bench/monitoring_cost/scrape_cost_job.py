"""Serves a full catalog by the real server; answers each line of stdin with its CPU seconds."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.catalog.spec import Label, MetricSpec
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen

# What one rank of a data-parallel job comes to have; all combinations would be five times as many.
SEEN = {
    "op": ("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    "group": ("dp", "world"),
    "device": ("cuda:0",),
    "knob": ("reduce_bucket_size", "overlap_comm"),
    "exporter": ("prometheus",),
}


def main() -> None:
    recorder = Recorder()
    for spec in CATALOG:
        for labels in label_values(spec):
            write(recorder, spec, labels)
    settings = ServeSettings(port=0)
    server = MetricsServer(
        recorder=recorder,
        rank=0,
        local_rank=0,
        settings=settings,
        targets=lambda: [],
        make_thread=FailOpen().thread,
    )
    print(server.start(), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    server.close()


def label_values(spec: MetricSpec) -> Iterator[tuple[str, ...]]:
    return itertools.product(*(values_of(label) for label in spec.labels))


def values_of(label: Label) -> tuple[str, ...]:
    return SEEN.get(label.name) or label.values or (f"some-{label.name}",)


def write(recorder: Recorder, spec: MetricSpec, labels: tuple[str, ...]) -> None:
    if spec.kind == "info":
        recorder.set_info(spec, *labels)
    elif spec.kind == "histogram":
        for bound in spec.buckets:
            recorder.observe(spec, bound, *labels)
    else:
        recorder.set(spec, 123456.789, *labels)


if __name__ == "__main__":
    main()
