"""Holdings of real engines on two ranks, byte for byte against tensors counted another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.async_io import HOW_TO_BUILD, built_extensions
from scripts.holdings_cases import CASES, NVME_CASES
from scripts.launching import SCRIPTS, TORCHRUN, TWO_RANKS, start

pytestmark = pytest.mark.jobs

IN_MEMORY = [name for name in CASES if name not in NVME_CASES]

Looks = list[list[dict]]


def look(folder: Path, names: list[str] | tuple[str, ...]) -> dict[str, Looks]:
    """Return, by case, each rank's looks: before and after the update of each of three steps."""
    script = SCRIPTS / "holdings_checks.py"
    finished = start(TORCHRUN, *TWO_RANKS, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    ranks = [json.loads(file.read_text()) for file in files]
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Looks]:
    return look(tmp_path_factory.mktemp("holdings"), IN_MEMORY)


@pytest.fixture(scope="module")
def nvme_looks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Looks]:
    if built_extensions() is None:
        pytest.skip(HOW_TO_BUILD)
    return look(tmp_path_factory.mktemp("nvme"), NVME_CASES)


def agree(ranks: Looks) -> None:
    for each in ranks:
        assert len(each) == 6
        for one in each:
            told = one["told"]["cpu"]
            assert told["parameters"] == one["parameters"]
            assert told["optimizer"] == one["optimizer"]
            assert sum(told.values()) == one["total"]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_every_byte_is_in_its_category(looks: dict[str, Looks], name: str) -> None:
    agree(looks[name])


@pytest.mark.parametrize("name", NVME_CASES)
def test_with_nvme_too_every_byte_is_in_its_category(
    nvme_looks: dict[str, Looks], name: str
) -> None:
    agree(nvme_looks[name])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fp32 stage 0", 4, 0),
        ("bf16 stage 0", 2, 0),
        ("fp32 stage 1", 2, 0),
        ("bf16 stage 2", 1, 0),
        ("bf16 stage 3", 1, 1),
        ("fp32 stage 3, optimizer on cpu", 4, 4),
    ],
)
def test_gradients_are_there_before_the_update(
    looks: dict[str, Looks], name: str, before: float, after: float
) -> None:
    num_parameters = looks[name][0][0]["num_parameters"]

    told = [one["told"]["cpu"]["gradients"] / num_parameters for one in looks[name][0]]

    assert told == pytest.approx([before, after] * 3, abs=0.05)


def test_nothing_that_should_be_there_was_looked_for_in_vain(looks: dict[str, Looks]) -> None:
    found = {place for ranks in looks.values() for one in ranks[0] for place in one["found"]}

    assert found >= EXPECTED, EXPECTED - found


# Of these the cases above have some; the rest of the table needs a GPU, NVMe or another optimizer.
EXPECTED = {
    "optimizer.ipg_buckets.buffer",
    "optimizer.temp_grad_buffer_for_cpu_offload",
    "optimizer.temp_grad_buffer_for_gpu_offload",
    "optimizer.param_buffer_of_bit16_for_cpu_offload_groups",
    "parameters",
    "buffers",
    "parameters.ds_tensor",
    "parameters.ds_secondary_tensor",
    "parameters.grad",
    "parameters.grad_accum",
    "optimizer.bit16_groups_flat",
    "optimizer.bf16_groups_flat",
    "optimizer.fp32_groups",
    "optimizer.lp_param_buffer",
    "optimizer.param_groups_fp16_flat_cpu_memory",
    "optimizer.averaged_gradients",
    "optimizer.accumulated_grads_in_cpu",
    "optimizer.norm_for_param_grads",
    "optimizer.single_partition_of_fp32_groups.grad",
    "optimizer.fp32_partitioned_groups_flat.grad",
    "optimizer.grad_partitions_flat_buffer",
    "optimizer.inf_or_nan_tracker",
    "optimizer.fp32_groups_gradients_flat",
    "optimizer.single_partition_of_fp32_groups",
    "optimizer.fp32_partitioned_groups_flat",
    "optimizer.fp32_groups_flat_partition",
    "optimizer.optimizer.state",
    "optimizer.state",
}
