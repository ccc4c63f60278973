"""Tests of the collected facts, and of the name of the host's limit by a fake and a real /proc."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from fakes.ooms import ERROR, FakeOomContext, evidence, parse_oom_error, point

from zerowatch.runtime.devices.host_memory import HostMemory
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.oom import evidence as module
from zerowatch.runtime.memory.oom.evidence import (
    Limit,
    TrainingSetup,
    collect_evidence,
    complete_device,
    host_limit_name,
    training_device,
)
from zerowatch.runtime.memory.oom.oom_error import OomError
from zerowatch.runtime.memory.oom.predicted_savings import Layout, LayoutBytes

MIB = 2**20
STATES = {"allocated": 1000.0 * MIB, "reserved": 4000.0 * MIB}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a machine of 16 GiB, a cgroup of 8, 6000 MiB of addresses and 5000 of data."""
    rows = {"Max data size": 5000 * MIB, "Max address space": 6000 * MIB}
    for name, text in {
        "proc/self/limits": "".join(f"{k:<26}{v:<21}{v:<21}bytes\n" for k, v in rows.items()),
        "proc/self/status": f"VmData:\t{1500 * 1024} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/meminfo": f"MemTotal:       {16 * 2**20} kB\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * 2**30}\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


LIMITS = {
    3000: "RLIMIT_AS (ulimit -v) of 5.86 GiB of addresses",  # 1000 + 6000 - 4000
    4500: "RLIMIT_DATA (ulimit -d) of 4.88 GiB",  # 1000 + 5000 - 1500
    16384: "this machine's memory",
    777: "an unknown limit",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_that_a_reading_was_computed_from_is_named(limit: int, root: Path) -> None:
    states = {**STATES, "limit": float(limit * MIB)}

    assert host_limit_name(states, root) == LIMITS[limit]


def test_a_cgroup_is_named_with_its_folder(root: Path) -> None:
    states = {**STATES, "limit": 8.0 * 2**30}

    assert host_limit_name(states, root) == f"the memory cgroup {root}/sys/fs/cgroup/job"


def test_a_real_limit_on_addresses_is_named_from_a_real_reading() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    memory = HostMemory(reset_peak=False)
    size = int(memory.read()["reserved"])

    resource.setrlimit(resource.RLIMIT_AS, (size + 512 * MIB, before[1]))
    try:
        name = host_limit_name(HostMemory(reset_peak=False).read())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

    assert name.startswith("RLIMIT_AS (ulimit -v) of ")


def test_a_cgroup_without_a_limit_is_not_named_and_one_of_version_1_is(root: Path) -> None:
    folder, states = root / "sys/fs/cgroup/job", {**STATES, "limit": 8.0 * 2**30}

    (folder / "memory.max").write_text("max\n")
    assert host_limit_name(states, root) == "an unknown limit"
    (folder / "memory.limit_in_bytes").write_text(f"{8 * 2**30}\n")
    assert host_limit_name(states, root) == f"the memory cgroup {folder}"


@pytest.mark.parametrize(
    ("off_bytes", "name"),
    [
        (MIB, "this machine's memory"),
        (-MIB, "this machine's memory"),
        (MIB + 1, "an unknown limit"),
    ],
)
def test_a_limit_within_a_mebibyte_is_that_of_the_reading(
    root: Path, off_bytes: int, name: str
) -> None:
    assert host_limit_name({**STATES, "limit": 16384.0 * MIB + off_bytes}, root) == name


def test_a_machine_without_proc_has_an_unknown_limit(tmp_path: Path) -> None:
    assert host_limit_name({"limit": 3000.0 * MIB}, tmp_path) == "an unknown limit"
    assert host_limit_name({}, tmp_path) == "an unknown limit"


def oom(text: str) -> OomError:
    found = parse_oom_error(RuntimeError(text))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("CUDA out of memory.", ("cpu", "cuda:3"), "cuda:3"),
        ("CUDA out of memory.", ("cpu",), "cuda"),
        ("CUDA out of memory. GPU 1 has a total capacity of 1.00 GiB", ("cpu", "cuda:3"), "cuda:1"),
        ("std::bad_alloc", ("cuda:3",), "cpu"),
    ],
)
def test_a_missing_index_is_that_of_the_device_of_this_rank(
    text: str, devices: tuple[str, ...], expected: str
) -> None:
    assert complete_device(oom(text), {device: {} for device in devices}) == expected


def test_this_rank_trains_on_the_device_besides_the_host() -> None:
    assert training_device({"cpu": {}, "cuda:1": {}}) == "cuda:1"
    assert training_device({"cpu": {}}) == "cpu"
    assert training_device({}) == "cpu"


@pytest.mark.parametrize(
    ("changes", "in_use_mib", "free_mib"),
    [
        ({}, 812, 212),
        # No earlier peak was as high, so this step had it.
        ({"peaks": [point(60, 899.0 * MIB)]}, 900, 124),
        ({"peaks": [point(60, 900.0 * MIB)]}, 812, 212),
        ({"peaks": []}, 812, 212),
        ({"readings": {}}, None, None),
        ({"device": "cuda:0", "readings": {"reserved": 300.0 * MIB}}, 300, 724),
        ({"limit": None}, 812, None),
        ({"limit": Limit(num_bytes=800.0 * MIB, name="a")}, 812, 0),
        ({"limit": Limit(num_bytes=float("inf"), name="a")}, 812, None),
    ],
)
def test_the_bytes_in_use_and_free_as_the_request_failed(
    changes: dict[str, Any], in_use_mib: float | None, free_mib: float | None
) -> None:
    facts = evidence(**({"peaks": [point(60, 2000.0 * MIB)]} | changes))

    found = [
        None if each is None else each / MIB for each in (facts.in_use_bytes, facts.free_bytes)
    ]
    assert found == [in_use_mib, free_mib]


