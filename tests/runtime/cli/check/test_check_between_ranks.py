"""`zerowatch check` on several ranks: versions, clocks, links and their faults.

Covers `check/between_ranks.py`, `check/command.py` and `check/output.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from require import program
from scripts.launching import ZEROWATCH, environment
from servers.free_port import free_port
from torch.overrides import TorchFunctionMode

from zerowatch.runtime.cli.check import all_checks, between_ranks, hardware
from zerowatch.runtime.cli.check.all_checks import check_together, merged
from zerowatch.runtime.cli.check.between_ranks import LEAST_BYTES_PER_SECOND, link_finding
from zerowatch.runtime.cli.check.verdicts import Check, Finding, Job, Runner, Verdict
from zerowatch.runtime.common import accelerator

LIMIT_SECONDS = 300
GIGABIT = 1e9 / 8
# Makes a process see another time of day. Compiled as a library that the process loads first.
OTHER_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int error = syscall(SYS_clock_gettime, clock, now);
    if (!error && clock == CLOCK_REALTIME) now->tv_sec += 3;
    return error;
}
"""


def checked_by_ranks(
    tmp_path: Path, of_rank_1: Mapping[str, str]
) -> tuple[list[int], dict[str, list[dict[str, Any]]]]:
    """Run the check on two ranks, as a launcher does; return exit codes and findings by check."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "zerowatch.runtime.cli.check", "--json"],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
                **(of_rank_1 if rank else {}),
            ),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    assert outputs[1] == ""
    findings: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(outputs[0])["findings"]:
        findings.setdefault(each["check"], []).append(each)
    return [rank.returncode for rank in ranks], findings


@pytest.mark.jobs
def test_a_clock_that_is_wrong_and_another_version_on_a_rank_are_named(tmp_path: Path) -> None:
    compiler = program("gcc", apt="gcc")
    library = tmp_path / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=OTHER_CLOCK, text=True, check=True)
    installed = tmp_path / "site" / "numpy-2.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.0.1\n")

    codes, findings = checked_by_ranks(
        tmp_path, {"LD_PRELOAD": str(library), "PYTHONPATH": str(installed.parent)}
    )

    assert codes == [1, 1]
    (clock,) = findings["clocks"]
    assert clock["verdict"] == "warning"
    assert "rank 1" in clock["text"]
    assert "3 s ahead of that of rank 0" in clock["text"]
    assert clock["figures"]["offset_seconds"] == pytest.approx(3, abs=0.5)
    (versions,) = findings["same versions"]
    assert versions["verdict"] == "failed"
    assert "2.0.1 on rank 1" in versions["text"]
    assert [each["verdict"] for each in findings["links"]] == ["not applicable", "ok"]
    ranks = {rank for each in findings["speed"] for rank in each["where"].split(", ")}
    assert ranks == {"rank 0", "rank 1"}


@pytest.mark.jobs
@pytest.mark.slow
def test_the_command_starts_ranks_and_returns_their_verdict(tmp_path: Path) -> None:
    variables = environment(TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    lock = tmp_path / "extensions" / "py311_cpu" / "fused_adam" / "lock"

    def run() -> subprocess.CompletedProcess[str]:
        command = [ZEROWATCH, "check", "--nproc", "2"]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)

    healthy = run()
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    faulty = run()

    assert healthy.returncode == 0, healthy.stdout
    assert "the same versions on all 2 ranks" in healthy.stdout
    assert "Gb/s, latency" in " ".join(healthy.stdout.split())
    assert faulty.returncode == 1
    assert "stale lock" in faulty.stdout
    assert "Traceback" not in faulty.stderr


def test_a_rank_that_is_missing_is_a_finding_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(between_ranks, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr("zerowatch.runtime.cli.check.all_checks.CHECKS", ())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    (finding,), ranks = check_together(Job(rank=1, local_rank=1, world_size=2), Runner())

    assert ranks is None
    assert (finding.check, finding.verdict) == ("connection", Verdict.FAILED)
    assert "the 2 ranks did not connect over 127.0.0.1:" in finding.text


class ConnectedRanks:
    """Two ranks on this host. Collects what they do, in order."""

    local_ranks, hosts, places = 2, (0,), ()

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def meet(self, job: Job) -> Iterable[Finding]:
        self.events.append("all hosts are checked")
        return ()

    def barrier(self) -> Iterable[Finding]:
        self.events.append("all ranks are checked")
        return ()

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize(
    ("local_ranks", "given", "expected"), [(1, True, 1), (1, False, 2), (4, True, 4)]
)
def test_a_given_number_of_local_ranks_takes_precedence_over_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, local_ranks: int, given: bool, expected: int
) -> None:
    jobs = list[Job]()

    def run(job: Job) -> Iterable[Finding]:
        jobs.append(job)
        return ()

    monkeypatch.setattr(between_ranks, "Ranks", lambda job: ConnectedRanks([]))
    monkeypatch.setattr(between_ranks, "BETWEEN_RANKS", ())
    monkeypatch.setattr(
        all_checks, "CHECKS", (Check(name="accelerator", limit_seconds=30, run=run),)
    )

    check_together(Job(local_ranks=local_ranks, local_ranks_given=given, world_size=8), Runner())

    assert [(job.local_ranks, job.has_other_hosts) for job in jobs] == [(expected, False)]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([("here", "0,1", 1), ("there", "0,1", 2)], 2),
        ([("here", "0,1", 0), ("here", "0,1", 1)], 2),  # two agents
        ([("here", "2,3", 1)], 1),
        ([("here", None, 1)], 1),
    ],
)
def test_local_ranks_share_machine_and_visible_gpus_and_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, str | None, int]], expected: int
) -> None:
    def gather(values: list[Any], value: Any, group: object) -> None:
        values[:] = [value, *others]

    connected = SimpleNamespace(
        init_process_group=lambda *_, **__: None,
        new_group=lambda **_: None,
        get_world_size=lambda: 1 + len(others),
        all_gather_object=gather,
    )
    monkeypatch.setattr(between_ranks, "dist", connected)
    monkeypatch.setattr(between_ranks, "_machine", lambda: "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    ranks = between_ranks.Ranks(Job(world_size=1 + len(others)))

    assert ranks.local_ranks == expected
    assert len(ranks.hosts) == (2 if "there" in dict.fromkeys(each[0] for each in others) else 1)


def test_ranks_connect_before_the_checks_and_use_their_gpus_after_those_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def connected(job: Job) -> ConnectedRanks:
        events.append("connected")
        return ConnectedRanks(events)

    def of_host(job: Job) -> Iterable[Finding]:
        events.append(f"host of {job.local_ranks} ranks")
        return ()

    def of_rank(job: Job) -> Iterable[Finding]:
        events.append("rank")
        return ()

    def answers() -> bool:
        events.append("driver")
        return True

    checks = (
        Check(name="NVML", limit_seconds=30, run=of_host),
        Check(name="speed", limit_seconds=30, run=of_rank, each_rank=True),
    )
    monkeypatch.setattr(between_ranks, "Ranks", connected)
    monkeypatch.setattr(between_ranks, "BETWEEN_RANKS", ())
    monkeypatch.setattr(all_checks, "CHECKS", checks)
    monkeypatch.setattr(all_checks, "driver_answers", answers)

    for local_rank in (0, 1):
        found, _ = check_together(Job(local_rank=local_rank, world_size=2), Runner())
        assert found == []

    of_others = ["all hosts are checked", "rank", "all ranks are checked"]
    assert events == [
        *("connected", "driver", "host of 2 ranks", *of_others),
        *("connected", "driver", *of_others),
    ]


def test_the_ranks_wait_for_a_host_longer_than_its_checks_may_take() -> None:
    of_host = [check.limit_seconds for check in all_checks.CHECKS if not check.each_rank]

    assert hardware.DRIVER_SECONDS + sum(of_host) < between_ranks.HOST_CHECKS_SECONDS


@pytest.mark.parametrize(
    ("gigabits", "latency", "between_hosts", "verdict"),
    [
        (25, 50e-6, True, "ok"),
        (9, 50e-6, True, "warning"),
        (0.9, 50e-6, True, "failed"),
        (25, 5e-3, True, "warning"),
        (0.9, 5e-3, False, "ok"),
    ],
)
def test_a_link_between_hosts_is_compared_with_10_gigabits(
    gigabits: float, latency: float, between_hosts: bool, verdict: str
) -> None:
    finding = link_finding(
        "rank 0 (a) to rank 1 (b)", latency, gigabits * GIGABIT, between_hosts=between_hosts
    )

    assert finding.verdict == verdict
    assert f"{gigabits} Gb/s" in finding.text
    assert LEAST_BYTES_PER_SECOND == GIGABIT


@pytest.mark.parametrize("hosts", [2, 3, 4, 7])
def test_each_host_is_in_one_transfer_at_a_time(hosts: int) -> None:
    pairs = between_ranks.neighbors(list(range(hosts)))
    rounds = between_ranks.rounds_of(pairs)

    assert sorted(chain.from_iterable(rounds)) == sorted(pairs)
    assert len(pairs) == (1 if hosts == 2 else hosts)
    for each in rounds:
        ends = list(chain.from_iterable(each))
        assert len(ends) == len(set(ends))


def test_equal_findings_of_several_hosts_are_one_row() -> None:
    def finding(where: str, text: str) -> Finding:
        return Finding(verdict=Verdict.OK, text=text, check="versions", where=where)

    rows = merged([finding("a", "torch 2.13"), finding("b", "torch 2.13"), finding("c", "torch 2")])

    assert [(row.where, row.text) for row in rows] == [("a, b", "torch 2.13"), ("c", "torch 2")]


class TwoHosts:
    """What rank 0 knows of four ranks on two hosts."""

    def __init__(self, *versions: str, device: str = "") -> None:
        self.rank = 0
        self.hosts = [0, 2]
        found = versions or ("2.9",) * 4
        self.places = [
            between_ranks.Place(
                rank=rank,
                host="ab"[rank // 2],
                device=device,
                versions={"torch": torch, "numpy": "2.0"},
            )
            for rank, torch in enumerate(found)
        ]

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.places[rank].host})"


class CurrentDevice(threading.local):
    """The current device of each thread."""

    index = 0


class NamedDevices(TorchFunctionMode):
    """Collects the devices that calls of torch name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        self.names |= {each for each in given if isinstance(each, str)}
        return function(*args, **(kwargs or {}))


