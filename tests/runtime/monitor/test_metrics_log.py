"""Tests of the metrics log: it has all that /metrics can answer, whatever the disk does.

They cover metrics/metrics_line.py and metrics/exporters/series_table.py too.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_classic
from recorded_metrics import STARTED, RecordedRank

from zerowatch.metrics.catalog import communication, memory, training
from zerowatch.metrics.exporters import series_table
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import Detail
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS
from zerowatch.runtime.monitor.metrics_log import FULL_LINE_EVERY
from zerowatch.runtime.reports.metrics_reader import RankMetrics, read_metrics

Labels = tuple[tuple[str, str], ...]


def scraped(recorder: Recorder, rank: int) -> dict[tuple[str, Labels], float]:
    """What a scrape of /metrics with full detail reads, by name and labels without the rank."""
    _, text = exposition(recorder.snapshot(), rank, "", with_process=True)
    found = {}
    for family in parse_classic(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("rank") == str(rank)
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def logged(rank: RankMetrics) -> dict[tuple[str, Labels], float]:
    return {(key.name, key.labels): value for key, value in rank.last.items()}


def train(recorder: Recorder, steps: int) -> None:
    """Write metrics of every kind, as monitoring does."""
    recorder.start_counters(training.METRICS)
    recorder.add(training.STEPS, steps)
    recorder.set(training.LOSS, 1.0 / 3 / steps)
    recorder.set(training.STEP_DURATION_QUANTILE, 0.25, "0.5")
    recorder.add(communication.COMM_CAUSE_SECONDS, 0.125, "bandwidth")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 3 * 2**30, "cpu", "other")
    recorder.set_info(training.RUN_END_INFO, "completed")
    for step in range(steps):
        recorder.observe(training.STEP_DURATION, 0.1 * (step + 1))


@pytest.mark.parametrize("detail", ["full", "lean"])
def test_the_log_has_what_a_scrape_with_full_detail_reads(tmp_path: Path, detail: Detail) -> None:
    with RecordedRank(tmp_path, rank=1, serve={"detail": detail}) as rank:
        rank.tick()
        for steps in range(1, 5):
            train(rank.recorder, steps)
            rank.tick()
        expected = scraped(rank.recorder, 1)

    found = logged(read_metrics(tmp_path).ranks[1])
    ours = {key for key in expected if key[0].startswith("zerowatch_")}
    assert found.keys() == expected.keys()
    assert {key: found[key] for key in ours} == {key: expected[key] for key in ours}
    assert len(ours) > 30
    # The figures of the process change from moment to moment.
    assert any(key[0] == "process_open_fds" for key in found)


def test_later_lines_have_only_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_table, "process_samples", lambda with_process: [])
    with RecordedRank(tmp_path) as rank:
        rank.recorder.set(training.LOSS, 2.0)
        rank.recorder.set(training.WORLD_SIZE, 2)
        rank.tick()
        rank.recorder.set(training.LOSS, 1.5)
        rank.tick()
        rank.recorder.set(training.RUN_ACTIVE, 1)  # begins later
        rank.tick()

    first, second, third, last = map(json.loads, rank.path.read_text().splitlines())
    names = [series["name"] for series in first["series"]]
    assert sorted(first["indices"]) == list(range(len(names)))
    assert [names[index] for index in second["indices"]] == ["zerowatch_loss"]
    assert second["values"] == [1.5]
    assert "series" not in second
    assert [series["name"] for series in third["series"]] == ["zerowatch_run_active"]
    assert third["indices"] == [len(names)]
    assert last["indices"] == []


def test_values_that_are_no_numbers_and_series_that_end_are_kept_apart(tmp_path: Path) -> None:
    with RecordedRank(tmp_path) as rank:
        rank.recorder.set(training.LOSS, math.nan)
        rank.recorder.set(training.GRADIENT_NORM, math.inf)
        rank.recorder.set(memory.OOM_RISK, 0.5, "cpu")
        rank.tick()
        rank.recorder.remove(memory.OOM_RISK, "cpu")
        rank.tick()

    metrics = read_metrics(tmp_path).ranks[0]
    assert metrics.value("zerowatch_gradient_norm") == math.inf
    loss = metrics.value("zerowatch_loss")
    assert loss is not None and math.isnan(loss)
    assert metrics.value("zerowatch_oom_risk_ratio") is None
    assert list(metrics.over_time("zerowatch_oom_risk_ratio")[1][:1]) == [0.5]


def test_a_line_is_written_every_interval_and_at_the_end(tmp_path: Path) -> None:
    with RecordedRank(tmp_path, metrics_interval_seconds=15) as rank:
        for _ in range(40):
            rank.tick(1.0)
        rank.tick(100.0)  # the thread had no time to run
        rank.tick(1.0)
        rank.tick(1.0)

    seconds = read_metrics(tmp_path).ranks[0].unix_seconds - STARTED
    assert list(seconds) == [0, 15, 30, 140, 142]


def test_with_an_interval_of_0_no_file_is_written(tmp_path: Path) -> None:
    with RecordedRank(tmp_path, metrics_interval_seconds=0) as rank:
        rank.tick(1.0)

    assert list(tmp_path.iterdir()) == []


def test_of_many_ranks_one_per_node_writes_its_metrics(tmp_path: Path) -> None:
    for rank in (8, 9):
        with RecordedRank(tmp_path, rank, world_size=65, local_rank=rank - 8) as one:
            one.tick()

    assert list(read_metrics(tmp_path).ranks) == [8]


def test_every_segment_can_be_read_by_itself_and_the_oldest_is_deleted(tmp_path: Path) -> None:
    limits = {"segment_bytes": 4096, "max_segments": 3}
    with RecordedRank(tmp_path, **limits) as rank:
        for steps in range(300):
            rank.recorder.add(training.STEPS, 1)
            rank.recorder.set(training.LOSS, 1 / (1 + steps))
            rank.tick()

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics-0.1.jsonl", "metrics-0.2.jsonl", "metrics-0.jsonl"]
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text().splitlines()[0])["head"]["rank"] == 0
    found = read_metrics(tmp_path)
    assert found.ranks[0].value("zerowatch_steps_total") == 300
    [problem] = found.problems
    assert "older segments were deleted" in problem


def test_the_list_of_series_is_repeated_now_and_then(tmp_path: Path) -> None:
    with RecordedRank(tmp_path) as rank:
        for _ in range(FULL_LINE_EVERY + 1):
            rank.tick()

    lines = [json.loads(line) for line in rank.path.read_text().splitlines()]
    heads = [number for number, line in enumerate(lines) if "head" in line]
    assert heads == [0, FULL_LINE_EVERY]


def test_after_a_disk_error_the_log_goes_on_with_a_full_line(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "run"
    folder.write_text("in the way")
    with RecordedRank(folder, metrics_interval_seconds=1) as rank:
        rank.recorder.set(training.LOSS, 2.0)
        rank.tick()
        folder.unlink()
        rank.tick(RETRY_SECONDS)
        rank.tick()

    assert rank.log.dropped == 2
    assert len(caplog.records) == 1
    found = read_metrics(folder)
    assert found.ranks[0].value("zerowatch_loss") == 2.0
    [problem] = found.problems
    assert "2 records are missing" in problem


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    folders = [str(Path(__file__).parents[2] / "support")]
    script = f"""