def test_the_sizes_in_the_text_of_an_error_have_precedence() -> None:
    facts = evidence(
        error=oom(
            "CUDA out of memory. GPU 0 has a total capacity of 80.00 GiB of which 3.00 GiB is "
            "free. Of the allocated memory 500.00 MiB is allocated by PyTorch, and 20.00 MiB is "
            "reserved by PyTorch but unallocated."
        ),
        readings={"allocated": 1.0, "reserved": 2.0, "unusable": 3.0},
    )

    assert facts.in_use_bytes == 520 * MIB
    assert facts.fragmented_bytes == 20 * MIB
    assert facts.free_bytes == (1024 - 520) * MIB  # less than the 3 GiB of the device


def test_with_captured_graphs_the_sizes_in_the_text_add_up_to_what_is_reserved() -> None:
    facts = evidence(
        error=oom(
            "CUDA out of memory. Of the allocated memory 500.00 MiB is allocated by PyTorch, with "
            "300.00 MiB allocated in private pools (e.g., CUDA Graphs), and 20.00 MiB is reserved "
            "by PyTorch but unallocated."
        ),
    )

    assert (facts.in_use_bytes, facts.fragmented_bytes) == (520 * MIB, 20 * MIB)
    assert facts.private_pool_bytes == 300 * MIB


def test_the_largest_micro_batch_of_the_last_steps_is_by_tokens_and_not_in_generation() -> None:
    peaks = [point(1, 1.0, shapes=(Shape(2, 300), Shape(7, 90))), point(2, 1.0, shapes=())]

    assert evidence(peaks=peaks).largest_tokens == 630
    assert evidence(peaks=peaks, phase="generate").largest_tokens is None
    assert evidence(peaks=[]).largest_tokens is None


def test_all_facts_of_the_context_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1e9)
    context = FakeOomContext(
        None,
        batch_risk=lambda device: 0.25,
        alarm_step=lambda device: 38,
        growth_bytes_per_step=lambda device: 5e6,
        has_expandable_segments=lambda: True,
    )

    found = collect_evidence(3, "node-7", ERROR, context)

    expected = evidence(
        rank=3,
        host="node-7",
        batch_risk_ratio=0.25,
        alarm_step=38,
        growth_bytes_per_step=5e6,
        has_expandable_segments=True,
        predicted_savings=found.predicted_savings,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("text", "own_limit", "reading", "expected"),
    [
        ("CUDA out of memory. 3.00 GiB allowed", 5.0, 7.0, (3, "set_per_process_memory_fraction")),
        ("CUDA out of memory.", 5.0, 7.0, (5, "a setting")),
        ("CUDA out of memory.", None, 7.0, (7, "the device, minus other processes")),
        ("CUDA out of memory.", None, float("inf"), None),
    ],
)
def test_the_limit_is_that_of_the_text_then_of_the_settings_then_of_a_reading(
    text: str, own_limit: float | None, reading: float, expected: tuple[float, str] | None
) -> None:
    configured = own_limit and Limit(num_bytes=own_limit * 2**30, name="a setting")
    context = FakeOomContext(
        None,
        readings=lambda: {"cpu": {}, "cuda:0": {"limit": reading * 2**30}},
        limit=lambda device: configured or None,
    )

    limit = collect_evidence(0, "a", oom(text), context).limit

    assert (limit and (limit.num_bytes / 2**30, limit.name)) == expected


@pytest.mark.parametrize(("available_gib", "fits"), [(None, "yes"), (110, "yes"), (60, "no")])
def test_offloading_fits_only_into_this_rank_s_share_of_the_host(
    available_gib: int | None, fits: str
) -> None:
    gib = float(2**30)
    offloaded = LayoutBytes(device_bytes=25 * gib, host_bytes=105 * gib)
    context = FakeOomContext(
        None,
        readings=lambda: {
            "cpu": {"allocated": 6 * gib, "limit": 512 * gib},
            "cuda:0": {"reserved": 76 * gib, "limit": 78 * gib},
        },
        limit=lambda device: None,
        setup=lambda: TrainingSetup(layout=Layout(3), world_size=8, dtype="bf16"),
        estimated_layouts=lambda: {
            Layout(3): LayoutBytes(device_bytes=60 * gib, host_bytes=0.0),
            Layout(3, "cpu"): offloaded,
        },
        predict_peak=lambda device, shape: None,
        available_rank_bytes=lambda: available_gib and available_gib * gib,
    )

    savings = collect_evidence(0, "a", oom("CUDA out of memory."), context).predicted_savings

    (saving,) = [each for each in savings or () if "offload_optimizer to cpu" in each.description]
    assert saving.fits == fits


@pytest.mark.parametrize("is_on", [False, True])
def test_expandable_segments_are_a_saving_only_while_they_are_off(is_on: bool) -> None:
    context = FakeOomContext(
        None,
        readings=lambda: {"cpu": {}, "cuda:0": {"reserved": 76.0, "limit": 78.0, "unusable": 8.0}},
        limit=lambda device: None,
        predict_peak=lambda device, shape: None,
        has_expandable_segments=lambda: is_on,
    )

    savings = collect_evidence(0, "a", oom("CUDA out of memory."), context).predicted_savings

    found = [each for each in savings or () if "expandable_segments" in each.description]
    assert len(found) == (0 if is_on else 1)
