"""Bytes held by real engines on two ranks, compared with an independent count of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS
from scripts.memory.async_io import HOW_TO_BUILD, built_extensions
from scripts.memory.engine_memory_cases import CASES, NVME_CASES

pytestmark = pytest.mark.jobs

IN_MEMORY = [name for name in CASES if name not in NVME_CASES]
QUICK = (
    "fp32 stage 0",
    "fp32 stage 1",
    "fp16 stage 1, accumulating in fp32",
    "bf16 stage 2",
    "bf16 stage 2, on cpu, accumulating",
    "bf16 stage 3, within nodes",
    "fp32 stage 3, optimizer on cpu",
    "bf16 stage 3, all on nvme",
)

# Bytes of gradients for each parameter, before and after the update.
GRADIENTS = [
    ("fp32 stage 0", 4, 0),
    ("bf16 stage 0", 2, 0),
    ("fp32 stage 1", 2, 0),
    ("bf16 stage 2", 1, 0),
    ("bf16 stage 3", 1, 1),
    ("fp32 stage 3, optimizer on cpu", 4, 4),
]

Samples = list[list[dict]]


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    listed = list(names)
    return pytest.mark.parametrize("name", tiers(listed, [n for n in listed if n in QUICK]))


def sample(folder: Path, names: list[str]) -> dict[str, Samples]:
    """Return each rank's samples by case: before and after the update of each of three steps."""
    script = SCRIPTS / "memory" / "engine_memory_checks.py"
    finished = start_ranks(2, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    ranks = [json.loads(file.read_text()) for file in files]
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.fixture(scope="module")
def samples(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Samples]:
    names = [name for name in chosen(request, "name") if name in IN_MEMORY]
    return sample(tmp_path_factory.mktemp("engine_memory"), names)


@pytest.fixture(scope="module")
def nvme_samples(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Samples]:
    if built_extensions() is None:
        pytest.skip(HOW_TO_BUILD)
    names = [name for name in chosen(request, "name") if name in NVME_CASES]
    return sample(tmp_path_factory.mktemp("nvme"), names)


def agree(ranks: Samples) -> None:
    for each in ranks:
        assert len(each) == 6
        for one in each:
            held = one["measured"]["cpu"]
            assert held["parameters"] == one["parameters"]
            assert held["optimizer"] == one["optimizer"]
            assert sum(held.values()) == one["total"]


@each_of(IN_MEMORY)
def test_every_byte_is_in_its_category(samples: dict[str, Samples], name: str) -> None:
    agree(samples[name])


@each_of(NVME_CASES)
def test_with_nvme_too_every_byte_is_in_its_category(
    nvme_samples: dict[str, Samples], name: str
) -> None:
    agree(nvme_samples[name])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    tiers(GRADIENTS, quick=[case for case in GRADIENTS if case[0] in QUICK]),
)
def test_gradients_are_counted_before_the_update(
    samples: dict[str, Samples], name: str, before: float, after: float
) -> None:
    num_parameters = samples[name][0][0]["num_parameters"]

    ratios = [one["measured"]["cpu"]["gradients"] / num_parameters for one in samples[name][0]]

    assert ratios == pytest.approx([before, after] * 3, abs=0.05)


# A case that has each tensor path; the rest of the table needs a GPU, NVMe or another optimizer.
EXPECTED = {
    "fp32 stage 0": {
        "buffers",
        "optimizer.state",
        "parameters",
        "parameters.grad",
    },
    "bf16 stage 0": {
        "optimizer.fp32_groups",
        "optimizer.optimizer.state",
    },
    "fp32 stage 1": {
        "optimizer.averaged_gradients",
        "optimizer.bit16_groups_flat",
        "optimizer.single_partition_of_fp32_groups",
    },
    "bf16 stage 1, accumulating in fp32": {
        "optimizer.bf16_groups_flat",
        "optimizer.fp32_groups_flat_partition",
        "optimizer.fp32_groups_gradients_flat",
    },
    "fp16 stage 1, accumulating in fp32": {
        "parameters.grad_accum",
    },
    "bf16 stage 2, on cpu, accumulating": {
        "optimizer.accumulated_grads_in_cpu",
        "optimizer.norm_for_param_grads",
        "optimizer.param_buffer_of_bit16_for_cpu_offload_groups",
        "optimizer.single_partition_of_fp32_groups.grad",
        "optimizer.temp_grad_buffer_for_cpu_offload",
        "optimizer.temp_grad_buffer_for_gpu_offload",
    },
    "bf16 stage 3, within nodes": {
        "optimizer.fp32_partitioned_groups_flat",
        "optimizer.grad_partitions_flat_buffer",
        "optimizer.inf_or_nan_tracker",
        "optimizer.ipg_buckets.buffer",
        "optimizer.lp_param_buffer",
        "parameters.ds_secondary_tensor",
        "parameters.ds_tensor",
    },
    "fp32 stage 3, optimizer on cpu": {
        "optimizer.fp32_partitioned_groups_flat.grad",
    },
    "fp32 stage 3, all on cpu": {
        "optimizer.param_groups_fp16_flat_cpu_memory",
    },
}


@each_of(EXPECTED)
def test_all_expected_tensor_paths_are_found(samples: dict[str, Samples], name: str) -> None:
    found = {path for one in samples[name][0] for path in one["found"]}

    assert found >= EXPECTED[name], EXPECTED[name] - found
