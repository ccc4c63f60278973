"""Tests of the Prometheus and OpenMetrics texts: valid, complete, with ranks and exemplars."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import psutil
import pytest
from opentelemetry import trace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic
from require import program

from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.catalog.communication import COLLECTIVE_DURATION, COMM_EXPOSED_SECONDS
from zerowatch.metrics.catalog.memory import MEMORY_BYTES
from zerowatch.metrics.catalog.training import LOSS, RUN_INFO, STEP_DURATION, STEPS
from zerowatch.metrics.exporters.detail import served
from zerowatch.metrics.exporters.prometheus import RenderedFamilies, exposition, read_exposition
from zerowatch.metrics.exporters.trace_context import current_trace_labels
from zerowatch.metrics.recorder import Recorder

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
ODD = 'a "b" \\ \n \u2028 # c'  # a label value
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def recorder_of_everything() -> Recorder:
    """Return a recorder in which each metric of the catalog has a value."""
    recorder = Recorder()
    for spec in CATALOG:
        labels = [label.values[0] if label.values else "cuda:0" for label in spec.labels]
        if spec.kind == "histogram":
            recorder.observe(spec, 0.02, *labels, exemplar={"trace_id": TRACE_ID})
        elif spec.kind == "info":
            recorder.set_info(spec, *labels)
        else:
            recorder.set(spec, 2.5, *labels)
    return recorder


def classic_text(recorder: Recorder, rank: int = 0) -> str:
    return without_start(exposition(recorder.snapshot(), rank, "")[1].decode())


def openmetrics_text(recorder: Recorder, rank: int = 0) -> str:
    return without_start(exposition(recorder.snapshot(), rank, OPENMETRICS)[1].decode())


def without_start(text: str) -> str:
    """Leave out the start time of the process, which is in each text."""
    return re.sub(r"^.*\bprocess_start_time_seconds\b.*\n", "", text, flags=re.MULTILINE)


def test_promtool_accepts_all_metrics():
    promtool = program("promtool", apt="prometheus")
    text = classic_text(recorder_of_everything())

    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=600
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_metric_is_in_the_classic_text_under_its_catalog_name():
    families = parse_classic(classic_text(recorder_of_everything()))

    names = {sample.name for family in families for sample in family.samples}
    scalars = {spec.name for spec in CATALOG if spec.kind != "histogram"}
    histograms = {spec.name for spec in CATALOG if spec.kind == "histogram"}
    parts = {name + end for name in histograms for end in ("_bucket", "_sum", "_count")}
    assert names == scalars | parts


def test_the_openmetrics_parser_accepts_the_text_with_every_metric():
    families = parse_openmetrics(openmetrics_text(recorder_of_everything()))

    kinds = {family.name: (family.type, family.documentation) for family in families}
    assert kinds == {
        spec.name.removesuffix("_total").removesuffix("_info"): (spec.kind, spec.help)
        for spec in CATALOG
    }


@pytest.mark.parametrize("text_of", [classic_text, openmetrics_text])
def test_every_series_has_the_label_rank(text_of):
    text = text_of(recorder_of_everything(), 3)

    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(series) > len(CATALOG)
    assert [line for line in series if 'rank="3"' not in line] == []


def test_openmetrics_states_the_units():
    text = openmetrics_text(recorder_of_everything())

    units = dict(re.findall(r"^# UNIT (\S+) (\S+)$", text, re.MULTILINE))
    assert units["zerowatch_step_duration_seconds"] == "seconds"
    assert units["zerowatch_collective_bytes"] == "bytes"  # a counter's family has no _total
    assert units["zerowatch_mfu_ratio"] == "ratio"
    assert "zerowatch_loss" not in units


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_metrics_of_the_process_are_added_with_the_rank(accept):
    recorder = Recorder()
    recorder.add(STEPS, 4)

    text = exposition(recorder.snapshot(), 3, accept, with_process=True)[1].decode()

    parse = parse_openmetrics if accept else parse_classic
    samples = {s.name: s.labels for family in parse(text) for s in family.samples}
    assert samples["process_open_fds"] == {"rank": "3"}
    assert samples["process_cpu_seconds_total"] == {"rank": "3"}
    assert samples["python_gc_collections_total"]["rank"] == "3"
    assert samples["zerowatch_steps_total"] == {"rank": "3"}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_the_start_time_of_the_process_is_there_without_its_other_metrics(accept):
    text = exposition(Recorder().snapshot(), 3, accept)[1].decode()

    [family] = (parse_openmetrics if accept else parse_classic)(text)
    [sample] = family.samples
    assert (sample.name, sample.labels) == ("process_start_time_seconds", {"rank": "3"})
    assert sample.value == pytest.approx(psutil.Process().create_time(), abs=2)


FORKING = """
import os, time
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder
for _ in range(2):
    print(exposition(Recorder().snapshot(), 3, "")[1].decode().split()[-1], flush=True)
    time.sleep(0.05)  # the clock of start times has ticks of 10 ms
    if os.fork():
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_serves_its_own_start_time():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True)

    assert done.stderr == ""
    parent, child = map(float, done.stdout.split())
    assert parent < child


