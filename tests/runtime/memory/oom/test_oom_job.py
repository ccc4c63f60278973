"""Real jobs that run out of memory on CPU: predicted, reported, and ended by their own error.

Two run under RLIMIT_AS. A third is killed by the kernel, which the next start of a job reports.

Covers `oom_context.py`.
"""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS, Finished
from scripts.memory.oom_cgroup import memory_cgroup

from zerowatch.runtime.common.format_numbers import format_bytes

pytestmark = pytest.mark.jobs

MIB = 2**20
ALARM_RISK, LEAST_LEAD_STEPS = 0.5, 20
# The job reads its memory a little later than the watch, which has its reserve of 4 MiB again.
TOLERANCE_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Output of a job: its own measurements, step log, report and printed lines."""

    finished: Finished
    measured: dict[str, Any]
    records: list[dict[str, Any]]
    report: list[str]
    files: list[str]

    @property
    def first_alarm(self) -> int | None:
        steps = (
            record["step"]
            for record in self.records
            if record["oom_risk_ratio"].get("cpu", 0.0) > ALARM_RISK
        )
        return next(steps, None)

    def num_bytes(self, prefix: str) -> int:
        """Return the bytes in the line of the report with this prefix."""
        (line,) = [line for line in self.report if line.startswith(prefix)]
        found = re.search(r"\((\d+) bytes\)|(\d+) bytes", line)
        assert found is not None
        return int(found[1] or found[2])


def train(folder: Path, *arguments: object, server: int = 0) -> Finished:
    """Run a job of one rank. Heap beyond the threshold is returned: sizes are repeatable."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    script = SCRIPTS / "memory" / "oom_job.py"
    variables = {
        "MALLOC_MMAP_THRESHOLD_": "131072",
        # The advice of a slow machine may otherwise come between the error and the exit.
        "ZEROWATCH_TUNER_MODE": "off",
    }
    return start_ranks(1, script, *arguments, cwd=folder, variables=variables, first_server=server)


def ended(folder: Path, finished: Finished) -> JobResult:
    (measured,) = folder.glob("measured.json")
    (log,) = (folder / "runs").glob("*/rank-0.jsonl")
    (report,) = log.parent.glob("oom/rank-0-1.txt")
    return JobResult(
        finished=finished,
        measured=json.loads(measured.read_text()),
        records=[json.loads(line) for line in log.read_text().splitlines()],
        report=report.read_text().splitlines(),
        files=sorted(path.relative_to(log.parent).as_posix() for path in log.parent.rglob("*")),
    )