def test_each_rank_measures_its_link_on_its_own_gpu_in_every_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current, used, named = CurrentDevice(), set[int](), NamedDevices()

    def use(*_: object, **__: object) -> None:
        used.add(current.index)

    def gather(values: list[Any], value: Any, group: object) -> None:
        values[:] = [value] * len(values)

    gpus = SimpleNamespace(
        kind="cpu",  # of the tensors
        is_available=lambda: True,
        device_count=lambda: 2,
        device_name="H100-{}".format,
        module=SimpleNamespace(
            set_device=lambda index: setattr(current, "index", index),
            synchronize=use,
            nccl=SimpleNamespace(version=lambda: (2, 27)),
        ),
    )
    nccl = SimpleNamespace(
        init_process_group=lambda *_, **__: None,
        new_group=lambda **_: None,
        is_nccl_available=lambda: True,
        get_world_size=lambda: 2,
        all_gather_object=gather,
        barrier=lambda group: None,
        send=use,
        recv=use,
    )
    monkeypatch.setattr(accelerator, "current", gpus)
    monkeypatch.setattr(between_ranks, "dist", nccl)
    monkeypatch.setattr(between_ranks, "_ENOUGH_SECONDS", 0.0)
    runner, connected = Runner(), list[between_ranks.Ranks]()

    def connect() -> Iterable[Finding]:
        connected.append(between_ranks.Ranks(Job(local_rank=1, local_ranks=2, world_size=2)))
        return ()

    def check_links() -> Iterable[Finding]:
        with named:
            yield from between_ranks.check_links(connected[0])

    faults = runner.call("connection", 30, connect)
    faults += runner.call("connection", 30, partial(connected[0].meet, Job(local_rank=1)))
    found = runner.call("links", 30, check_links)

    assert faults == []
    assert {each.verdict for each in found} == {Verdict.NOT_APPLICABLE, Verdict.OK}
    assert "by nccl" in found[-1].text
    assert used == {1}
    assert named.names == {"cpu:1"}


