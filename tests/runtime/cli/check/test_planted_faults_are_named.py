"""`zerowatch check` on a healthy machine, and with planted faults, each of which it names.

Covers `check/command.py`, `check/all_checks.py`, `check/software.py`, `check/hardware.py`,
`check/host.py` and `check/ds_settings.py`. The faults are real: locks, processes, ports, full and
read-only file systems. Faults of GPUs are in `test_nvml_inventory.py`, those between ranks in
`test_check_between_ranks.py`, a slow link in `tests/lab/`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from servers.free_port import free_port

from zerowatch.__main__ import commands
from zerowatch.runtime.cli.check import host

HOUR = 3600
HEALTHY_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(autouse=True)
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the check looks at healthy, whatever this machine has."""
    for name in list(os.environ):
        if name.startswith(("ZEROWATCH_", "OTEL_", "PYTORCH_", "NCCL_", "TORCH_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("ZEROWATCH_SERVE_PORT", str(free_port()))
    # Other jobs of this machine may have the usual port.
    monkeypatch.setattr(host, "_RENDEZVOUS_PORT", free_port())


def checked(*options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; return its exit code and its findings."""
    done = CliRunner().invoke(commands, ["check", "--json", *options])
    content = json.loads(done.stdout)
    assert content["exit_code"] == done.exit_code
    return done.exit_code, content["findings"]


def named(check: str, *options: str) -> dict[str, Any]:
    """Run the command; return the one fault of a check. No other check finds a fault."""
    code, findings = checked(*options)
    faults = [each for each in findings if each["verdict"] in ("warning", "failed")]
    (fault,) = [each for each in faults if each["check"] not in MACHINE_DEPENDENT]
    assert fault["check"] == check
    assert code == any(each["verdict"] == "failed" for each in faults)
    assert fault["advice"]
    return fault


# These depend on how busy the machine is, and on its memory and limits.
MACHINE_DEPENDENT = ("speed", "host limits")


def ds_config(tmp_path: Path, **changes: object) -> tuple[str, str]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HEALTHY_CONFIG | changes))
    return "--ds-config", str(path)


def test_a_healthy_machine_has_no_fault_and_exit_code_0(tmp_path: Path) -> None:
    code, findings = checked(*ds_config(tmp_path))

    assert code == 0
    faults = [each for each in findings if each["verdict"] in ("warning", "failed")]
    assert [each for each in faults if each["check"] not in MACHINE_DEPENDENT] == []
    assert {each["check"] for each in findings} == {
        *("versions", "accelerator", "NVML", "allocator", "compiler", "builds", "environment"),
        *("ports", "run folder", "host limits", "ds config", "speed", "between ranks"),
    }
    assert not (tmp_path / "runs").exists()


def test_the_table_shows_verdicts_advice_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    done = CliRunner().invoke(commands, ["check", *ds_config(tmp_path)])

    lines = done.stdout.splitlines()
    assert lines[2].split() == ["verdict", "check", "finding"]
    assert any(line.startswith("warning") and "environment" in line for line in lines)
    assert any("to do: unset CUDA_LAUNCH_BLOCKING" in line for line in lines)
    assert "0 failed" in lines[-1]


def test_with_strict_a_warning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    assert checked()[0] == 0
    assert checked("--strict")[0] == 1


# Builds of torch's extensions


def make_lock(tmp_path: Path, age_seconds: float) -> Path:
    lock = tmp_path / "extensions" / "py311_cpu" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - age_seconds,) * 2)
    return lock


def test_a_lock_of_a_killed_build_is_named_with_its_age(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, 3 * HOUR + 300)

    fault = named("builds")

    assert fault["verdict"] == "failed"
    assert f"stale lock {lock}, 3 h 5 min old" in fault["text"]
    assert f"rm {lock}" in fault["advice"]


HOLD = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
input()
"""


def test_a_build_that_runs_is_named_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "held\n"
        fault = named("builds")
        builder.communicate("\n")

    assert fault["verdict"] == "warning"
    assert f"process {builder.pid} compiles cpu_adam" in fault["text"]
    assert "rm " not in fault["advice"]


# Ports


def test_a_taken_port_is_named_with_the_process_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("ZEROWATCH_SERVE_PORT", str(port))
        fault = named("ports")
        monkeypatch.setenv("ZEROWATCH_SERVE_STRICT_PORT", "true")
        strict = named("ports")

    assert fault["verdict"] == "warning"
    assert (
        f"127.0.0.1:{port} for the metrics of local rank 0: taken by process {os.getpid()} "
        in (fault["text"])
    )
    assert strict["verdict"] == "failed"


def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROWATCH_SERVE_HOST", "192.0.2.1")

    fault = named("ports")

    assert fault["verdict"] == "failed"
    assert "192.0.2.1" in fault["text"]


def test_a_collector_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("ZEROWATCH_OTEL_ENDPOINT", endpoint)

    fault = named("ports")

    assert f"the collector {endpoint} does not answer" in fault["text"]


def test_the_password_of_a_collector_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://ann:s3cret@{address}")

    fault = named("ports")

    assert f"@{address} does not answer" in fault["text"]
    assert "s3cret" not in str(fault)


# The disk of the run folder


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory, with the options of mount(8)."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "ro") as disk:
        monkeypatch.setenv("ZEROWATCH_RUN_LOG_FOLDER", str(disk / "runs"))
        fault = named("run folder")

    assert fault["verdict"] == "failed"
    assert "Read-only file system" in fault["text"]
    assert str(disk / "runs") in fault["text"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "size=256k") as disk:
        monkeypatch.setenv("ZEROWATCH_RUN_LOG_FOLDER", str(disk))
        fault = named("run folder")
        left = list(disk.iterdir())

    assert fault["verdict"] == "failed"
    assert "the disk is full, 256 KiB free" in fault["text"]
    assert left == []


def test_a_folder_in_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", "size=1g") as disk:
        monkeypatch.setenv("ZEROWATCH_RUN_LOG_FOLDER", str(disk))
        fault = named("run folder")

    assert fault["verdict"] == "warning"
    assert "tmpfs" in fault["text"]


def test_a_file_in_the_way_of_the_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()

    fault = named("run folder")

    assert fault["verdict"] == "failed"
    assert "Not a directory" in fault["text"]


SMALL_SHARED_MEMORY = """
mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c '
from zerowatch.runtime.cli.check.host import check_limits
from zerowatch.runtime.cli.check.verdicts import Job
print(*(each.text for each in check_limits(Job())), sep="\\n")'
"""


def test_the_small_shared_memory_of_a_container_is_named() -> None:
    command = ["unshare", "--mount", "sh", "-c", SMALL_SHARED_MEMORY, sys.executable]

    done = subprocess.run(command, capture_output=True, text=True)

    if "unshare failed" in done.stderr or "permission" in done.stderr.lower():
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "/dev/shm: 64 MiB free of 64 MiB" in done.stdout, done.stderr


# Software and environment


def test_a_package_outside_of_zerowatchs_range_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "torchdata-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torchdata\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(installed.parent))

    fault = named("versions")

    assert fault["verdict"] == "failed"
    assert "torchdata 0.1.0 is installed; zerowatch needs torchdata>=" in fault["text"]
    assert 'pip install "torchdata>=' in fault["advice"]


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    fault = named("compiler")

    assert fault["verdict"] == "failed"
    assert "g++" in fault["text"]


@pytest.mark.parametrize(
    ("variable", "value", "check", "verdict", "words"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "environment", "warning", "CUDA_LAUNCH_BLOCKING=1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "environment", "warning", "every collective"),
        (
            *("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:maybe", "allocator", "failed"),
            "expandable_segments:maybe",
        ),
        (
            *("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True", "allocator", "warning"),
            "'expandable_segment'",
        ),
    ],
)
def test_a_variable_that_does_harm_is_named(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    check: str,
    verdict: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)

    fault = named(check)

    assert fault["verdict"] == verdict
    assert words in fault["text"]


def test_a_setting_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROWATCH_SERVE_PROT", "1")

    code, findings = checked()

    (fault,) = [each for each in findings if each["check"] == "environment"]
    assert (code, fault["verdict"]) == (1, "failed")
    assert "ZEROWATCH_SERVE_PROT" in fault["text"]


# The ds config


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"comms_logger": {"enabled": True}}, "warning", "comms_logger is enabled"),
        ({"wall_clock_breakdown": True}, "warning", "wall_clock_breakdown is true"),
        ({"flops_profiler": {"enabled": True}}, "warning", "flops_profiler is enabled"),
        ({"gradient_cliping": 1.0}, "warning", "'gradient_cliping'"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "failed", "overlap_comm"),
        ({"zero_optimization": {"stage": 5}}, "failed", "zero_optimization.stage"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "failed", "bfloat16"),
        ({"train_micro_batch_size_per_gpu": "4"}, "failed", "train_micro_batch_size_per_gpu"),
        ({"comet": {"enabled": True}}, "failed", "package comet_ml is not installed"),
        ({"zerowatch": {"serve": {"prot": 1}}}, "failed", "serve.prot"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/dev/null/swap"},
                }
            },
            "failed",
            "nvme_path '/dev/null/swap'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, Mapping) else "",
)
def test_a_setting_of_the_ds_config_that_does_harm_is_named(
    tmp_path: Path, changes: Mapping[str, object], verdict: str, words: str
) -> None:
    fault = named("ds config", *ds_config(tmp_path, **changes))

    assert fault["verdict"] == verdict
    assert words in fault["text"]
    assert "ds.json" in fault["text"]


def test_auto_of_hugging_face_is_no_fault_of_the_ds_config(tmp_path: Path) -> None:
    _, findings = checked(*ds_config(tmp_path, gradient_accumulation_steps="auto"))

    (found,) = [each for each in findings if each["check"] == "ds config"]
    assert found["verdict"] == "ok"
    assert '"auto" at gradient_accumulation_steps' in found["text"]


def test_batch_sizes_that_do_not_fit_the_number_of_ranks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = ds_config(tmp_path, train_batch_size=10)

    fault = named("ds config", *config)

    assert fault["verdict"] == "failed"
    assert "train_batch_size 10" in fault["text"]


def test_a_ds_config_that_is_no_json_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  "train_batch_size": 8,\n  "bf16" {}\n}\n')

    fault = named("ds config", "--ds-config", "ds.json")

    assert fault["verdict"] == "failed"
    assert "line 3" in fault["text"]


def test_comments_and_trailing_commas_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  # samples\n  "train_batch_size": 8,\n}\n')

    code, _ = checked("--ds-config", "ds.json")

    assert code == 0
