"""Traffic of optimizers that a test drives call by call, on simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import MS, ManualClock

from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.offload import transfer_timer
from zerowatch.runtime.memory.offload.traffic import OffloadTraffic

COPY_MS = 5
GROUP_BYTES = 16


class Owner:
    """An object that accepts attributes and weak references."""

    def offload_states(self) -> None: ...

    def reload_states(self) -> None: ...


class DeepSpeedZeroOptimizer(Owner):
    """Stands in for the optimizer of stages 1 and 2 that updates parameters on the host."""

    cpu_offload = True
    low_precision_master_weights_and_grads = False
    micro_step_id = 0

    def __init__(self, host: ManualClock) -> None:
        self.host = host
        self.fails = self.zenflow = False
        self.bit16_groups = [[]]
        self.param_buffer_of_bit16_for_cpu_offload_groups = [
            torch.zeros(GROUP_BYTES // 2, dtype=torch.bfloat16)
        ]

    def _use_compact_grad_partition_buffer(self, group: int) -> bool:
        return False

    def async_accumulate_grad_in_cpu_via_gpu(self, param: torch.Tensor) -> None:
        self.host.elapse(1)

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: torch.Tensor) -> None: ...

    def _restore_cpu_offload_grad_to_gpu(self, param: torch.Tensor) -> None: ...

    def _optimizer_step(self, group: int) -> None:
        self.host.elapse(100)

    def _release_preflattened_grad_buffers(self) -> None: ...

    def step(self) -> None:
        self._optimizer_step(0)
        self.host.elapse(COPY_MS)
        if self.fails:
            raise RuntimeError("out of memory")
        self._release_preflattened_grad_buffers()


class Handle:
    """An asynchronous I/O handle, whose calls take 10 ms."""

    def __init__(self, host: ManualClock) -> None:
        self.host = host

    def async_pread(self, buffer: torch.Tensor, path: str) -> None:
        self.host.elapse(10)

    def async_pwrite(self, buffer: torch.Tensor, path: str) -> None:
        self.host.elapse(10)

    def wait(self) -> None:
        self.host.elapse(10)


class Pieces(Owner):
    def __init__(self, handle: Handle) -> None:
        self.aio_handle = handle

    def _swap_out_tensor(self, tensor: torch.Tensor, path: str) -> None: ...


class Swapper(Owner):
    def __init__(self, handle: Handle) -> None:
        self.aio_handle = handle
        self.gradient_swapper = Pieces(handle)

    def _retrieve_unswapped_grad_partitions(self, swap_info: Any, dest_buffer: Any) -> None: ...


class Status(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


class Parameter(Owner):
    """A parameter of 100 elements whose partition is on the host."""

    ds_status = Status.NOT_AVAILABLE
    ds_secondary_tensor = None

    def __init__(self, host: ManualClock) -> None:
        self.host = host
        self.gathered: list[Any] = []
        self.ds_tensor = torch.zeros(100, dtype=torch.bfloat16)
        self.ds_tensor.ds_numel, self.ds_tensor.final_location = 100, None

    def all_gather(self, param_list: Iterable[Any] | None = None) -> None:
        self._gather(param_list)

    def all_gather_coalesced(self, params: Iterable[Any]) -> None:
        self._gather(params)

    def _gather(self, params: Iterable[Any] | None) -> None:
        self.host.elapse(7)
        self.gathered += [self] if params is None else params


class DeepSpeedZeroOptimizer_Stage3(Owner):
    """Stands in for the optimizer of stage 3, with parameters and optimizer elsewhere."""

    offload_optimizer = offload_param = True

    def __init__(self, host: ManualClock) -> None:
        self.parameters = [Parameter(host), Parameter(host)]
        self.module = SimpleNamespace(parameters=lambda: self.parameters)
        self.optimizer_swapper = Swapper(Handle(host))

    def partition_grads(self) -> None: ...

    def _finalize_offload_gradient_accumulation(self) -> None: ...

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group: int) -> None: ...


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    host = ManualClock()
    monkeypatch.setattr(transfer_timer, "perf_counter_ns", host)
    return host


@pytest.fixture
def watched() -> Iterator[Callable[..., OffloadTraffic]]:
    """Return a function that counts the traffic of an optimizer; no hook may fail."""
    fail_open, opened = FailOpen(), []

    def watch(optimizer: Any, device: str = "cpu") -> OffloadTraffic:
        engine = SimpleNamespace(optimizer=optimizer, device=torch.device(device))
        opened.append(OffloadTraffic(engine, fail_open, EventPool()))
        return opened[-1]

    yield watch
    for traffic in opened:
        traffic.restore()
    assert fail_open.failures == {}


def published(traffic: OffloadTraffic) -> dict[str, tuple[float, float]]:
    """Return bytes and milliseconds by direction."""
    recorder = Recorder()
    traffic.publish(recorder)
    values = recorder.snapshot().values
    seconds = values.get(OFFLOAD_SECONDS, {})
    return {
        labels[0]: (moved, pytest.approx(seconds[labels] * 1e3))
        for labels, moved in values.get(OFFLOAD_BYTES, {}).items()
    }


def test_updated_parameters_are_timed_from_the_update_to_the_release(host, watched):
    optimizer = DeepSpeedZeroOptimizer(host)
    traffic = watched(optimizer)

    for _ in range(2):
        optimizer.step()
        host.elapse(1000)

    assert published(traffic) == {
        "to_host": (0, 0),
        "to_device": (2 * GROUP_BYTES, 2 * COPY_MS),
    }


def test_after_a_failed_copy_only_copies_are_timed(host, watched):
    optimizer = DeepSpeedZeroOptimizer(host)
    traffic = watched(optimizer)
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.fails = False

    for _ in range(2):
        optimizer.step()
        host.elapse(1000)
        optimizer.async_accumulate_grad_in_cpu_via_gpu(torch.zeros(4))

    assert published(traffic) == {
        "to_host": (2 * 16, 2 * 1),
        "to_device": (3 * GROUP_BYTES, 3 * COPY_MS),
    }


def test_methods_that_a_script_kept_count_nothing_after_the_end(host, watched):
    optimizer = DeepSpeedZeroOptimizer(host)
    traffic = watched(optimizer)
    accumulate, update = (
        optimizer.async_accumulate_grad_in_cpu_via_gpu,
        optimizer._optimizer_step,
    )

    traffic.restore()
    started_ns = host.now_ns
    accumulate(torch.zeros(4))
    update(0)

    assert host.now_ns - started_ns == 101 * MS
    assert published(traffic) == {"to_host": (0, 0), "to_device": (0, 0)}


def test_an_optimizer_of_zenflow_is_not_counted(host, watched):
    optimizer = DeepSpeedZeroOptimizer(host)
    optimizer.zenflow = True

    traffic = watched(optimizer)
    optimizer.step()

    assert published(traffic) == {}


def test_a_synchronous_gather_has_bytes_and_a_coalesced_one_has_seconds_too(host, watched):
    optimizer = DeepSpeedZeroOptimizer_Stage3(host)
    traffic = watched(optimizer)
    first, second = optimizer.parameters

    first.all_gather()
    alone = published(traffic)["to_device"]
    first.all_gather(param_list=[first, second])
    listed = published(traffic)["to_device"]
    first.all_gather_coalesced([first, second])
    together = published(traffic)["to_device"]

    assert (alone, listed, together) == ((200, 0), (600, 0), (1000, 7))


def test_an_iterator_of_parameters_reaches_the_gather_whole(host, watched):
    optimizer = DeepSpeedZeroOptimizer_Stage3(host)
    traffic = watched(optimizer)
    first, second = optimizer.parameters

    first.all_gather_coalesced(iter([first, second]))

    assert first.gathered == [first, second]
    assert published(traffic)["to_device"] == (0, 0)


def test_parameters_that_are_gathered_already_take_no_time(host, watched):
    optimizer = DeepSpeedZeroOptimizer_Stage3(host)
    traffic = watched(optimizer)
    first, _ = optimizer.parameters
    first.ds_status = Status.AVAILABLE

    first.all_gather_coalesced([first])

    assert published(traffic)["to_device"] == (0, 0)


def test_a_wait_for_nvme_is_timed_only_if_something_is_pending_by_any_name_of_the_handle(
    host, watched
):
    optimizer = DeepSpeedZeroOptimizer_Stage3(host)
    traffic = watched(optimizer)
    swapper = optimizer.optimizer_swapper

    swapper.gradient_swapper.aio_handle.async_pwrite(torch.zeros(4), "a")
    swapper.aio_handle.wait()
    swapper.aio_handle.wait()

    assert published(traffic)["to_nvme"] == (16, 20)


def test_the_time_of_nvme_is_that_of_the_host_also_with_a_device(host, watched, monkeypatch):
    device = FakeCuda(host)
    device.patch(monkeypatch)
    optimizer = DeepSpeedZeroOptimizer_Stage3(host)
    traffic = watched(optimizer, "cuda")

    optimizer.optimizer_swapper.aio_handle.async_pread(torch.zeros(4), "a")

    assert published(traffic)["from_nvme"] == (16, 10)
    assert device.num_records == 0
