"""A rank that exited uncleanly is found at the next start, with the likely cause."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import set_clock
from fakes.foreign_files import give_away
from scripts.launching import SCRIPTS
from scripts.memory.oom_cgroup import memory_cgroup

from zerowatch.runtime.cli import launcher_notes
from zerowatch.runtime.cli.launcher_notes import is_answering, note_ended_workers, write_notes
from zerowatch.runtime.cli.node_watch import note_killed_ranks
from zerowatch.runtime.common.exit_notes import ExitNote, read_exit_notes, write_exit_note
from zerowatch.runtime.common.liveness_file import (
    LivenessFile,
    OomKillCounts,
    ProcessMarker,
    count_oom_kills,
    current_process,
    has_exited,
    read_marker,
)
from zerowatch.runtime.memory.oom import kernel_log as kernel_log_file
from zerowatch.runtime.memory.oom import killed_ranks
from zerowatch.runtime.memory.oom.kernel_log import (
    MACHINE_PID_NAMESPACE,
    KernelLog,
    OomKill,
    read_kernel_log,
)
from zerowatch.runtime.memory.oom.killed_ranks import (
    ExitCause,
    LastRecord,
    classify_exit,
    detect_killed_ranks,
    read_last_records,
    workers_of_host,
)

MIB = 2**20
HOST = "node-0"
CGROUP = "/sys/fs/cgroup/memory/job/memory.oom_control"


def process(**changes: Any) -> ProcessMarker:
    base = ProcessMarker(
        rank=0,
        host=HOST,
        pid=2**22 + 1,  # larger than any process id of Linux
        start_ticks=100,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        started_at_unix_seconds=1000.0,
        kills=OomKillCounts(host=3, cgroup_file=CGROUP, cgroup_inode=77, cgroup=1),
    )
    return replace(base, **changes)


def leave_markers(folder: Path, *processes: ProcessMarker) -> None:
    """Write liveness files to a run folder, as killed ranks leave them."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in processes:
        (folder / f"rank-{each.rank}.alive.json").write_text(json.dumps(asdict(each)))


def now(**changes: Any) -> OomKillCounts:
    return replace(process().kills, **changes)


def kernel_log(*, pid: int, cgroup: str = "/elsewhere", since: float = 0.0) -> KernelLog:
    """A kernel's log with one kill, 100 s after the start of `process()`."""
    kill = OomKill(pid=pid, at_unix_seconds=1100.0, cgroup=cgroup)
    return KernelLog(kills=(kill,), since_unix_seconds=since)