def test_equal_versions_are_one_finding() -> None:
    [finding] = between_ranks.check_same_versions(TwoHosts())  # type: ignore[arg-type]

    assert (finding.verdict, finding.text) == ("ok", "the same versions on all 4 ranks")


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        (("2.9", "2.9", "2.8", "2.9"), "torch 2.9 on rank 0 (a), but 2.8 on rank 2 (b)"),
        (
            ("2.9", "2.8", "2.8", "2.8"),
            "torch 2.9 on rank 0 (a), but 2.8 on rank 1 (a), rank 2 (b), rank 3 (b)",
        ),
        (
            ("2.9", "2.7", "2.8", "2.8", "2.8"),
            "torch 2.9 on rank 0 (a), but 2.7 on rank 1 (a), rank 2 (b), rank 3 (b) and 1 more",
        ),
    ],
)
def test_another_version_is_named_with_its_ranks(versions: tuple[str, ...], text: str) -> None:
    ranks = TwoHosts(*versions[:4])
    ranks.places += [replace(ranks.places[3], rank=4)] * (len(versions) > 4)

    [finding] = between_ranks.check_same_versions(ranks)  # type: ignore[arg-type]

    assert (finding.verdict, finding.text) == ("failed", text)


@pytest.mark.parametrize(
    ("offset", "error", "verdict", "text"),
    [
        (0.25, 0.16, "ok", "the clocks differ by at most 2.5e+02 ms (+-1.6e+02 ms)"),
        (0.002, 0.0005, "ok", "the clocks differ by at most 2 ms (+-0.5 ms)"),
        (0.25, 0.125, "warning", "the clock of rank 2 (b) is 0.25 s ahead of that of rank 0 (a)"),
        (-0.25, 0.0, "warning", "the clock of rank 2 (b) is 0.25 s behind that of rank 0 (a)"),
        (5.5, 0.75, "warning", "is 5.5 s ahead of"),
        (5.5, 0.5, "failed", "is 5.5 s ahead of"),
    ],
)
def test_a_clock_is_wrong_if_it_is_certainly_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, offset: float, error: float, verdict: str, text: str
) -> None:
    monkeypatch.setattr(between_ranks, "_offsets", lambda others: {others[0]: (offset, error)})

    [finding] = between_ranks.check_clocks(TwoHosts())  # type: ignore[arg-type]

    assert finding.verdict == verdict
    assert text in finding.text
    assert finding.figures == {"offset_seconds": offset}