def test_metrics_without_a_value_are_left_out():
    recorder = Recorder()
    recorder.add(STEPS, 4)

    assert classic_text(recorder) == (
        "# HELP zerowatch_steps_total Optimizer steps, skipped ones included.\n"
        "# TYPE zerowatch_steps_total counter\n"
        'zerowatch_steps_total{rank="0"} 4.0\n'
    )


def test_the_run_info_is_a_series_with_value_one():
    recorder = Recorder()
    recorder.set_info(RUN_INFO, "night-7", "0.1.0", "2.13.0", "0.19.8", "gloo", "cpu", "2", "8")

    [info] = parse_classic(classic_text(recorder))

    assert [(sample.name, sample.value) for sample in info.samples] == [("zerowatch_run_info", 1.0)]
    assert info.samples[0].labels["run_id"] == "night-7"


def test_buckets_are_cumulative_and_end_with_the_count():
    recorder = Recorder()
    for seconds in (0.0003, 0.03, 0.03, 9.0):
        recorder.observe(COLLECTIVE_DURATION, seconds, "all_reduce")

    [family] = parse_classic(classic_text(recorder))

    by_bound = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert by_bound == {
        **dict.fromkeys(("1e-05", "3e-05", "0.0001"), 0),
        **dict.fromkeys(("0.0003", "0.001", "0.003", "0.01"), 1),
        **dict.fromkeys(("0.03", "0.1", "0.3", "1.0", "3.0"), 3),
        "+Inf": 4,
        "zerowatch_collective_duration_seconds_sum": pytest.approx(9.0603),
        "zerowatch_collective_duration_seconds_count": 4,
    }


def test_an_exemplar_is_at_its_bucket_in_openmetrics_only():
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.07, exemplar={"trace_id": TRACE_ID})

    [family] = parse_openmetrics(openmetrics_text(recorder))

    found = {
        sample.labels["le"]: (sample.exemplar.labels, sample.exemplar.value)
        for sample in family.samples
        if sample.exemplar
    }
    assert found == {"0.1": ({"trace_id": TRACE_ID}, 0.07)}
    assert TRACE_ID not in classic_text(recorder)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4"),
    ],
)
def test_the_accept_header_chooses_the_format(accept, content_type):
    answered, body = exposition(recorder_of_everything().snapshot(), 0, accept)

    assert answered.startswith(content_type)
    assert body.endswith(b"# EOF\n") == answered.startswith("application/openmetrics-text")


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_what_was_rendered_before_changes_no_text(accept):
    recorder, rendered, seen = recorder_of_everything(), RenderedFamilies(), []

    def text(**options) -> bytes:
        return exposition(recorder.snapshot(), 3, accept, **options)[1]

    for change in range(6):
        recorder.add(STEPS, change)
        recorder.set(LOSS, [0.25, math.nan, math.nan, math.inf, -2.5e-9, 123456789.5][change])
        recorder.observe(
            COLLECTIVE_DURATION, 0.01 * change, ("all_reduce", "all_gather")[change % 2]
        )
        recorder.observe(
            STEP_DURATION, 0.1, exemplar={"trace_id": TRACE_ID} if change > 3 else None
        )
        recorder.set(MEMORY_BYTES, change, f"{ODD}{change // 2}", "allocated")
        recorder.remove(MEMORY_BYTES, f"{ODD}{change // 2 - 2}", "allocated")
        recorder.set_info(RUN_INFO, f"run{change // 3}", *["x"] * (len(RUN_INFO.labels) - 1))
        seen.append(text())
        assert text(rendered=rendered) == seen[-1]

    assert len(set(seen)) == 6


