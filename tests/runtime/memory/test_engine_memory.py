"""Memory held by an engine: each storage counts once, under its first path; and the categories."""

from __future__ import annotations

import gc
import mmap
import types
import weakref

import pytest
import torch

from zerowatch.metrics.catalog.memory import MEMORY_CATEGORIES
from zerowatch.runtime.devices.libc_memory import free_heap_bytes, resident_bytes
from zerowatch.runtime.memory.categories import baseline, categories_at_peak, elementwise_max
from zerowatch.runtime.memory.engine_memory import bytes_by_category

MIB = 2**20
PAGE = mmap.PAGESIZE


def engine_of(module: torch.nn.Module, **optimizer: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(module=module, optimizer=types.SimpleNamespace(**optimizer))


def held(engine: object) -> dict[str, int]:
    return dict(bytes_by_category(engine)["cpu"])


def test_under_stage_0_the_optimizer_s_parameters_are_the_model_s() -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()

    assert held(types.SimpleNamespace(module=module, optimizer=optimizer)) == {
        "parameters": 80,
        "gradients": 80,
        "optimizer": 2 * 80 + 2 * 4,  # and a count of steps for each of the two
        "comm_buffers": 0,
    }


def test_views_of_one_storage_count_it_once_and_in_full() -> None:
    flat = torch.zeros(100)
    module = torch.nn.Linear(4, 4)
    module.weight.data, module.bias.data = flat[:16].view(4, 4), flat[16:20]

    assert held(engine_of(module, bit16_groups_flat=[flat]))["parameters"] == 400


def test_a_shared_parameter_counts_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight

    assert held(engine_of(module))["parameters"] == 64 + 16


def test_buffers_of_the_module_are_parameters() -> None:
    assert held(engine_of(torch.nn.BatchNorm1d(4)))["parameters"] == 4 * 16 + 8


def test_gradients_in_a_bucket_count_as_the_bucket() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    bucket = torch.zeros(100)
    module.weight.grad = bucket[:16].view(4, 4)
    buckets = {torch.float32: types.SimpleNamespace(buffer=[bucket])}

    sizes = held(engine_of(module, ipg_buckets=buckets))

    assert (sizes["gradients"], sizes["comm_buffers"]) == (0, 400)


def test_a_sparse_gradient_counts_by_its_parts() -> None:
    module = torch.nn.Embedding(10, 4, sparse=True)
    module(torch.tensor([1, 2])).sum().backward()

    assert held(engine_of(module))["gradients"] == 2 * 8 + 2 * 4 * 4


def test_a_partitioned_parameter_counts_only_its_partition() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight.data = torch.empty(0)
    module.weight.ds_tensor = torch.zeros(8)

    assert held(engine_of(module))["parameters"] == 32


def test_a_tensor_without_data_is_not_counted() -> None:
    assert bytes_by_category(engine_of(torch.nn.Linear(4, 4, device="meta"))) == {}


def test_an_engine_without_an_optimizer_holds_its_parameters() -> None:
    engine = types.SimpleNamespace(module=torch.nn.Linear(4, 4), optimizer=None)

    assert held(engine)["parameters"] == 80


def test_no_property_of_the_optimizer_runs() -> None:
    class Optimizer:
        @property
        def averaged_gradients(self) -> object:
            raise AssertionError("the property was read")

    engine = types.SimpleNamespace(module=torch.nn.Linear(4, 4), optimizer=Optimizer())

    assert held(engine)["gradients"] == 0


def test_no_tensor_is_kept_alive() -> None:
    module = torch.nn.Linear(4, 4)
    module.weight.grad = torch.ones(4, 4)
    bytes_by_category(engine_of(module))
    gone = [weakref.ref(module.weight), weakref.ref(module.weight.grad)]

    gc.disable()
    try:
        del module
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_pages_of_a_buffer_that_were_never_written_are_not_counted() -> None:
    size = 64 * MIB
    buffer = torch.empty(size, dtype=torch.uint8)

    sizes = [resident_bytes(buffer.data_ptr(), size)]
    for written in (10 * MIB, 40 * MIB, size):
        buffer[:written] = 1
        sizes.append(resident_bytes(buffer.data_ptr(), size))

    # Where huge pages are on, memory comes in pieces of 2 MiB.
    assert sizes == pytest.approx([0, 10 * MIB, 40 * MIB, size], abs=2 * MIB)


def test_a_small_buffer_counts_in_full() -> None:
    assert resident_bytes(0, MIB - 1) == MIB - 1


BEFORE = {"parameters": 100, "gradients": 50, "optimizer": 200, "comm_buffers": 0}
AFTER = {"parameters": 100, "gradients": 10, "optimizer": 200, "comm_buffers": 30}


def test_categories_add_up_to_the_peak_above_the_baseline() -> None:
    categories = categories_at_peak(
        BEFORE,
        AFTER,
        between_steps_bytes=1000 + 340 + 25,
        peak_bytes=1000 + 500,
        baseline_bytes=1000,
    )

    assert categories == {
        "parameters": 100,
        "gradients": 50,
        "optimizer": 200,
        "comm_buffers": 30,
        "other": 25,
        "activations": 500 - 100 - 50 - 200 - 30 - 25,
    }
    assert set(categories) == set(MEMORY_CATEGORIES)


@pytest.mark.parametrize(
    ("peak", "gradients", "comm_buffers", "other"),
    [(1395, 50, 30, 15), (1375, 50, 25, 0), (1310, 10, 0, 0)],
)
def test_categories_larger_than_the_peak_are_reduced(
    peak: float, gradients: float, comm_buffers: float, other: float
) -> None:
    categories = categories_at_peak(BEFORE, AFTER, 1365, peak, 1000)

    assert categories["activations"] == 0
    assert categories["gradients"] == gradients
    assert categories["comm_buffers"] == comm_buffers
    assert categories["other"] == other
    assert sum(categories.values()) == peak - 1000


def test_a_floor_below_the_held_bytes_leaves_no_other() -> None:
    categories = categories_at_peak(BEFORE, AFTER, 1300, 1500, 1000)

    assert categories["other"] == 0
    assert sum(categories.values()) == 500


def test_optimizer_states_created_by_the_step_do_not_count_at_the_peak() -> None:
    first = {**BEFORE, "optimizer": 0}

    assert categories_at_peak(first, AFTER, 1365, 1300, 1000)["optimizer"] == 0


def test_without_a_sample_before_the_step_the_one_after_is_used() -> None:
    categories = categories_at_peak({}, AFTER, 1365, 1500, 1000)

    assert (categories["gradients"], categories["optimizer"]) == (10, 200)


def test_the_baseline_excludes_the_engine_and_is_zero_on_a_gpu() -> None:
    assert baseline("cpu", 1000.0, BEFORE) == 650
    assert baseline("cpu", 100.0, BEFORE) == 0
    assert baseline("cuda:0", 1000.0, BEFORE) == 0


def test_of_two_samples_the_larger_bytes_of_each_category_count() -> None:
    in_backward = {"cpu": {"gradients": 1, "comm_buffers": 9}, "cuda:0": {"gradients": 5}}
    before_step = {"cpu": {"gradients": 4, "comm_buffers": 0}, "cuda:1": {"gradients": 6}}

    assert elementwise_max(in_backward, before_step) == {
        "cpu": {"gradients": 4, "comm_buffers": 9},
        "cuda:0": {"gradients": 5},
        "cuda:1": {"gradients": 6},
    }


def test_freed_memory_that_the_heap_keeps_is_counted() -> None:
    blocks = [bytearray(1000) for _ in range(20_000)]
    before = free_heap_bytes()

    del blocks[::2]

    assert free_heap_bytes() - before > 5 * MIB
