"""Tests of the checks of a host whose disk, ports and limits are given.

Real ports and disks are in `test_planted_faults_are_named.py`.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from servers.free_port import free_port

from zerowatch.metrics.settings import Settings
from zerowatch.runtime.cli.check import host
from zerowatch.runtime.cli.check.host import check_disk, check_limits, check_ports
from zerowatch.runtime.cli.check.verdicts import Finding, Job, Verdict

MIB = 2**20
Usage = namedtuple("Usage", "total used free")


def disk_finding(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int = 10 * 2**30,
    kind: str = "ext4",
    seconds: float = 0.5,
) -> Finding:
    """The finding on a disk, of two ranks whose logs of steps and metrics grow to 30 MiB each."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    monkeypatch.setattr(host, "_file_system", lambda path: kind)
    monkeypatch.setattr(host, "_write_seconds", lambda path: seconds)
    log = {"folder": folder, "segment_bytes": 10 * MIB, "max_segments": 3}
    [finding] = check_disk(Job(local_ranks=2, settings=Settings(run_log=log)))
    return finding


@pytest.mark.parametrize(
    ("disk", "verdict", "text", "advice"),
    [
        ({}, Verdict.OK, "(ext4): writable, 10.0 GiB free", ""),
        (
            {"kind": "nfs4"},
            Verdict.OK,
            "(nfs4): writable, 10.0 GiB free, a network file system",
            "",
        ),
        (
            {"free": 64 * MIB - 1},
            Verdict.FAILED,
            "(ext4): writable, 64 MiB free",
            "free some space, or set run_log.folder to another disk",
        ),
        (
            {"free": 64 * MIB},
            Verdict.WARNING,
            "(ext4): writable, 64 MiB free; the logs of 2 rank(s) grow to 120 MiB",
            "free some space, or set run_log.folder to another disk, or lower run_log.max_segments",
        ),
        ({"free": 120 * MIB}, Verdict.OK, "(ext4): writable, 120 MiB free", ""),
        (
            {"kind": "ramfs"},
            Verdict.WARNING,
            "(ramfs): writable, 10.0 GiB free; it lies in memory and is lost at the next boot",
            "set run_log.folder to a disk",
        ),
        (
            {"kind": "overlay"},
            Verdict.WARNING,
            "(overlay): writable, 10.0 GiB free; it lies in the container and is lost with it",
            "set run_log.folder to a mounted volume",
        ),
        ({"seconds": 2.0}, Verdict.OK, "(ext4): writable, 10.0 GiB free", ""),
        (
            {"seconds": 2.5},
            Verdict.WARNING,
            "(ext4): writable, 10.0 GiB free; writing 1 MiB takes 2.5 s",
            "set run_log.folder to another disk",
        ),
    ],
)
def test_a_disk_is_judged_by_its_space_kind_and_speed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk: dict[str, object],
    verdict: Verdict,
    text: str,
    advice: str,
) -> None:
    finding = disk_finding(tmp_path / "runs", monkeypatch, **disk)  # type: ignore[arg-type]

    assert (finding.verdict, finding.advice) == (verdict, advice)
    assert finding.text == f"run folder {tmp_path}/runs {text}"
    assert finding.figures == {
        "free_bytes": disk.get("free", 10 * 2**30),
        "write_seconds": disk.get("seconds", 0.5),
    }


@pytest.mark.parametrize(
    ("number", "text", "advice"),
    [
        (errno.ENOSPC, "the disk is full, 3 MiB free", "free some space"),
        (errno.EDQUOT, "the disk is full, 3 MiB free", "free some space"),
        (errno.EACCES, "cannot be written: Permission denied", "ZEROWATCH_RUN_LOG_FOLDER"),
    ],
)
def test_a_folder_that_cannot_be_written_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str, advice: str
) -> None:
    def refuse(folder: Path) -> float:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "_write_seconds", refuse)
    monkeypatch.setattr(host, "_file_system", lambda path: "ext4")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * MIB))
    new, old = (
        next(iter(check_disk(Job(settings=Settings(run_log={"folder": folder})))))
        for folder in (tmp_path / "a" / "b", tmp_path)
    )

    assert new.text == f"run folder {tmp_path}/a/b, to be made in {tmp_path} (ext4): {text}"
    assert old.text == f"run folder {tmp_path} (ext4): {text}"
    assert new.verdict == Verdict.FAILED and advice in new.advice


def test_a_run_without_a_log_of_metrics_needs_half_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 80 * MIB))
    log = {"folder": tmp_path, "segment_bytes": 10 * MIB, "max_segments": 8}

    with_metrics, without = (
        next(iter(check_disk(Job(settings=Settings(run_log={**log, **changes})))))
        for changes in ({}, {"metrics_interval_seconds": 0})
    )

    assert "grow to 160 MiB" in with_metrics.text
    assert "grow to" not in without.text


def test_a_run_that_logs_nothing_needs_no_folder() -> None:
    [finding] = check_disk(Job(settings=Settings(run_log={"enabled": False})))

    assert finding.verdict == Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("free", "soft", "hard", "expected"),
    [
        (2**30, 4096, 5000, ["shared memory and the limit of open files (4096) suffice"]),
        (
            2**30 - 1,
            resource.RLIM_INFINITY,
            5000,
            [
                "/dev/shm: 1.00 GiB free of 8.00 GiB; DataLoader workers and NCCL share data there "
                "and end with a bus error when it is full"
            ],
        ),
        (
            2**30,
            4095,
            5000,
            [
                "limit of open files: 4095 (hard limit 5000); workers and the connections of the "
                "ranks to the job's store may need 4096"
            ],
        ),
    ],
)
def test_shared_memory_and_open_files_have_a_least(
    monkeypatch: pytest.MonkeyPatch, free: int, soft: int, hard: int, expected: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 * 2**30, 0, free))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(Path, "is_dir", lambda path: True)

    assert [each.text for each in check_limits(Job())] == expected


