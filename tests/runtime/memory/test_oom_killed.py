"""A rank that ended without a word is found at the next start, which says what killed it."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from scripts.launching import SCRIPTS
from scripts.oom_cgroup import memory_cgroup

from zerowatch.runtime.memory.oom.exit_cause import ExitCause, classify_exit
from zerowatch.runtime.memory.oom.killed_ranks import detect_killed_ranks
from zerowatch.runtime.memory.oom.last_records import LastRecord
from zerowatch.runtime.memory.oom.liveness_file import (
    Kills,
    LivenessFile,
    ProcessMarker,
    count_kills,
    is_over,
    read_life,
    this_life,
)

MIB = 2**20
HOST = "node-0"
CGROUP = "/sys/fs/cgroup/memory/job/memory.oom_control"


def life(**changes: Any) -> ProcessMarker:
    facts = ProcessMarker(
        rank=0,
        host=HOST,
        pid=2**22 + 1,  # more than Linux gives out
        start_ticks=100,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=os.readlink("/proc/self/ns/pid"),
        started_at_unix_seconds=1000.0,
        kills=Kills(host=3, cgroup_file=CGROUP, cgroup_inode=77, cgroup=1),
    )
    return replace(facts, **changes)


def leave(folder: Path, *lives: ProcessMarker) -> None:
    """Leave life files in a run folder, as killed ranks do."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in lives:
        (folder / f"rank-{each.rank}.alive.json").write_text(json.dumps(asdict(each)))


def now(**changes: Any) -> Kills:
    return replace(life().kills, **changes)