KINDS = ("leak", "long")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    """Run both jobs at the same time, as they mostly wait."""
    folder = tmp_path_factory.mktemp("ooms")
    with ThreadPoolExecutor() as pool:
        ends = {
            kind: pool.submit(train, folder / kind, kind, server=server)
            for server, kind in enumerate(KINDS)
        }
        return {kind: ended(folder / kind, end.result()) for kind, end in ends.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_ends_by_its_own_unchanged_error(kind: str, jobs: dict[str, JobResult]) -> None:
    job = jobs[kind]

    assert job.finished.returncode == 1
    assert job.measured["type"] == "RuntimeError"
    assert "DefaultCPUAllocator: can't allocate memory" in job.measured["text"]
    assert job.measured["notes"] == []
    assert job.measured["chained"] == ["None", "None"]
    *output, last = job.finished.stderr.splitlines()
    assert "\n".join(output).endswith(f"RuntimeError: {job.measured['text']}")
    assert last.startswith("zerowatch: report of this run: ")


@pytest.mark.parametrize("kind", KINDS)
def test_one_report_is_written_and_its_path_logged(kind: str, jobs: dict[str, JobResult]) -> None:
    job = jobs[kind]

    logged = [line for line in job.finished.stderr.splitlines() if "out of memory on cpu" in line]

    assert [file for file in job.files if file.startswith("oom/")] == ["oom/rank-0-1.txt"]
    assert len(logged) == 1
    assert job.report[0] in logged[0]
    assert logged[0].endswith("oom/rank-0-1.txt)")
    assert not [file for file in job.files if file.endswith(".alive.json")]  # clean exit


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_has_the_request_the_step_and_the_limit(
    kind: str, jobs: dict[str, JobResult]
) -> None:
    job = jobs[kind]
    now = job.measured["at_the_end"]
    requested = re.search(r"tried to allocate (\d+) bytes", job.measured["text"])
    assert requested is not None
    step = job.measured["step"]

    place = rf"out of memory on cpu in (forward|backward|optimizer) of step {step + 1}, "
    assert re.match(place + r"micro-batch 1: \S+ \w+ requested, \S+ \w+ free", job.report[0])
    assert job.num_bytes("The failing request: ") == int(requested[1])
    assert f"  {job.measured['text']}" in job.report
    assert any(line.startswith(f"last completed step: {step}; phase: ") for line in job.report)
    samples, length = job.measured["shape"]
    assert f"current micro-batch 1 of 1: {samples} x {length}" in job.report
    limit = job.measured["limit"] - now["VmSize"] + now["in_use"]
    assert job.num_bytes("  limit: ") == pytest.approx(limit, abs=TOLERANCE_BYTES)
    assert any("set by RLIMIT_AS (ulimit -v) of " in line for line in job.report)
    in_use = job.num_bytes("  in use as the error passed: ")
    assert in_use == pytest.approx(now["in_use"], abs=TOLERANCE_BYTES)
    assert job.num_bytes("  virtual size: ") == pytest.approx(now["VmSize"], abs=TOLERANCE_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_has_all_categories_and_their_sizes(
    kind: str, jobs: dict[str, JobResult]
) -> None:
    job = jobs[kind]
    parameters = job.measured["parameters"]

    assert job.num_bytes("  parameters ") == pytest.approx(parameters, rel=0.01)
    assert job.num_bytes("  gradients ") == pytest.approx(parameters, rel=0.01)
    # The master copy and Adam's two states.
    assert job.num_bytes("  optimizer ") == pytest.approx(3 * parameters, rel=0.01)
    assert job.num_bytes("  activations ") > 0
    for other in ("comm_buffers", "other"):
        assert job.num_bytes(f"  {other} ") >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_peaks_are_those_of_the_log(kind: str, jobs: dict[str, JobResult]) -> None:
    job = jobs[kind]
    logged = {
        record["step"]: record["memory_bytes"]["cpu"]["peak_allocated"]
        for record in job.records
        if record["memory_bytes"]
    }

    start = next(n for n, line in enumerate(job.report) if line.startswith("Last peaks"))
    rows = [line.split() for line in job.report[start + 2 : start + 22]]

    assert [int(row[0]) for row in rows] == sorted(logged)[-20:]
    assert [" ".join(row[1:3]) for row in rows] == [
        format_bytes(logged[step]) for step in sorted(logged)[-20:]
    ]
    assert int(rows[-1][0]) >= job.measured["step"] - 1


def test_a_leak_is_predicted_at_least_twenty_steps_before_the_error(
    jobs: dict[str, JobResult],
) -> None:
    job = jobs["leak"]
    end = job.measured["step"]

    alarm = job.first_alarm
    assert alarm is not None
    assert end - alarm >= LEAST_LEAD_STEPS
    assert "memory of cpu is likely to run out within 50 steps" in job.finished.stderr
    (line,) = [line for line in job.report if line.startswith("Predicted: yes")]
    numbers = re.search(r"after step (\d+), (\d+) steps before", line)
    assert numbers is not None
    assert int(numbers[1]) <= alarm
    assert int(numbers[1]) + int(numbers[2]) == end


def test_a_batch_that_is_too_long_is_predicted_as_it_begins_and_not_before(
    jobs: dict[str, JobResult],
) -> None:
    job = jobs["long"]

    assert job.measured["shape"] == [8, 8192]
    assert job.first_alarm is None
    alarm = job.finished.stderr.index("this micro-batch (8 x 8192) is likely not to fit")
    assert alarm < job.finished.stderr.index("out of memory on cpu")
    assert any(line.startswith("Predicted: yes, by the risk of this") for line in job.report)


def test_the_need_of_half_a_batch_that_is_far_too_long_is_extrapolated(
    jobs: dict[str, JobResult],
) -> None:
    """The need grows with tokens: without a limit, 16.3 KiB of RSS beyond the floor for each.

    Half the batch has eight times the tokens of any batch that was read. A rise of 4 MiB more for
    the longest of them (RSS is counted in pages of threads) is extrapolated as pairs of tokens,
    as attention has: 1.5 times the need, seen in a fifth of the runs.
    """
    job = jobs["long"]
    floor = min(
        record["memory_bytes"]["cpu"]["allocated"]
        for record in job.records
        if record["memory_bytes"]
    )

    (half,) = [line for line in job.report if "half the micro-batch, 4 of 8 samples" in line]
    need = re.search(r"about ([\d.]+) (MiB|GiB)", half)

    assert need is not None
    need_bytes = float(need[1]) * {"MiB": MIB, "GiB": 1024 * MIB}[need[2]]
    assert half.strip().startswith("does not fit")
    assert 0.9 < (need_bytes - floor) / (4 * 8192 * 16.3 * 1024) < 1.8


def test_a_job_killed_by_the_oom_killer_is_reported_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with memory_cgroup(700 * MIB) as cgroup:
        killed = train(folder, "leak", cgroup)
        runs = list((folder / "runs").iterdir())
        later = train(folder, "short")

    assert killed.returncode == -signal.SIGKILL
    (run,) = runs
    killed_line = "rank 0 was killed by the kernel's OOM killer, after step "
    (line,) = [line for line in later.stderr.splitlines() if killed_line in line]
    assert line.endswith(f"(report: {run / 'oom' / 'rank-0-killed.txt'})")
    assert later.returncode == 0
    report = (run / "oom" / "rank-0-killed.txt").read_text()
    last = json.loads((run / "rank-0.jsonl").read_text().splitlines()[-1])["step"]
    assert f"{killed_line}{last}; last reading: " in report
    assert list(run.glob("*.alive.json")) == []
