"""Running out of memory on a real GPU: the error, the snapshot, and jobs that end with it."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes.ooms import FakeOomContext, parse_oom_error
from gpu.rank_jobs import rank_variables
from scripts.launching import SCRIPTS, start

from zerowatch.runtime.devices.cuda_allocator import dump_snapshot
from zerowatch.runtime.memory.oom.error_report import OomReporter

MIB, GIB = 2**20, 2**30
ALLOWED_BYTES = 2 * GIB
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def little_room() -> Iterator[None]:
    """Allow torch two GiB of the GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(ALLOWED_BYTES / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def run_out() -> torch.OutOfMemoryError:
    held = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.ones(3 * GIB, dtype=torch.uint8, device="cuda")
    assert held.numel() == 256 * MIB
    return raised.value


def test_all_sizes_of_torch_s_error_are_parsed(little_room: None) -> None:
    parsed = parse_oom_error(run_out())

    assert parsed is not None
    assert (parsed.kind, parsed.device) == ("device allocator", "cuda:0")
    assert parsed.requested_bytes == 3 * GIB
    total = torch.cuda.get_device_properties(0).total_memory
    assert parsed.reported_bytes["total"] == pytest.approx(total, rel=0.01)
    assert parsed.reported_bytes["allowed"] == pytest.approx(ALLOWED_BYTES, rel=0.01)
    assert parsed.reported_bytes["allocated"] >= 256 * MIB
    assert "reserved_unallocated" in parsed.reported_bytes


def test_a_snapshot_for_torch_s_viewer_is_written_next_to_the_report(
    little_room: None, tmp_path: Path
) -> None:
    states = {"allocated": 256.0 * MIB, "reserved": 256.0 * MIB, "limit": float(ALLOWED_BYTES)}
    reporter = OomReporter(
        0,
        FakeOomContext(
            tmp_path,
            readings=lambda: {"cpu": {}, "cuda:0": states},
            dump_snapshot=dump_snapshot,
        ),
    )

    assert reporter.on_error(run_out()) is not None

    report = (tmp_path / "oom" / "rank-0-1.txt").read_text()
    assert report.startswith(
        "out of memory on cuda:0 in forward of step 61, micro-batch 2: 3.00 GiB requested"
    )
    assert "(set_per_process_memory_fraction)" in report.splitlines()[0]
    assert "drop rank-0-1.pickle on https://pytorch.org/memory_viz" in report
    snapshot = tmp_path / "oom" / "rank-0-1.pickle"
    assert snapshot.stat().st_mode & 0o777 == 0o600
    with snapshot.open("rb") as file:
        assert pickle.load(file)["segments"]


@pytest.mark.parametrize("kind", ["leak", "long"])
def test_a_job_is_predicted_reported_and_ended_by_its_own_error(kind: str, tmp_path: Path) -> None:
    script = SCRIPTS / "memory" / "oom_job.py"
    finished = start(sys.executable, script, kind, cwd=tmp_path, variables=rank_variables())

    measured = json.loads((tmp_path / "measured.json").read_text())
    assert finished.returncode == 1
    assert measured["type"] == "OutOfMemoryError"
    assert measured["notes"] == []
    assert measured["text"].split(".")[0] in finished.stderr
    (report,) = tmp_path.glob("runs/*/oom/rank-0-1.txt")
    lines = report.read_text().splitlines()
    step = measured["step"] + 1
    place = rf"out of memory on cuda:0 in (forward|backward|optimizer) of step {step}, "
    assert re.match(place + r"micro-batch 1: \S+ \w+ requested, \S+ \w+ free", lines[0])
    assert "Predicted: yes" in report.read_text()
    assert report.with_suffix(".pickle").exists()
    (limit,) = [line for line in lines if line.startswith("  limit: ")]
    assert limit.endswith("set by set_per_process_memory_fraction")
    size = re.search(r"\((\d+) bytes\)", limit)
    assert size is not None
    assert int(size[1]) == pytest.approx(measured["limit"], rel=0.01)
    alarm = {
        "leak": "is likely to run out within 50 steps",
        "long": "(8 x 8192) is likely not to fit",
    }
    assert finished.stderr.index(alarm[kind]) < finished.stderr.index("out of memory on cuda:0")