@pytest.mark.parametrize(
    ("hard", "advised"), [(4096, 4096), (5000, 5000), (100_000, 65_536), (-1, 65_536)]
)
def test_the_advised_limit_of_open_files_is_within_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, hard: int, advised: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**30))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, hard))

    assert [each.advice for each in check_limits(Job())] == [f"ulimit -n {advised}"]


@pytest.mark.parametrize(("soft", "hard"), [(256, 256), (1024, 4095), (4095, 4095)])
def test_a_hard_limit_of_open_files_that_is_too_low_is_to_be_raised_first(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**30))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))

    [finding] = check_limits(Job())

    # `ulimit -n 4096` would be refused.
    assert not finding.advice.startswith("ulimit")
    for named in ("hard limit", "4096", "limits.conf", "LimitNOFILE", "--ulimit nofile"):
        assert named in finding.advice


@pytest.mark.parametrize(
    ("ranks", "soft", "advice"),
    [(600, 4096, ""), (1024, 6143, "ulimit -n 6144"), (1024, 6144, "")],
)
def test_each_rank_needs_a_connection_of_the_store_for_torch_and_four_for_zerowatch(
    monkeypatch: pytest.MonkeyPatch, ranks: int, soft: int, advice: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**30))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 6144))

    [finding] = check_limits(Job(world_size=ranks))

    assert finding.advice == advice
    assert (f"the {ranks} ranks" in finding.text) is (advice != "")


def ports_findings(
    monkeypatch: pytest.MonkeyPatch, taken: dict[int, int], job: Job
) -> list[tuple[Verdict, str, str]]:
    """The findings on ports, given the error of each that cannot be opened."""

    def error_of(address: str, port: int) -> OSError | None:
        number = taken.get(port)
        return None if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "_bind_error", error_of)
    monkeypatch.setattr(host, "_listener", lambda port: f"the owner of {port}")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    return [(each.verdict, each.text, each.advice) for each in check_ports(job)]


def serving(**serve: object) -> Settings:
    return Settings(serve={"host": "127.0.0.1", "port": 9464, **serve})


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (1, "ports 9464 of 127.0.0.1 for the metrics are free"),
        (3, "ports 9464 to 9466 of 127.0.0.1 for the metrics are free"),
    ],
)
def test_free_ports_are_named_from_the_first_to_the_last(
    monkeypatch: pytest.MonkeyPatch, ranks: int, text: str
) -> None:
    job = Job(is_rank=True, local_ranks=ranks, settings=serving())

    assert ports_findings(monkeypatch, {29500: errno.EADDRINUSE}, job) == [(Verdict.OK, text, "")]


def test_a_taken_port_of_a_rank_and_the_rendezvous_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {9465: errno.EADDRINUSE, 9466: errno.EACCES, 29500: errno.EADDRINUSE}

    found = ports_findings(monkeypatch, taken, Job(local_ranks=3, settings=serving()))

    assert found == [
        (
            Verdict.WARNING,
            "127.0.0.1:9465 for the metrics of local rank 1: taken by the owner of 9465; the rank "
            "would serve on another port",
            "end the process if nobody needs it, or set serve.port; Prometheus finds the other "
            "port by /targets",
        ),
        (
            Verdict.FAILED,
            "127.0.0.1:9466 for the metrics of local rank 2: Permission denied",
            "set serve.host to an address of this machine and serve.port to a port that this user "
            "may open",
        ),
        (
            Verdict.WARNING,
            "port 29500, the rendezvous of torchrun and deepspeed by default: taken by the owner "
            "of 29500",
            "start with --standalone, or with another --master-port",
        ),
    ]


def test_a_port_of_a_running_job_is_named_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        waits = "import sys; sys.stdin.read()"
        command = [sys.executable, "-c", waits, "-m", "zerowatch.runtime.separate_process", "16"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[taken.fileno()]) as other:
            taken.close()
            found = host._listener(port)
            other.communicate()

    assert found.startswith(f"the monitoring process {other.pid} of a run of ")


def test_two_probes_of_a_port_at_the_same_time_find_it_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = list[OSError | None]()
    port = free_port()

    class Probe(socket.socket):
        def __exit__(self, *error: object) -> None:
            if not faults:
                faults.append(None)
                faults.append(host._bind_error("127.0.0.1", port))
            super().__exit__(*error)

    monkeypatch.setattr(host, "socket", SimpleNamespace(**vars(socket) | {"socket": Probe}))

    assert host._bind_error("127.0.0.1", port) is None
    assert faults == [None, None]


def test_a_taken_port_that_must_be_had_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(is_rank=True, settings=serving(strict_port=True))

    [(verdict, text, advice)] = ports_findings(monkeypatch, {9464: errno.EADDRINUSE}, job)

    assert verdict == Verdict.FAILED
    assert text.endswith(
        "of 9464; serve.strict_port is set, so nothing is served unless it becomes free soon"
    )
    assert advice == (
        "end the process if nobody needs it, or set serve.port (ZEROWATCH_SERVE_PORT=9564)"
    )


@pytest.mark.parametrize(
    ("serve", "reason"),
    [({"enabled": False}, "serve.enabled is false"), ({"port": 0}, "takes any free port")],
)
def test_without_fixed_ports_there_is_nothing_to_check(
    monkeypatch: pytest.MonkeyPatch, serve: dict[str, object], reason: str
) -> None:
    [(verdict, text, _)] = ports_findings(
        monkeypatch, {}, Job(is_rank=True, settings=serving(**serve))
    )

    assert verdict == Verdict.NOT_APPLICABLE and reason in text
