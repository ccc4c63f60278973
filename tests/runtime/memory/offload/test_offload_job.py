"""Offload traffic of real training, against an oracle of copies and against formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS
from scripts.memory.async_io import HOW_TO_BUILD, built_extensions

pytestmark = pytest.mark.jobs

STEPS, WORLD = 2, 2
NUMELS = (784, 49, 49, 1)  # of the parameters of `offload_job.Net`, in order
PARTS = tuple(-(-numel // WORLD) for numel in NUMELS)  # of each rank, at stage 3
FLAT_PART = -(-sum(NUMELS) // 4) * 4 // WORLD  # DeepSpeed pads to twice the ranks at stages 1, 2
BYTES = {"fp32": 4, "bf16": 2}
CASES = (
    "stage 1",
    "stage 2, one micro-batch",
    "stage 2",
    "stage 2, bf16",
    "stage 2, bf16, fp32 sums",
    "stage 2, unmanaged",
    "stage 3",
    "stage 3, two memories",
    "stage 3, unmanaged",
    "stage 3, params",
    "stage 3, persistent params",
    "stage 3, params alone",
)
PARAMS = "stage 3, params"
QUICK = ("stage 1", "stage 2", "stage 3, two memories", PARAMS)
each_case = pytest.mark.parametrize("name", tiers(CASES, QUICK))
Ranks = list[dict[str, Any]]


def run(script: str, folder: Path, *arguments: object) -> Ranks:
    finished = start_ranks(2, SCRIPTS / "memory" / script, folder, *arguments, cwd=folder)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ranks:
    names = {*chosen(request, "name"), PARAMS} & {*CASES}
    return run("offload_job.py", tmp_path_factory.mktemp("offload"), *sorted(names))


def moved(result: dict[str, Any]) -> dict[str, int]:
    return {direction: num_bytes for direction, (num_bytes, _) in result["published"].items()}


def flat_own(rank: int) -> int:
    """Return the elements of the flat gradient that are a rank's and no padding."""
    return min(FLAT_PART, sum(NUMELS) - rank * FLAT_PART)


def flat_touched(rank: int) -> int:
    """Return the elements of all parameters of which a rank owns a part."""
    begin, touched = 0, 0
    for numel in NUMELS:
        end = begin + numel
        touched += numel if end > rank * FLAT_PART and begin < (rank + 1) * FLAT_PART else 0
        begin = end
    return touched


def parts_own(rank: int) -> int:
    """Return the elements of a rank's parts of all parameters that are no padding."""
    pairs = zip(NUMELS, PARTS, strict=True)
    return sum(max(0, min(part, numel - rank * part)) for numel, part in pairs)


@each_case
def test_bytes_equal_those_of_replaced_copy_functions(ranks: Ranks, name: str):
    for rank in ranks:
        assert min(rank[name]["oracle"].values()) > 0
        assert moved(rank[name]) == rank[name]["oracle"]


@each_case
def test_training_is_bitwise_the_same_and_every_name_restored(ranks: Ranks, name: str):
    for rank in ranks:
        assert rank[name]["bitwise_equal"]
        assert rank[name]["restored"]
        assert rank[name]["failures"] == {}


@each_case
def test_both_directions_take_time(ranks: Ranks, name: str):
    for rank in ranks:
        seconds = [seconds for _, seconds in rank[name]["published"].values()]
        assert all(0 < s < 10 for s in seconds)


@pytest.mark.parametrize(
    ("name", "micro_batches", "dtype"),
    tiers(
        [
            ("stage 2, one micro-batch", 1, "fp32"),
            ("stage 2", 3, "fp32"),
            ("stage 2, bf16", 2, "bf16"),
        ],
        quick=[("stage 2", 3, "fp32")],
    ),
)
def test_stage_2_copies_whole_gradients_both_ways_between_micro_batches(
    ranks: Ranks, name: str, micro_batches: int, dtype: str
):
    size = BYTES[dtype]
    for number, rank in enumerate(ranks):
        whole = flat_touched(number) * size if micro_batches > 1 else 0

        assert moved(rank[name]) == {
            "to_host": STEPS * (micro_batches * whole + flat_own(number) * 4),
            "to_device": STEPS * ((micro_batches - 1) * whole + FLAT_PART * size),
        }