@pytest.mark.parametrize(
    ("device", "rates", "expected"),
    [
        ("H100", (10.0, 10.0, 7.9, 11.0), ["rank 2 computes at 79% of the median rank's rate"]),
        ("H100", (10.0, 10.0, 8.0, 11.0), []),
        ("", (10.0, 10.0, 1.0, 11.0), []),
        ("H100", (1.0,), []),
    ],
)
def test_a_rank_with_a_slow_gpu_is_named(
    device: str, rates: tuple[float, ...], expected: list[str]
) -> None:
    findings = [
        Finding(
            verdict=Verdict.OK,
            text="",
            where=f"rank {rank}",
            figures={"flops_per_second": rate, "bytes_per_second": 1.0},
        )
        for rank, rate in enumerate(rates)
    ]

    found = between_ranks.slow_ranks(TwoHosts(device=device), findings)  # type: ignore[arg-type]

    assert [each.text.partition(";")[0] for each in found] == expected


def test_the_figures_of_a_link_are_in_gigabits_and_microseconds() -> None:
    finding = link_finding("a to b", 25e-6, 2.5e9, between_hosts=True)

    assert finding.text == "a to b: 20 Gb/s, latency 25 us"
    assert finding.figures == {"bytes_per_second": 2.5e9, "latency_seconds": 25e-6}


@pytest.mark.parametrize(
    ("gigabits", "latency", "verdict"),
    [(10, 1e-3, "ok"), (10, 1.1e-3, "warning"), (9.9, 0, "warning"), (1, 0, "warning")],
)
def test_a_link_at_its_limit_is_no_worse(gigabits: float, latency: float, verdict: str) -> None:
    finding = link_finding("a to b", latency, gigabits * GIGABIT, between_hosts=True)

    assert finding.verdict == verdict