def test_the_text_with_metrics_of_the_process_is_the_same_when_it_is_rendered_again():
    recorder, rendered = recorder_of_everything(), RenderedFamilies()
    pauses = []

    texts = [
        exposition(
            recorder.snapshot(),
            3,
            OPENMETRICS,
            with_process=True,
            rendered=rendered,
            between_families=lambda: pauses.append(None),
        )[1].decode()
        for _ in range(2)
    ]

    first, second = ([_sample_name(line) for line in text.splitlines()] for text in texts)
    assert first == second
    assert len(pauses) == 2 * texts[0].count("# TYPE ")


def _sample_name(line: str) -> str:
    return line if line.startswith("#") else line.rpartition(" ")[0]


def test_a_diverged_loss_is_still_exported():
    recorder = Recorder()
    recorder.set(LOSS, math.nan)

    assert classic_text(recorder).endswith('zerowatch_loss{rank="0"} NaN\n')


def test_label_values_are_escaped():
    recorder = Recorder()
    recorder.set(MEMORY_BYTES, 1, 'cuda:"0"\\\n', "allocated")

    [family] = parse_classic(classic_text(recorder))

    assert family.samples[0].labels["device"] == 'cuda:"0"\\\n'


def span_of(trace_flags: trace.TraceFlags, trace_id: int = int(TRACE_ID, 16)) -> trace.Span:
    context = trace.SpanContext(trace_id, 0xB7AD6B7169203331, False, trace_flags)
    return trace.NonRecordingSpan(context)


def test_a_sampled_span_gives_its_trace_id():
    with trace.use_span(span_of(trace.TraceFlags(trace.TraceFlags.SAMPLED))):
        labels = current_trace_labels()

    assert labels == {"trace_id": TRACE_ID}


@pytest.mark.parametrize(
    "span",
    [
        span_of(trace.TraceFlags(trace.TraceFlags.DEFAULT)),
        span_of(trace.TraceFlags(trace.TraceFlags.SAMPLED), trace_id=0),
    ],
    ids=["not sampled", "not valid"],
)
def test_a_span_that_is_not_sampled_or_not_valid_gives_no_trace_id(span):
    with trace.use_span(span):
        assert current_trace_labels() is None


def test_outside_a_span_there_is_no_trace_id():
    assert current_trace_labels() is None


def test_opentelemetry_is_not_imported_to_find_the_trace():
    code = (
        "import sys; from zerowatch.metrics.exporters.trace_context import current_trace_labels; "
        "print(current_trace_labels(), 'opentelemetry' in sys.modules)"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)

    assert run.stdout == "None False\n", run.stderr


def test_text_is_read_back_as_the_values_it_was_rendered_from():
    recorder = recorder_of_everything()
    recorder.set(MEMORY_BYTES, 2**34, 'odd "device"\\\u2028\n', "allocated")
    written = recorder.snapshot()

    _, text = exposition(written, 3, "", with_process=True)

    assert read_exposition(text.decode(), CATALOG).values == written.values


def test_series_of_lean_detail_are_read_without_the_labels_they_lost():
    recorder = Recorder()
    recorder.add(COMM_EXPOSED_SECONDS, 1, "dp")
    recorder.add(COMM_EXPOSED_SECONDS, 2, "tp")
    _, text = exposition(served(recorder.snapshot(), "lean"), 0, "")

    read = read_exposition(text.decode(), [COMM_EXPOSED_SECONDS])

    assert read.total(COMM_EXPOSED_SECONDS) == 3


@pytest.mark.parametrize("line", ['zerowatch_steps_total{rank="0} 1', "zerowatch_steps_total x"])
def test_a_damaged_line_of_a_metric_to_read_is_an_error(line):
    with pytest.raises(ValueError):
        read_exposition(f"{line}\n", [STEPS])