CAUSES: dict[str, tuple[dict[str, Any], ExitCause, str]] = {
    "its cgroup counts one more": (
        {"now": now(cgroup=2, host=4)},
        ExitCause.OOM_KILLER,
        "it has killed 1 process(es) of this rank's memory cgroup since",
    ),
    "its cgroup counts one more for two ranks": (
        {"now": now(cgroup=2, host=4), "died_together": 2},
        ExitCause.PROBABLY_OOM_KILLER,
        "it has killed 1 process(es) of this rank's memory cgroup since, and 2 ranks exited "
        "together: this one or another",
    ),
    "another cgroup's process was killed": (
        {"now": now(host=4)},
        ExitCause.OTHERWISE,
        "it has killed no process in this rank's memory cgroup since, but 1 elsewhere on this host",
    ),
    "its cgroup counts one more for two ranks, which were far from the limit": (
        {"now": now(cgroup=2, host=4), "died_together": 2, "limit_ratio": 0.02},
        ExitCause.UNKNOWN,
        "it has killed 1 process(es) of this rank's memory cgroup since, and 2 ranks exited "
        "together: this one or another; this one's last peak was only 2 % of the limit",
    ),
    "the cgroup is gone": (
        {"now": now(cgroup=None, cgroup_inode=None, host=5)},
        ExitCause.UNKNOWN,
        "it has killed 2 process(es) on this host since, in an unknown cgroup; no sign of it",
    ),
    "the cgroup is gone, and the rank was far from its limit": (
        {
            "now": now(cgroup=None, cgroup_inode=None, host=4),
            "died_together": 2,
            "limit_ratio": 0.02,
            "risk_ratio": 0.0,
        },
        ExitCause.UNKNOWN,
        "it has killed 1 process(es) on this host since, in an unknown cgroup; no sign of it",
    ),
    "the cgroup is gone, and the rank was near its limit": (
        {"now": now(cgroup=None, cgroup_inode=None, host=4), "limit_ratio": 0.97},
        ExitCause.PROBABLY_OOM_KILLER,
        "it has killed 1 process(es) on this host since, in an unknown cgroup; its last peak was "
        "97 % of the limit",
    ),
    "the kernel's log names its process id": (
        {"log": kernel_log(pid=2**22 + 1), "now": now(cgroup=2, host=4), "died_together": 2},
        ExitCause.OOM_KILLER,
        "the kernel's log names this process id, killed at 1970-01-01 00:18:20 UTC in the memory "
        "cgroup /elsewhere",
    ),
    "the kernel's log names another process id": (
        {"log": kernel_log(pid=7), "now": now(cgroup=2, host=4), "died_together": 2},
        ExitCause.OTHERWISE,
        "the kernel's log names other processes since, but not this process id",
    ),
    "the kernel's log begins after the start of the process": (
        {
            "log": kernel_log(pid=7, since=1050.0),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
            "limit_ratio": 0.02,
        },
        ExitCause.UNKNOWN,
        "it has killed 1 process(es) on this host since, in an unknown cgroup; no sign of it",
    ),
    "in a container, the kill was minutes after its last record": (
        {
            "process": process(pid_namespace="pid:[4026532000]"),
            "log": kernel_log(pid=2**22 + 1),
            "last_seen": (1010.0, 1070.0),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
            "limit_ratio": 0.99,
        },
        ExitCause.OTHERWISE,
        "the kernel's log has no kill at the time when this rank exited",
    ),
    "in a container, the kill was in its cgroup at the time of its exit": (
        {
            "process": process(pid_namespace="pid:[4026532000]"),
            "log": kernel_log(pid=7, cgroup="/docker/abc/job"),
            "last_seen": (1090.0, 1150.0),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
        },
        ExitCause.PROBABLY_OOM_KILLER,
        "the kernel's log names a process of this rank's cgroup, killed at 1970-01-01 00:18:20 UTC "
        "in the memory cgroup /docker/abc/job",
    ),
    "in a container, the kill was before its last record by the kernel's clock": (
        {
            "process": process(pid_namespace="pid:[4026532000]", started_at_unix_seconds=1100.5),
            "log": kernel_log(pid=7, cgroup="/docker/abc/job"),
            "last_seen": (1100.9, 1160.9),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
        },
        ExitCause.PROBABLY_OOM_KILLER,
        "the kernel's log names a process of this rank's cgroup, killed at 1970-01-01 00:18:20 UTC "
        "in the memory cgroup /docker/abc/job",
    ),
    "in a container, the kill was seconds before its last record": (
        {
            "process": process(pid_namespace="pid:[4026532000]"),
            "log": kernel_log(pid=7, cgroup="/docker/abc/job"),
            "last_seen": (1102.1, 1162.1),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
        },
        ExitCause.OTHERWISE,
        "the kernel's log has no kill at the time when this rank exited",
    ),
    "in a container, the kernel's log begins just before its last record": (
        {
            "process": process(pid_namespace="pid:[4026532000]"),
            "log": kernel_log(pid=7, since=1200.0),
            "last_seen": (1201.9, 1261.9),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
        },
        ExitCause.UNKNOWN,
        "it has killed 1 process(es) on this host since, in an unknown cgroup; no sign of it",
    ),
    "the kernel's log begins just before the start of the process": (
        {
            "log": kernel_log(pid=7, since=998.1),
            "now": now(cgroup=None, cgroup_inode=None, host=4),
        },
        ExitCause.UNKNOWN,
        "it has killed 1 process(es) on this host since, in an unknown cgroup; no sign of it",
    ),
    "the cgroup was created again": (
        {"now": now(cgroup=9, cgroup_inode=78)},
        ExitCause.OTHERWISE,
        "it has killed no process on this host since",
    ),
    "another boot": (
        {"now": now(cgroup=9, host=9), "same_boot": False},
        ExitCause.UNKNOWN,
        "the machine has rebooted since, or this host name is now another machine's; no sign of it",
    ),
    "another boot, and it was near its limit": (
        {"now": OomKillCounts(), "same_boot": False, "limit_ratio": 0.95, "risk_ratio": 0.8},
        ExitCause.PROBABLY_OOM_KILLER,
        "the machine has rebooted since, or this host name is now another machine's; its last peak "
        "was 95 % of the limit and its last risk was 80 %",
    ),
    "another boot, and it was far from its limit": (
        {"now": OomKillCounts(), "same_boot": False, "limit_ratio": 0.02, "risk_ratio": 0.8},
        ExitCause.UNKNOWN,
        "the machine has rebooted since, or this host name is now another machine's; no sign of it",
    ),
    "no counters": (
        {"now": OomKillCounts(), "limit_ratio": 0.5, "risk_ratio": 0.1},
        ExitCause.UNKNOWN,
        "the kernel has no counters; no sign of it",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_follows_from_the_kernel_s_counters_or_else_from_the_last_readings(
    case: str,
) -> None:
    arguments, cause, reason = CAUSES[case]

    defaults = {"process": process(pid_namespace=MACHINE_PID_NAMESPACE), "same_boot": True}
    finding = classify_exit(**{**defaults, **arguments})

    assert (finding.cause, finding.reason) == (cause, reason)


KMSG = """\
6,1,1000000,-;Linux version 6.1
4,811,50000000,-;python invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0
 SUBSYSTEM=cpu
6,812,50100000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=job,mems_allowed=0,\
oom_memcg=/job,task_memcg=/job/rank,task=python,pid=4711,uid=0
3,813,50200000,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB, uid:0
3,814,60000000,-;Out of memory: Killed process 4712 (tar) total-vm:2kB, anon-rss:1kB
"""


def test_the_kernel_s_log_gives_process_time_and_cgroup_of_each_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As seen, without NTP's corrections a clock is late, here by 1 %.
    clocks = {time.CLOCK_MONOTONIC_RAW: 100.0, time.CLOCK_MONOTONIC: 101.0}
    set_clock(
        monkeypatch, kernel_log_file, time=lambda: 1700000101.0, clock_gettime=clocks.__getitem__
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").write_text(KMSG)

    log = read_kernel_log(tmp_path)

    approx = partial(pytest.approx, rel=0, abs=1e-3)
    assert log == KernelLog(
        kills=(
            OomKill(pid=4711, at_unix_seconds=approx(1700000050.702), cgroup="/job/rank"),
            OomKill(pid=4712, at_unix_seconds=approx(1700000060.6), cgroup=""),
        ),
        since_unix_seconds=approx(1700000001.01),
    )


def test_a_kernel_s_log_that_may_not_be_read_is_no_evidence(tmp_path: Path) -> None:
    assert read_kernel_log(tmp_path) is None


def test_two_ranks_far_from_their_limit_are_not_blamed_on_a_kill_in_another_cgroup(
    tmp_path: Path,
) -> None:
    """As seen: a process of another cgroup was killed minutes after two ranks were stopped."""
    gone = "/sys/fs/cgroup/gone/memory.events"
    kills = OomKillCounts(host=0, cgroup_file=gone, cgroup_inode=7, cgroup=0)
    ranks = [process(rank=rank, pid=2**22 + 1 + rank, kills=kills) for rank in (0, 1)]
    leave_markers(tmp_path / "runs/one", *ranks)
    memory = {"cpu": {"allocated": 20.0, "peak_allocated": 20.0, "limit": 1000.0}}
    for rank in (0, 1):
        record = {"step": 9, "ended_at_unix_seconds": 1010.0, "memory_bytes": memory}
        (tmp_path / f"runs/one/rank-{rank}.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text(process().boot_id)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(process().pid_namespace)
    (tmp_path / "proc/vmstat").write_text("oom_kill 1\n")

    killed = detect_killed_ranks(tmp_path / "runs", HOST, root=tmp_path)

    assert [each.by_oom_killer for each in killed] == [False, False]
    assert {each.finding.cause for each in killed} == {ExitCause.UNKNOWN}


COUNTERS = {
    "version 1": ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control"),
    "version 2": ("0::/job", "sys/fs/cgroup/job/memory.events"),
    "version 2 in a container": ("0::/../host", "sys/fs/cgroup/memory.events"),
}


@pytest.mark.parametrize("version", COUNTERS)
def test_the_counters_of_both_cgroup_versions_are_read(version: str, tmp_path: Path) -> None:
    line, file = COUNTERS[version]
    for name, text in {
        "proc/self/cgroup": f"{line}\n",
        "proc/vmstat": "pgfault 12\noom_kill 5\noom_kill_disable 9\n",
        file: "oom_kill_disable 0\nunder_oom 0\noom 4\noom_kill 2\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    kills = count_oom_kills(tmp_path)

    assert (kills.host, kills.cgroup) == (5, 2)
    assert kills.cgroup_file is not None
    assert os.path.samefile(kills.cgroup_file, tmp_path / file)
    assert kills.cgroup_inode == (tmp_path / file).parent.stat().st_ino


def test_without_kernel_counters_nothing_is_known(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path) == OomKillCounts()
    assert current_process(0, HOST, tmp_path) is None


def test_a_liveness_file_describes_current_process_and_is_removed_at_a_clean_exit(
    tmp_path: Path,
) -> None:
    file = LivenessFile(tmp_path / "one", 3, HOST)

    file.open()
    path = tmp_path / "one" / "rank-3.alive.json"
    written = read_marker(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    file.close()
    file.close()

    assert written is not None
    assert (written.rank, written.host, written.pid) == (3, HOST, os.getpid())
    assert mode == 0o600
    assert list((tmp_path / "one").iterdir()) == []


def test_a_forked_child_does_not_remove_the_liveness_file(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path, 0, HOST)
    file.open()
    file._pid += 1  # as if this were another process than the one that opened it

    file.close()

    assert (tmp_path / "rank-0.alive.json").exists()


def test_an_unwritable_folder_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = LivenessFile(tmp_path / "file", 0, HOST)

    file.open()
    file.close()

    assert detect_killed_ranks(tmp_path / "file", HOST) == []
    assert detect_killed_ranks(tmp_path / "missing", HOST) == []


EXITED = {
    "no such process": (process(), True),
    "another process with its id": (process(pid=os.getpid(), start_ticks=1), True),
    "another boot": (process(boot_id="another", pid=os.getpid()), True),
}


@pytest.mark.parametrize("case", EXITED)
def test_a_process_has_exited_when_its_id_is_gone_or_reused(case: str, tmp_path: Path) -> None:
    marker, expected = EXITED[case]

    assert has_exited(marker, tmp_path / "file") is expected


def test_a_running_process_is_not_detected(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path / "one", 0, HOST)
    file.open()

    assert detect_killed_ranks(tmp_path, HOST) == []

    assert (tmp_path / "one" / "rank-0.alive.json").exists()
    file.close()


def test_a_zombie_has_exited(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # exited, not reaped
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        zombie = process(pid=child.pid, start_ticks=int(fields[19]))

        assert fields[0] == "Z"
        assert has_exited(zombie, tmp_path / "file")


def test_in_another_pid_namespace_the_lock_shows_whether_a_process_runs(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alive.json"
    file = LivenessFile(tmp_path, 0, HOST)
    file.open()
    elsewhere = process(pid_namespace="pid:[1]", pid=1)

    assert not has_exited(elsewhere, path)

    os.close(file._descriptor or 0)  # as the kernel does when a process is killed
    assert has_exited(elsewhere, path)


def test_ranks_of_another_host_are_ignored(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process(host="node-9"))

    assert detect_killed_ranks(tmp_path, HOST) == []

    assert (tmp_path / "one" / "rank-0.alive.json").exists()


def test_a_rank_that_was_restarted_on_another_host_is_reported(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process())
    restarted = LivenessFile(tmp_path / "one", 0, "node-9")
    restarted.open()

    killed = detect_killed_ranks(tmp_path, HOST)

    assert [each.process for each in killed] == [process()]
    assert (tmp_path / "one" / "rank-0.alive.json").exists()
    restarted.close()
    assert list((tmp_path / "one").glob("*.alive.json")) == []


def test_ranks_of_any_run_are_reported_once(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process(), process(rank=1))
    leave_markers(tmp_path / "two", process(rank=5))

    first, second = detect_killed_ranks(tmp_path, HOST), detect_killed_ranks(tmp_path, HOST)

    assert {(each.folder.name, each.process.rank) for each in first} == {
        ("one", 0),
        ("one", 1),
        ("two", 5),
    }
    assert second == []
    assert {each.report.name for each in first if each.report} == {
        "rank-0-killed.txt",
        "rank-1-killed.txt",
        "rank-5-killed.txt",
    }


def test_a_second_kill_in_the_same_run_gets_a_separate_report(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process())
    detect_killed_ranks(tmp_path, HOST)
    leave_markers(tmp_path / "one", process(start_ticks=200))

    (again,) = detect_killed_ranks(tmp_path, HOST)

    assert again.report is not None
    assert again.report.name == "rank-0-killed-2.txt"
    assert stat.S_IMODE(again.report.stat().st_mode) == 0o600


def test_the_file_of_a_process_that_starts_during_the_search_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank reports the dead process, and writes its own file, while this one searches."""
    file = tmp_path / "one" / "rank-1.alive.json"
    leave_markers(tmp_path / "one", process(rank=1))
    successor = current_process(1, HOST)
    assert successor is not None

    def read_notes_late(folder: Path, dead: ProcessMarker) -> Sequence[ExitNote]:
        monkeypatch.undo()
        assert len(detect_killed_ranks(tmp_path, HOST)) == 1
        leave_markers(tmp_path / "one", successor)
        return read_exit_notes(folder, dead)

    monkeypatch.setattr(killed_ranks, "read_exit_notes", read_notes_late)

    assert detect_killed_ranks(tmp_path, HOST) == []

    assert read_marker(file) == successor
    reports = sorted(path.name for path in (tmp_path / "one" / "exits").iterdir())
    assert reports == ["rank-1-4194305-100.life.json", "rank-1-killed.txt"]


def test_an_incomplete_liveness_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rank-0.alive.json").write_text('{"rank": 0,')

    assert detect_killed_ranks(tmp_path, HOST) == []


def test_only_records_of_that_process_are_reported_and_an_incomplete_line_is_ignored(
    tmp_path: Path,
) -> None:
    records = [
        {"step": number, "ended_at_unix_seconds": 990.0 + number, "memory_bytes": {}}
        for number in range(40)
    ]
    records[30]["memory_bytes"] = {"cpu": {"allocated": 900.0, "limit": 1000.0}}
    records[31]["oom_risk_ratio"] = {"cpu": 0.25, "cuda:0": 0.75}
    leave_markers(tmp_path / "one", process())
    lines = [json.dumps(record) for record in records]
    (tmp_path / "one" / "rank-0.1.jsonl").write_text("\n".join(lines[:35]) + "\n")
    (tmp_path / "one" / "rank-0.jsonl").write_text("\n".join(lines[35:]) + '\n{"step": 40, "en')

    (killed,) = detect_killed_ranks(tmp_path, HOST)

    assert [each.step for each in killed.records] == list(range(20, 40))
    assert killed.records[10] == LastRecord(
        step=30,
        ended_at_unix_seconds=1020.0,
        in_use_bytes=900.0,
        peak_bytes=None,
        limit_bytes=1000.0,
        risk_ratio=None,
        shapes=(),
    )
    assert killed.report is not None
    first = killed.report.read_text().splitlines()[0]
    assert "after step 39; last reading: 900 B in use, limit 0.977 KiB, risk 25 %" in first


def test_records_of_the_restarted_rank_are_not_reported(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process())
    steps = {41: 1010.0, 42: 1011.0, 1: 1031.0}
    records = [
        {"step": step, "ended_at_unix_seconds": at, "memory_bytes": {}}
        for step, at in steps.items()
    ]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "one" / "rank-0.jsonl").write_text(lines + "\n")

    (killed,) = detect_killed_ranks(tmp_path, HOST, before_unix_seconds=1030.0)

    assert [each.step for each in killed.records] == [41, 42]


def test_many_records_of_the_restarted_rank_do_not_hide_the_last_ones(tmp_path: Path) -> None:
    """A report may come late, and steps may be short."""
    leave_markers(tmp_path / "one", process())
    times = {7: 1010.0, 8: 1011.0} | {step: 1031.0 + step for step in range(9, 2000)}
    records = [
        {"step": step, "ended_at_unix_seconds": at, "memory_bytes": {}, "padding": "x" * 1000}
        for step, at in times.items()
    ]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "one" / "rank-0.jsonl").write_text(lines + "\n")

    (killed,) = detect_killed_ranks(tmp_path, HOST, before_unix_seconds=1030.0)

    assert [each.step for each in killed.records] == [7, 8]


def test_steps_without_a_reading_do_not_hide_the_last_reading(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process())
    memory = {"cpu": {"allocated": 2e9, "peak_allocated": 3e9, "limit": 10e9}}
    records = [
        {"step": step, "ended_at_unix_seconds": 1000.0 + step, "memory_bytes": {}}
        for step in range(100)
    ]
    records[5]["memory_bytes"] = records[7]["memory_bytes"] = memory
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "one" / "rank-0.jsonl").write_text(lines + "\n")

    (killed,) = detect_killed_ranks(tmp_path, HOST)

    assert [each.step for each in killed.records] == [7, *range(80, 100)]
    assert killed.records[0].limit_ratio == 0.3


@pytest.mark.parametrize("is_rotated", [False, True])
def test_the_last_reading_of_the_memory_is_found_before_a_second_of_short_steps(
    tmp_path: Path, is_rotated: bool
) -> None:
    """Steps that are recovered from a ring have no reading, and fill the end of the log."""
    lines = [
        json.dumps({"step": step, "ended_at_unix_seconds": step, "phase_seconds": "x" * 600})
        for step in range(1, 1001)
    ]
    host = {"cpu": {"allocated": 300.0, "limit": 1000.0}}
    first = json.dumps({"step": 0, "ended_at_unix_seconds": 0.5, "memory_bytes": host})
    older = tmp_path / ("rank-0.1.jsonl" if is_rotated else "rank-0.jsonl")
    older.write_text(first + "\n")
    with (tmp_path / "rank-0.jsonl").open("a") as log:
        log.write("\n".join(lines) + "\n")

    records = read_last_records(tmp_path, 0, since_unix_seconds=0.0)

    assert [each.step for each in records] == [0, *range(981, 1001)]
    assert records[0].limit_ratio == 0.3


def test_the_report_says_how_a_rank_exited_if_that_was_noted(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process(), process(rank=1, pid=2**22 + 2))
    aborted = ExitNote(text="ended itself, as hang.abort is set", may_be_oom_kill=False)
    write_exit_note(tmp_path / "one", process(), "hang", aborted)

    noted, other = detect_killed_ranks(tmp_path, HOST)

    assert noted.report is not None
    assert other.report is not None
    assert noted.report.read_text().startswith("rank 0 ended itself, as hang.abort is set, before")
    assert noted.finding.cause is ExitCause.OTHERWISE
    assert "ended itself" not in other.report.read_text()
    assert noted.report.parent == tmp_path / "one" / "exits"


def test_a_note_on_an_earlier_process_of_the_same_id_is_not_used(tmp_path: Path) -> None:
    leave_markers(tmp_path / "one", process(start_ticks=200))
    aborted = ExitNote(text="ended itself, as hang.abort is set", may_be_oom_kill=False)
    write_exit_note(tmp_path / "one", process(start_ticks=100), "hang", aborted)

    (killed,) = detect_killed_ranks(tmp_path, HOST)

    assert killed.notes == []


def test_the_launcher_notes_which_rank_exited_first(tmp_path: Path) -> None:
    host = socket.gethostname()
    workers = [process(rank=rank, pid=100 + rank, host=host) for rank in range(4)]
    leave_markers(tmp_path / "one", *workers)
    exits = {2: -signal.SIGKILL, 0: 1, 3: -signal.SIGTERM}

    write_notes([tmp_path], {rank: 100 + rank for rank in range(4)} | {7: 107}, failures(exits))

    notes = [read_exit_notes(tmp_path / "one", worker)[0] for worker in workers]
    assert [note.text for note in notes] == [
        "exited with code 1, after rank 2 had exited by SIGKILL",
        "was ended by the launcher, after rank 2 had exited by SIGKILL",
        "was the first rank of this host to fail, by SIGKILL",
        "was ended by the launcher, after rank 2 had exited by SIGKILL",
    ]
    assert [note.may_be_oom_kill for note in notes] == [False, False, True, False]


def test_the_launcher_notes_why_it_ended_healthy_ranks(tmp_path: Path) -> None:
    host = socket.gethostname()
    workers = [process(rank=rank, pid=100 + rank, host=host) for rank in range(2)]
    leave_markers(tmp_path / "one", *workers)

    note_ended_workers([tmp_path], {0: 100, 1: 101, 2: 102}, "node host7 was lost")

    for worker in workers:
        (note,) = read_exit_notes(tmp_path / "one", worker)
        assert note.text == "was ended by the launcher, because node host7 was lost"
        assert not note.may_be_oom_kill


def test_the_launcher_prints_one_line_on_the_rank_that_exited_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line must not wait for the next start; the other ranks only follow."""
    host = socket.gethostname()
    leave_markers(tmp_path / "one", *(process(rank=r, pid=100 + r, host=host) for r in range(2)))

    write_notes([tmp_path], {0: 100, 1: 101}, failures({1: -signal.SIGSEGV, 0: -signal.SIGTERM}))
    write_notes([tmp_path], {2: 102, 3: 103}, failures({3: 1, 2: -signal.SIGTERM}))
    write_notes([tmp_path], {4: 104}, failures({4: -signal.SIGKILL}))

    killed, raised, unknown = capsys.readouterr().err.splitlines()
    assert killed == (
        "zerowatch: rank 1 was the first rank of this host to fail, by SIGSEGV, "
        "before its first record"
    )
    assert raised == (
        "zerowatch: rank 3 was the first rank of this host to fail, with code 1; its own lines say "
        "why"
    )
    assert unknown == "zerowatch: rank 4 was the first rank of this host to fail, by SIGKILL"


def test_the_launcher_prints_the_line_too_if_the_notes_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = socket.gethostname()
    leave_markers(tmp_path / "one", process(pid=100, host=host))
    (tmp_path / "one" / "exits").touch()  # no folder, as on a full disk

    write_notes([tmp_path], {0: 100}, failures({0: -signal.SIGKILL}))

    line, error = capsys.readouterr().err.splitlines()
    assert line.startswith("zerowatch: rank 0 was the first rank of this host to fail, by SIGKILL")
    assert str(tmp_path / "one" / "exits") in error
    assert "run_log.folder" in error


def test_ranks_that_were_killed_after_the_loss_of_a_node_were_not_out_of_memory(
    tmp_path: Path,
) -> None:
    host = socket.gethostname()
    workers = [process(rank=rank, pid=100 + rank, host=host) for rank in range(2)]
    leave_markers(tmp_path / "one", *workers)
    pids, exits = {0: 100, 1: 101}, failures({0: 1, 1: -signal.SIGKILL})
    write_notes([tmp_path], pids, exits)

    note_killed_ranks([tmp_path], pids, exits, "host7")

    first, killed = (read_exit_notes(tmp_path / "one", worker) for worker in workers)
    assert [note.text for note in first] == ["was the first rank of this host to fail, with code 1"]
    assert [note.text for note in killed] == [
        "was ended by the launcher, because node host7 was lost"
    ]
    assert not killed[0].may_be_oom_kill


@pytest.fixture
def hanging_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs whose readers wait, as one on a host that is lost."""
    answered = threading.Event()

    def wait(runs: Path, host: str) -> dict[Any, Any]:
        answered.wait()
        return {}

    monkeypatch.setattr(launcher_notes, "NOTES_SECONDS", 0.1)
    monkeypatch.setattr(launcher_notes, "workers_of_host", wait)
    yield tmp_path
    answered.set()  # its readers go on


def test_the_launcher_does_not_wait_for_a_run_folder_that_hangs(
    hanging_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_ended_workers([hanging_runs], {0: 100}, "node host7 was lost")
    write_notes([hanging_runs], {0: 100}, failures({0: 1}))

    ended, failed, line = capsys.readouterr().err.splitlines()
    assert str(hanging_runs) in ended
    assert ended == failed
    assert line.startswith("zerowatch: rank 0 was the first rank of this host to fail, with code 1")


def test_a_run_folder_that_answers_is_distinguished_from_one_that_is_gone(tmp_path: Path) -> None:
    assert is_answering(tmp_path)
    assert not is_answering(tmp_path / "gone")


def test_the_launcher_notes_nothing_on_processes_of_others_with_the_same_id(tmp_path: Path) -> None:
    own = process(host=socket.gethostname(), started_at_unix_seconds=2000.0)
    others = {
        "another host": replace(own, host="node-9", started_at_unix_seconds=3000.0),
        "before a reboot": replace(own, boot_id="another", started_at_unix_seconds=3000.0),
        "another container": replace(own, pid_namespace="pid:[1]", started_at_unix_seconds=3000.0),
        "another rank": replace(own, rank=1, started_at_unix_seconds=3000.0),
        "an earlier process": replace(own, start_ticks=1, started_at_unix_seconds=1000.0),
    }
    leave_markers(tmp_path / "own", own)
    for name, each in others.items():
        leave_markers(tmp_path / name, each)

    write_notes([tmp_path], {0: own.pid}, failures({0: -signal.SIGKILL}))

    assert len(read_exit_notes(tmp_path / "own", own)) == 1
    assert [folder.parent.name for folder in tmp_path.glob("*/exits")] == ["own"]


def test_the_launcher_notes_nothing_in_a_run_folder_with_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = process(host=socket.gethostname())
    leave_markers(tmp_path / "own", own)
    leave_markers(tmp_path / "evil", replace(own, started_at_unix_seconds=2000.0))
    give_away(monkeypatch, tmp_path / "evil" / "rank-0.alive.json")

    write_notes([tmp_path], {0: own.pid}, failures({0: -signal.SIGKILL}))

    assert workers_of_host(tmp_path, own.host) == {(0, own.pid): (tmp_path / "own", own)}
    assert [folder.parent.name for folder in tmp_path.glob("*/exits")] == ["own"]


@pytest.mark.parametrize("kind", ["FIFO", "device", "nested", "foreign"])
def test_a_file_that_no_rank_of_this_user_has_left_does_not_disturb_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    evil = tmp_path / "evil" / "rank-0.alive.json"
    evil.parent.mkdir()
    if kind == "FIFO":
        os.mkfifo(evil)
    elif kind == "device":
        evil.symlink_to("/dev/zero")
    elif kind == "nested":
        evil.write_text("[" * 60_000)
    else:
        leave_markers(evil.parent, process())
        give_away(monkeypatch, evil)

    alone = detect_killed_ranks(tmp_path, HOST)
    leave_markers(tmp_path / "one", process())
    (killed,) = detect_killed_ranks(tmp_path, HOST)

    assert alone == []
    assert killed.folder == tmp_path / "one"
    assert os.path.lexists(evil)


def failures(exits: dict[int, int]) -> dict[int, SimpleNamespace]:
    """Exit codes by rank, all in the same second, as torch's agent has them."""
    return {rank: SimpleNamespace(exitcode=code, timestamp=5) for rank, code in exits.items()}


def grown(runs: Path, steps: int, cgroup: Path | None = None) -> subprocess.Popen[str]:
    """Start a rank whose memory grows, in a separate cgroup."""
    command = [sys.executable, str(SCRIPTS / "memory" / "oom_grow.py"), str(runs), HOST, str(steps)]
    if cgroup is not None:
        command.append(str(cgroup))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "zerowatch.runtime.memory.oom.killed_ranks")
    return caplog


def test_a_rank_killed_by_the_oom_killer_is_reported_at_the_next_start(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    with memory_cgroup(300 * MIB) as cgroup:
        child = grown(tmp_path, 100, cgroup)
        steps = child.communicate(timeout=600)[0].split()
        killed = detect_killed_ranks(tmp_path, HOST)

    assert child.returncode == -signal.SIGKILL
    (rank,) = killed
    assert rank.by_oom_killer
    assert rank.finding.cause is ExitCause.OOM_KILLER
    assert rank.records[-1].step == int(steps[-1])
    assert rank.report == tmp_path / "one" / "oom" / "rank-0-killed.txt"
    lines = rank.report.read_text().splitlines()
    after = f"rank 0 was killed by the kernel's OOM killer, after step {steps[-1]}; last reading: "
    assert lines[0].startswith(after)
    assert ", limit 300 MiB, risk " in lines[0]
    assert f"rank 0 on {HOST}, process {child.pid}, started " in lines[2]
    reason = "it has killed 1 process(es) of this rank's memory cgroup since"
    assert f"the kernel's OOM killer: {reason}" in lines
    table = next(n for n, line in enumerate(lines) if line.startswith("Last records"))
    last = lines[table + 21].split()
    assert (last[0], last[-3:]) == (steps[-1], ["8", "x", str(128 * int(steps[-1]))])
    # What was in use before the process moved into the cgroup is not charged to it.
    assert 0.9 < (rank.records[-1].limit_ratio or 0) < 1.15
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert log.messages[0].startswith(f"run one: {after}")
    assert detect_killed_ranks(tmp_path, HOST) == []


def test_a_rank_killed_otherwise_is_not_reported_as_out_of_memory(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    child = grown(tmp_path, 3)
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "3":
            break
    child.kill()
    child.wait()
    child.stdout.close()

    (rank,) = detect_killed_ranks(tmp_path, HOST)

    assert not rank.by_oom_killer
    assert rank.finding.cause is ExitCause.OTHERWISE
    assert rank.report is not None
    assert rank.report.parent == tmp_path / "one" / "exits"
    assert "not by the kernel's OOM killer" in rank.report.read_text().splitlines()[0]
    assert [record.levelname for record in log.records] == ["INFO"]