@pytest.mark.parametrize("name", tiers(["stage 1", "stage 2, bf16, fp32 sums"], ["stage 1"]))
def test_gradients_summed_on_the_device_go_to_the_host_once_a_step(ranks: Ranks, name: str):
    size = BYTES["bf16" if "bf16" in name else "fp32"]
    for number, rank in enumerate(ranks):
        assert moved(rank[name]) == {
            "to_host": STEPS * flat_own(number) * 4,
            "to_device": STEPS * FLAT_PART * size,
        }


@pytest.mark.parametrize(
    ("name", "trips"),
    tiers([("stage 3", 1), ("stage 3, two memories", 3)], [("stage 3, two memories", 3)]),
)
def test_stage_3_copies_its_partition_to_the_host_and_back(ranks: Ranks, name: str, trips: int):
    for number, rank in enumerate(ranks):
        own = parts_own(number)

        assert moved(rank[name]) == {
            "to_host": STEPS * (trips * own * BYTES["bf16"] + own * 4),
            "to_device": STEPS * (trips * own + sum(PARTS)) * BYTES["bf16"],
        }


def test_parameters_on_the_host_are_fetched_for_every_gather(ranks: Ranks):
    micro_batches = 2 * STEPS
    gathers = micro_batches + 1  # before the order is known, once more for the backward
    for number, rank in enumerate(ranks):
        trips = micro_batches * parts_own(number) * BYTES["bf16"]

        found = moved(rank[PARAMS])

        assert found["to_device"] == trips + gathers * sum(PARTS) * BYTES["bf16"]
        assert found["to_host"] == trips + STEPS * parts_own(number) * 4


def test_an_engine_that_offloads_nothing_publishes_nothing(ranks: Ranks):
    for rank in ranks:
        assert rank["states"]["quiet"] == {}
        assert rank["states"]["quiet_cost_ns"] == 0


def test_offloaded_and_reloaded_states_are_counted(ranks: Ranks):
    for rank in ranks:
        states = rank["states"]
        expected = states["expected"]

        assert {k: v[0] for k, v in states["away"].items()} == {"to_host": expected}
        assert {k: v[0] for k, v in states["back"].items()} == {
            "to_host": expected,
            "to_device": expected,
        }


NVME_CASES = ("optimizer", "optimizer, pipelined", "both")
each_nvme_case = pytest.mark.parametrize("name", tiers(NVME_CASES, quick=["both"]))
PAGES = 64 * 1024  # what the file system itself may read and write

READ_AHEAD = 128 * 1024  # what the kernel reads at a page fault, by default


@pytest.fixture(scope="module")
def nvme(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ranks:
    extensions = built_extensions()
    if extensions is None:
        pytest.skip(HOW_TO_BUILD)
    names = [name for name in chosen(request, "name") if name in NVME_CASES]
    return run("offload_nvme_job.py", tmp_path_factory.mktemp("nvme"), extensions, *names)


@each_nvme_case
def test_nvme_bytes_are_those_that_the_kernel_counts(nvme: Ranks, name: str):
    for rank in nvme:
        written, read = rank[name]["disk"]
        last = rank[name]["per_step"][-1]

        if written == 0:
            pytest.skip("the file system has no device below it")
        assert 0 <= written - last["to_nvme"][0] <= PAGES
        assert 0 <= read - last["from_nvme"][0] <= PAGES + READ_AHEAD * rank[name]["faults"]


@each_nvme_case
def test_each_step_writes_every_file_to_nvme_once(nvme: Ranks, name: str):
    for rank in nvme:
        before, last = rank[name]["per_step"][-2:]

        assert last["to_nvme"][0] - before["to_nvme"][0] == sum(rank[name]["files"].values())
        assert all(last[direction][1] > before[direction][1] for direction in last)


@each_nvme_case
def test_with_nvme_bytes_equal_those_of_replaced_copy_functions(nvme: Ranks, name: str):
    for rank in nvme:
        last = rank[name]["per_step"][-1]

        assert {d: last[d][0] for d in ("to_host", "to_device")} == rank[name]["oracle"]
        assert rank[name]["bitwise_equal"]
        assert rank[name]["restored"]
        assert rank[name]["failures"] == {}
