"""Real jobs that send traces, metrics and log lines: to a collector, to none, to a dead one."""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from typing import Any

import pytest
from fakes.otlp_collector import Collector, attributes_of
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS, Finished, own_lines

from zerowatch.metrics.catalog.training import RUN_ACTIVE, STEPS
from zerowatch.runtime.monitor.otel_spans import is_sampled, trace_id_of

pytestmark = pytest.mark.jobs

RUN, STEPS_TRAINED, EVERY_STEPS = "night-7", 4, 2
SAMPLED = [
    step
    for step in range(1, STEPS_TRAINED + 1)
    if is_sampled(trace_id_of(RUN, step), 1 / EVERY_STEPS)
]
SECRET = "hunter2"
MOST_EXTRA_SECONDS = 2.0


class Job:
    """What a job of two ranks left behind, and what the collector got of it."""

    def __init__(self, folder, collector: Collector) -> None:
        self.results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        logs = [folder / "runs" / RUN / f"rank-{rank}.jsonl" for rank in (0, 1)]
        self.records = [
            {record["step"]: record for record in map(json.loads, log.read_text().splitlines())}
            for log in logs
        ]
        self.collector = collector
        self.spans = collector.spans()

    def of(self, rank: int, step: int) -> list[Any]:
        """Return one rank's spans of a step, its root first."""
        trace_id = trace_id_of(RUN, step).to_bytes(16, "big")
        spans = [
            span
            for resource, span in self.spans
            if resource["zerowatch.rank"] == rank and span.trace_id == trace_id
        ]
        return sorted(spans, key=lambda span: span.name != "train.step")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    script = SCRIPTS / "monitor" / "traced_job.py"
    with Collector() as collector:
        variables = {
            "TORCH_FR_BUFFER_SIZE": "100000",
            "ZEROWATCH_RUN_ID": RUN,
            "ZEROWATCH_OTEL_ENDPOINT": collector.endpoint,
            "ZEROWATCH_OTEL_EVERY_STEPS": str(EVERY_STEPS),
            "ZEROWATCH_OTEL_METRICS": "true",
            "ZEROWATCH_OTEL_LOGS": "true",
        }
        finished = start_ranks(
            2, script, folder, f"--key={SECRET}", cwd=folder, variables=variables
        )
        assert finished.returncode == 0, finished.stderr
        yield Job(folder, collector)


def test_final_weights_are_bitwise_equal_with_traces_and_without_a_watch(job):
    for rank in job.results:
        assert rank["trained"]
        assert rank["bitwise_equal"]


def test_all_ranks_trace_the_same_steps_under_the_same_ids(job):
    assert 0 < len(SAMPLED) < STEPS_TRAINED
    traced = defaultdict(set)
    for resource, span in job.spans:
        traced[resource["zerowatch.rank"]].add(span.trace_id)

    expected = {trace_id_of(RUN, step).to_bytes(16, "big") for step in SAMPLED}
    assert traced == {0: expected, 1: expected}


def test_a_trace_has_one_root_and_every_parent_is_in_it(job):
    for step in SAMPLED:
        spans = job.of(0, step) + job.of(1, step)
        ids = {span.span_id for span in spans}
        parents = [span.parent_span_id for span in spans if span.parent_span_id]
        assert len(ids) == len(spans)
        assert len(parents) == len(spans) - 1
        assert set(parents) <= ids
        assert job.of(1, step)[0].parent_span_id == job.of(0, step)[0].span_id


def test_a_step_has_spans_for_its_phases_and_each_of_its_collectives(job):
    for rank in (0, 1):
        for step in SAMPLED:
            root, *rest = job.of(rank, step)
            names = [span.name for span in rest]
            calls = job.records[rank][step]["collectives"]
            assert root.name == "train.step"
            assert len(rest) < 20
            # Two micro-batches, of which the second updates.
            assert [names.count(name) for name in ("forward", "backward", "optimizer")] == [2, 2, 2]
            for op, totals in calls.items():
                assert names.count(f"comm {op}") == totals["calls"]


def test_spans_lie_within_their_step_and_add_up_to_its_phases(job):
    for rank in (0, 1):
        for step in SAMPLED:
            root, *rest = job.of(rank, step)
            record = job.records[rank][step]
            seconds = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
            assert seconds == pytest.approx(record["seconds"], abs=1e-6)
            assert root.end_time_unix_nano / 1e9 == pytest.approx(
                record["ended_at_unix_seconds"], abs=0.01
            )
            for span in rest:
                assert root.start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= root.end_time_unix_nano
            for phase in ("forward", "backward", "optimizer"):
                spent = sum(
                    span.end_time_unix_nano - span.start_time_unix_nano
                    for span in rest
                    if span.name == phase
                )
                assert spent / 1e9 == pytest.approx(record["phase_seconds"][phase], abs=1e-4)