VERDICTS: dict[str, tuple[dict[str, Any], ExitCause, str]] = {
    "its cgroup counts one more": (
        {"now": now(cgroup=2, host=4)},
        ExitCause.OOM_KILLER,
        "it has killed 1 process(es) of this rank's memory cgroup since",
    ),
    "its cgroup counts one more for two ranks": (
        {"now": now(cgroup=2, host=4), "died_together": 2},
        ExitCause.PROBABLY,
        "it has killed 1 process(es) of this rank's memory cgroup since, and 2 ranks ended "
        "together: this one or another",
    ),
    "another cgroup's process was killed": (
        {"now": now(host=4)},
        ExitCause.OTHERWISE,
        "it has killed nobody in this rank's memory cgroup since, but 1 elsewhere on this host",
    ),
    "the cgroup is gone": (
        {"now": now(cgroup=None, cgroup_inode=None, host=5)},
        ExitCause.PROBABLY,
        "it has killed 2 process(es) on this host since, of which cgroup is not known",
    ),
    "the cgroup was made anew": (
        {"now": now(cgroup=9, cgroup_inode=78)},
        ExitCause.OTHERWISE,
        "it has killed nobody on this host since",
    ),
    "another boot": (
        {"now": now(cgroup=9, host=9), "same_boot": False},
        ExitCause.UNKNOWN,
        "the machine was started anew since; no sign of it",
    ),
    "another boot, and it was near its limit": (
        {"now": Kills(), "same_boot": False, "limit_ratio": 0.95, "risk_ratio": 0.8},
        ExitCause.PROBABLY,
        "the machine was started anew since; its last peak was 95 % of the limit and its last "
        "risk was 80 %",
    ),
    "no counters": (
        {"now": Kills(), "limit_ratio": 0.5, "risk_ratio": 0.1},
        ExitCause.UNKNOWN,
        "the kernel does not count; no sign of it",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_rests_on_the_kernel_s_counters_and_else_on_the_last_readings(
    case: str,
) -> None:
    facts, verdict, why = VERDICTS[case]

    finding = classify_exit(life(), **{"same_boot": True, **facts})

    assert (finding.verdict, finding.why) == (verdict, why)


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

    kills = count_kills(tmp_path)

    assert (kills.host, kills.cgroup) == (5, 2)
    assert kills.cgroup_file is not None
    assert os.path.samefile(kills.cgroup_file, tmp_path / file)
    assert kills.cgroup_inode == (tmp_path / file).parent.stat().st_ino


def test_where_the_kernel_does_not_count_nothing_is_known(tmp_path: Path) -> None:
    assert count_kills(tmp_path) == Kills()
    assert this_life(0, HOST, tmp_path) is None


def test_a_life_file_describes_this_process_and_goes_with_a_clean_end(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path / "one", 3, HOST)

    file.open()
    path = tmp_path / "one" / "rank-3.alive.json"
    written = read_life(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    file.close()
    file.close()

    assert written is not None
    assert (written.rank, written.host, written.pid) == (3, HOST, os.getpid())
    assert mode == 0o600
    assert list((tmp_path / "one").iterdir()) == []


def test_a_forked_child_leaves_the_life_file(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path, 0, HOST)
    file.open()
    file._pid += 1  # as if this were another process than the one that opened it

    file.close()

    assert (tmp_path / "rank-0.alive.json").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = LivenessFile(tmp_path / "file", 0, HOST)

    file.open()
    file.close()

    assert detect_killed_ranks(tmp_path / "file", HOST) == []
    assert detect_killed_ranks(tmp_path / "missing", HOST) == []


OVER = {
    "no such process": (life(), True),
    "another process with its id": (life(pid=os.getpid(), start_ticks=1), True),
    "another boot": (life(boot_id="another", pid=os.getpid()), True),
}


@pytest.mark.parametrize("case", OVER)
def test_a_process_is_over_when_its_id_is_gone_or_another_s(case: str, tmp_path: Path) -> None:
    facts, over = OVER[case]

    assert is_over(facts, tmp_path / "file") is over


def test_a_living_process_is_not_found(tmp_path: Path) -> None:
    file = LivenessFile(tmp_path / "one", 0, HOST)
    file.open()

    assert detect_killed_ranks(tmp_path, HOST) == []

    assert (tmp_path / "one" / "rank-0.alive.json").exists()
    file.close()


def test_a_zombie_is_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it ended; nobody has asked yet
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        zombie = life(pid=child.pid, start_ticks=int(fields[19]))

        assert fields[0] == "Z"
        assert is_over(zombie, tmp_path / "file")


def test_in_another_pid_namespace_the_lock_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.alive.json"
    file = LivenessFile(tmp_path, 0, HOST)
    file.open()
    elsewhere = life(pid_namespace="pid:[1]", pid=1)

    assert not is_over(elsewhere, path)

    os.close(file._descriptor or 0)  # as the kernel does when a process is killed
    assert is_over(elsewhere, path)


def test_another_host_s_ranks_are_left_to_it(tmp_path: Path) -> None:
    leave(tmp_path / "one", life(host="node-9"))

    assert detect_killed_ranks(tmp_path, HOST) == []

    assert (tmp_path / "one" / "rank-0.alive.json").exists()


def test_ranks_of_any_run_are_told_of_once(tmp_path: Path) -> None:
    leave(tmp_path / "one", life(), life(rank=1))
    leave(tmp_path / "two", life(rank=5))

    first, second = detect_killed_ranks(tmp_path, HOST), detect_killed_ranks(tmp_path, HOST)

    assert {(each.folder.name, each.life.rank) for each in first} == {
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


def test_a_second_death_in_the_same_run_gets_a_report_of_its_own(tmp_path: Path) -> None:
    leave(tmp_path / "one", life())
    detect_killed_ranks(tmp_path, HOST)
    leave(tmp_path / "one", life(start_ticks=200))

    (again,) = detect_killed_ranks(tmp_path, HOST)

    assert again.report == tmp_path / "one" / "oom" / "rank-0-killed-2.txt"
    assert stat.S_IMODE(again.report.stat().st_mode) == 0o600


def test_a_half_written_life_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rank-0.alive.json").write_text('{"rank": 0,')

    assert detect_killed_ranks(tmp_path, HOST) == []


def test_only_records_of_that_life_are_told_and_half_a_line_is_passed_over(
    tmp_path: Path,
) -> None:
    records = [
        {"step": number, "ended_at_unix_seconds": 990.0 + number, "memory_bytes": {}}
        for number in range(40)
    ]
    records[30]["memory_bytes"] = {"cpu": {"allocated": 900.0, "limit": 1000.0}}
    records[31]["oom_risk_ratio"] = {"cpu": 0.25, "cuda:0": 0.75}
    leave(tmp_path / "one", life())
    lines = [json.dumps(record) for record in records]
    (tmp_path / "one" / "rank-0.1.jsonl").write_text("\n".join(lines[:35]) + "\n")
    (tmp_path / "one" / "rank-0.jsonl").write_text("\n".join(lines[35:]) + '\n{"step": 40, "en')

    (killed,) = detect_killed_ranks(tmp_path, HOST)

    assert [each.step for each in killed.records] == list(range(20, 40))
    assert killed.records[10] == LastRecord(
        step=30,
        ended_at_unix_seconds=1020.0,
        resident_bytes=900.0,
        peak_bytes=None,
        limit_bytes=1000.0,
        risk_ratio=None,
        shapes=(),
    )
    assert killed.report is not None
    first = killed.report.read_text().splitlines()[0]
    assert "after step 39; its last reading was 900 B RSS, limit 0.977 KiB, risk 75 %" in first


def grown(runs: Path, steps: int, cgroup: Path | None = None) -> subprocess.Popen[str]:
    """Start a rank that grows, in a cgroup of its own."""
    command = [sys.executable, str(SCRIPTS / "oom_grow.py"), str(runs), HOST, str(steps)]
    if cgroup is not None:
        command.append(str(cgroup))
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "zerowatch.runtime.memory.oom.killed_ranks")
    return caplog


def test_a_rank_that_the_kernel_s_oom_killer_killed_is_told_of_at_the_next_start(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    with memory_cgroup(300 * MIB) as cgroup:
        child = grown(tmp_path, 100, cgroup)
        steps = child.communicate(timeout=60)[0].split()
        killed = detect_killed_ranks(tmp_path, HOST)

    assert child.returncode == -signal.SIGKILL
    (told,) = killed
    assert told.by_oom_killer
    assert told.finding.verdict is ExitCause.OOM_KILLER
    assert told.records[-1].step == int(steps[-1])
    assert told.report == tmp_path / "one" / "oom" / "rank-0-killed.txt"
    lines = told.report.read_text().splitlines()
    after = (
        f"rank 0 was killed by the kernel's OOM killer, after step {steps[-1]}; its last reading"
    )
    assert lines[0].startswith(after)
    assert ", limit 300 MiB, risk " in lines[0]
    assert f"rank 0 on {HOST}, process {child.pid}, started " in lines[2]
    rise = "it has killed 1 process(es) of this rank's memory cgroup since"
    assert f"the kernel's OOM killer: {rise}" in lines
    table = next(n for n, line in enumerate(lines) if line.startswith("Last records"))
    last = lines[table + 21].split()
    assert (last[0], last[-3:]) == (steps[-1], ["8", "x", str(128 * int(steps[-1]))])
    # RSS counts file pages too, which are charged to the cgroup that read them first.
    assert 0.9 < (told.records[-1].limit_ratio or 0) < 1.25
    assert [record.levelname for record in heard.records] == ["WARNING"]
    assert heard.messages[0].startswith(f"run one: {after}")
    assert detect_killed_ranks(tmp_path, HOST) == []


def test_a_rank_that_was_killed_otherwise_is_not_said_to_have_run_out_of_memory(
    tmp_path: Path, heard: pytest.LogCaptureFixture
) -> None:
    child = grown(tmp_path, 3)
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "3":
            break
    child.kill()
    child.wait()
    child.stdout.close()

    (told,) = detect_killed_ranks(tmp_path, HOST)

    assert not told.by_oom_killer
    assert told.finding.verdict is ExitCause.OTHERWISE
    assert told.report is not None
    assert "not by the kernel's OOM killer" in told.report.read_text().splitlines()[0]
    assert [record.levelname for record in heard.records] == ["INFO"]