import resource, sys
sys.path[:0] = {folders!r}
from pathlib import Path
from recorded_metrics import RecordedRank
from zerowatch.metrics.catalog import training
with RecordedRank(Path({str(tmp_path)!r})) as rank:
    # The kernel refuses more, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    for step in range(50):
        rank.recorder.set(training.LOSS, step)
        rank.tick()
print(rank.log.dropped)
"""

    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600
    )

    assert finished.returncode == 0, finished.stderr
    found = read_metrics(tmp_path, max_snapshots=100)
    num_read = len(found.ranks[0].unix_seconds)
    assert 0 < num_read < 50
    assert int(finished.stdout) == 51 - num_read
    rest = (tmp_path / "metrics-0.jsonl").read_bytes().rpartition(b"\n")[2]
    is_cut = rest != b"" and not rest.endswith(b"}")  # the limit may be the end of a line
    assert bool(found.problems) == is_cut


def test_a_truncated_file_goes_on_with_a_full_line(tmp_path: Path) -> None:
    with RecordedRank(tmp_path) as rank:
        rank.recorder.set(training.LOSS, 2.0)
        rank.tick()
        rank.path.write_text("")  # as logrotate does with `copytruncate`
        rank.tick()

    assert read_metrics(tmp_path).ranks[0].value("zerowatch_loss") == 2.0


def test_the_cost_of_the_lines_is_in_the_log(tmp_path: Path) -> None:
    with RecordedRank(tmp_path) as rank:
        rank.tick()
        rank.tick()

    assert len(read_metrics(tmp_path).ranks[0].cost_seconds) == 2