def test_a_root_span_has_the_attributes_of_its_step(job):
    root, *_ = job.of(1, SAMPLED[0])

    record = job.records[1][SAMPLED[0]]
    attributes = attributes_of(root)
    assert (attributes["zerowatch.run"], attributes["zerowatch.rank"]) == (RUN, 1)
    assert (attributes["zerowatch.step"], attributes["zerowatch.sampled_by"]) == (
        SAMPLED[0],
        "chance",
    )
    assert attributes["zerowatch.loss"] == pytest.approx(record["loss"])
    assert attributes["zerowatch.comm_exposed_seconds"] == record["comm_exposed_seconds"]


def test_the_resource_has_rank_and_host_and_no_command_line(job):
    instances = {resource["service.instance.id"] for resource, _ in job.spans}

    assert instances == {f"{RUN}/0", f"{RUN}/1"}
    assert SECRET not in str(job.collector.requests)


def test_the_last_metrics_have_the_end_of_the_run(job):
    last = {
        (attributes_of(point)["rank"], metric.name): point.as_double
        for metric in job.collector.metrics()
        if metric.name in (STEPS.name, RUN_ACTIVE.name)
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    }

    assert last == {
        ("0", STEPS.name): STEPS_TRAINED,
        ("1", STEPS.name): STEPS_TRAINED,
        ("0", RUN_ACTIVE.name): 0,
        ("1", RUN_ACTIVE.name): 0,
    }


def test_log_lines_of_zerowatch_are_sent_and_the_scripts_are_not(job):
    lines = [line.body.string_value for line in job.collector.lines()]

    assert any(line.startswith("watching 2 rank(s)") for line in lines)
    assert not any("script's own" in line for line in lines)


def train_five_steps(folder, **variables: str) -> Finished:
    script = SCRIPTS / "monitor" / "traced_end.py"
    return start_ranks(1, "-m", "zerowatch", script, cwd=folder, variables=variables)


def end_of_a_job(folder, **variables: str) -> tuple[float, list[str]]:
    """Train five steps; return the seconds from the last of them to the process's end, and lines.

    The last line says whether the SDK was loaded.
    """
    finished = train_five_steps(folder, **variables)
    ended_at = time.time()
    assert finished.returncode == 0, finished.stderr
    assert "hook" not in finished.stderr
    assert "Traceback" not in finished.stderr
    lines = own_lines(finished)
    return ended_at - float(lines[0].removeprefix("out: ")), lines


@pytest.fixture(scope="module")
def usual_end(tmp_path_factory):
    return end_of_a_job(tmp_path_factory.mktemp("usual"))


def test_the_sdk_is_not_loaded_if_nothing_is_to_be_sent(usual_end):
    assert usual_end[1][-1] == "out: False"


@pytest.fixture(params=["refuses", "never answers"])
def dead_port(request):
    """A port at which nobody listens, or somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "refuses":
            server.close()
        yield port


@pytest.mark.slow
def test_a_dead_collector_costs_the_end_of_a_run_two_seconds_at_most(
    tmp_path_factory, usual_end, dead_port
):
    usual_seconds, extra_seconds = usual_end[0], float("inf")
    for attempt in range(3):  # other load on the machine may lengthen the one and not the other
        if attempt:
            usual_seconds = end_of_a_job(tmp_path_factory.mktemp("usual"))[0]
        seconds, lines = end_of_a_job(
            tmp_path_factory.mktemp("dead"),
            ZEROWATCH_OTEL_ENDPOINT=f"http://127.0.0.1:{dead_port}",
            ZEROWATCH_OTEL_EVERY_STEPS="1",
            ZEROWATCH_OTEL_METRICS="true",
            ZEROWATCH_OTEL_LOGS="true",
        )
        assert lines[-1] == "out: True"
        extra_seconds = min(extra_seconds, seconds - usual_seconds)
        if extra_seconds <= MOST_EXTRA_SECONDS:
            break

    assert extra_seconds <= MOST_EXTRA_SECONDS


def test_without_the_extra_one_line_names_it_and_training_goes_on(tmp_path):
    finished = train_five_steps(
        tmp_path, WITHOUT_OTEL="yes", ZEROWATCH_OTEL_ENDPOINT="http://127.0.0.1:4318"
    )

    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("zerowatch[otel]") == 1
    assert own_lines(finished)
