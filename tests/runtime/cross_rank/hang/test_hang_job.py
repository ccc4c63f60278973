"""Real jobs that hang: one rank stops making progress, and the reports name it."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.cross_rank.run_hang_job import Job, running

from zerowatch.metrics.catalog import communication

pytestmark = pytest.mark.jobs

LIMIT_SECONDS = 4
QUICKLY = {
    "ZEROWATCH_HANG_TIMEOUT_SECONDS": str(LIMIT_SECONDS),
    "ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS": "1",
    "ZEROWATCH_SERVE_LINGER_SECONDS": "0",  # scraped once, it would wait for another
}
# Rank 0 is in the gradients' all-reduce, or in the norm's, with anything in flight.
MISSING_RANK = re.compile(
    r"rank 1 has not arrived at \w+ number \d+ of group \w+ \(.+\); "
    r"it (is alive|has sent no heartbeat for at least \d+ s)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job left."""

    exit_codes: list[int]
    reports: dict[str, str]
    recorded: dict[str, set[str]]
    seconds: float | None
    hangs: dict[str, float]
    steps: dict[str, int]


def rank_1_is_stuck(folder: Path, script: str = "hang_job.py") -> JobResult:
    with running(folder, script, RANK_1_IS_STUCK="yes", **QUICKLY) as job:
        job.wait_until(lambda: (folder / "stuck").exists(), "rank 1 is stuck")
        for rank in (0, 1):
            job.wait_for_report(rank)
        hangs = hangs_served(job)
        (folder / "resume").touch()
        return ended(job, hangs=hangs)


def rank_1_is_stuck_in_a_run(folder: Path) -> JobResult:
    return rank_1_is_stuck(folder, "hang_in_run_job.py")


def rank_1_is_stuck_with_ddp(folder: Path) -> JobResult:
    return rank_1_is_stuck(folder, "hang_ddp_job.py")


def rank_1_is_stopped(folder: Path) -> JobResult:
    """Seconds are those from the order to stop to the end of rank 0."""
    with running(folder, ZEROWATCH_HANG_ABORT="true", **QUICKLY) as job:
        job.wait_for_steps(300)  # by then it has sent heartbeats
        (folder / "stop").touch()
        stopped_at = time.monotonic()
        job.wait_for_report(0)
        message = "exits with code 70"
        job.wait_until(lambda: message in job.ranks.output(), message)
        seconds = time.monotonic() - stopped_at
        job.wait_until(lambda: job.ranks.codes()[0] is not None, "rank 0 ends")
        job.signal_rank(1, signal.SIGKILL)
        return ended(job, seconds=seconds, hangs={})


def ended(job: Job, *, hangs: dict[str, float], seconds: float | None = None) -> JobResult:
    return JobResult(
        exit_codes=[rank.returncode for rank in job.ranks.join()],
        reports={file.name: file.read_text() for file in sorted(job.run.glob("hang-*.txt"))},
        recorded={
            file.name: {each["profiling_name"] for each in json.loads(file.read_text())["entries"]}
            for file in job.run.glob("hang-*.flight.json")
        },
        seconds=seconds,
        hangs=hangs,
        steps={log.name: len(log.read_text().splitlines()) for log in job.run.glob("rank-*.jsonl")},
    )


def hangs_served(job: Job) -> dict[str, float]:
    """Scrape each rank for its number of hangs."""
    found = {}
    for target in json.loads((job.run / "targets.json").read_text()):
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=120) as page:
            (line,) = (
                line
                for line in page.read().decode().splitlines()
                if line.startswith(communication.HANGS.name)
            )
        found[target["labels"]["rank"]] = float(line.split()[-1])
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    folder = tmp_path_factory.mktemp("hangs")
    cases = {
        "stuck": rank_1_is_stuck,
        "stopped": rank_1_is_stopped,
        "in a run": rank_1_is_stuck_in_a_run,
        "ddp": rank_1_is_stuck_with_ddp,
    }
    return {name: case(folder / name) for name, case in cases.items()}


def test_every_rank_reports_a_hang_and_the_one_that_detected_it_counts_it(
    jobs: dict[str, JobResult],
) -> None:
    job = jobs["stuck"]

    assert list(job.reports) == ["hang-rank-0-1.txt", "hang-rank-1-1.txt"]
    assert job.hangs == {"0": 1.0, "1": 0.0}  # announced to rank 1, long before its own limit


def test_the_waiting_rank_names_the_missing_one_and_that_one_its_location(
    jobs: dict[str, JobResult],
) -> None:
    waiting, stuck = jobs["stuck"].reports.values()

    assert MISSING_RANK.fullmatch(waiting.splitlines()[0])
    assert stuck.startswith("rank 1 has not arrived at collective number ")
    assert "at block_training (hang_job.py:" in stuck.splitlines()[0]
    assert "another rank announced the hang" in stuck.splitlines()[0]
    assert "in block_training" in stuck.partition("Python stacks")[2]


def test_in_a_training_run_the_waiting_rank_names_the_one_whose_batch_is_not_there(
    jobs: dict[str, JobResult],
) -> None:
    waiting, stuck = (text.splitlines()[0] for text in jobs["in a run"].reports.values())

    assert MISSING_RANK.fullmatch(waiting)
    assert "all_gather number " in waiting
    assert "(zerowatch's own, " in waiting
    assert "where rank 0 waits; it is in data and in no recorded collective" in stuck
    assert "at block_training (hang_in_run_job.py:" in stuck
    assert jobs["in a run"].steps == {"rank-0.jsonl": 20, "rank-1.jsonl": 20}


def test_with_ddp_whose_calls_have_no_record_the_late_rank_is_named_by_both(
    jobs: dict[str, JobResult],
) -> None:
    waiting, stuck = (text.splitlines()[0] for text in jobs["ddp"].reports.values())

    assert waiting.startswith("rank 1 has not arrived at an unrecorded collective of group dp ")
    assert "rank 0 is in backward" in waiting
    assert stuck.startswith("rank 1 has not arrived at an unrecorded collective of ")
    assert "where rank 0 waits; it is in other and in no recorded collective" in stuck
    assert "at block_training (hang_ddp_job.py:" in stuck


def test_a_report_comes_with_a_flight_recorder_dump(jobs: dict[str, JobResult]) -> None:
    recorded = jobs["stuck"].recorded

    assert recorded.keys() == {"hang-rank-0-1.flight.json", "hang-rank-1-1.flight.json"}
    assert all("gloo:all_reduce" in names for names in recorded.values())


def test_training_is_not_touched_and_goes_on_after_a_hang(jobs: dict[str, JobResult]) -> None:
    job = jobs["stuck"]

    assert job.exit_codes == [0, 0]
    assert job.steps == {"rank-0.jsonl": 20, "rank-1.jsonl": 20}


def test_a_stopped_rank_is_named_and_abort_ends_the_waiting_one(jobs: dict[str, JobResult]) -> None:
    job = jobs["stopped"]

    assert list(job.reports) == ["hang-rank-0-1.txt"]
    assert MISSING_RANK.fullmatch(job.reports["hang-rank-0-1.txt"].splitlines()[0])
    assert job.exit_codes == [70, -signal.SIGKILL]
    assert job.seconds > 2 * LIMIT_SECONDS
