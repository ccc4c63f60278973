"""The proxy of an asynchronous I/O handle forwards all calls and counts their bytes."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.metrics.catalog.memory import OFFLOAD_BYTES
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.event_pool import EventPool
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.memory.offload.traffic import OffloadTraffic


class Handle:
    """A handle whose attributes cannot be set, as with DeepSpeed's compiled one."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self.calls.append(("read", buffer, path, offset))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        self.calls.append(("write", buffer, path, offset))
        return 0

    def wait(self) -> int:
        return len(self.calls)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        return True


class Owner(SimpleNamespace):
    """An object that accepts attributes and weak references."""

    def __hash__(self) -> int:
        return id(self)


class Pieces(Owner):
    def _swap_out_tensor(self, tensor: torch.Tensor, path: str) -> None: ...


class Swapper(Owner):
    def _retrieve_unswapped_grad_partitions(self, swap_info: Any, dest_buffer: Any) -> None: ...


class DeepSpeedZeroOptimizer_Stage3(Owner):
    def offload_states(self) -> None: ...

    def reload_states(self) -> None: ...

    def partition_grads(self) -> None: ...

    def _finalize_offload_gradient_accumulation(self) -> None: ...

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group: int) -> None: ...


def make_engine() -> Any:
    handle = Handle()
    pieces = Pieces(aio_handle=handle)
    optimizer = DeepSpeedZeroOptimizer_Stage3(
        offload_optimizer=True,
        offload_param=False,
        optimizer_swapper=Swapper(aio_handle=handle, gradient_swapper=pieces),
        module=torch.nn.Linear(1, 1),
    )
    return SimpleNamespace(optimizer=optimizer, device=torch.device("cpu"))


@pytest.fixture
def engine() -> Any:
    return make_engine()


def moved(traffic: OffloadTraffic) -> dict[str, float]:
    recorder = Recorder()
    traffic.publish(recorder)
    series = recorder.snapshot().values[OFFLOAD_BYTES]
    return {labels[0]: value for labels, value in series.items() if value}


def test_reads_and_writes_reach_the_handle_unchanged_and_are_counted(engine):
    handle = engine.optimizer.optimizer_swapper.aio_handle
    traffic = OffloadTraffic(engine, FailOpen(), EventPool())
    proxy = engine.optimizer.optimizer_swapper.aio_handle
    buffer = torch.zeros(6)

    assert proxy.async_pread(buffer, "a", 0) == 0
    assert proxy.async_pwrite(buffer.half(), "b", 0) == 0
    waited = proxy.wait()

    assert waited == 2
    assert [call[0] for call in handle.calls] == ["read", "write"]
    assert handle.calls[0][1] is buffer
    assert moved(traffic) == {"from_nvme": 24, "to_nvme": 12}


def test_other_methods_are_forwarded(engine):
    OffloadTraffic(engine, FailOpen(), EventPool())

    assert engine.optimizer.optimizer_swapper.aio_handle.is_pinned(torch.zeros(1))


def test_closing_restores_the_same_handle_and_a_kept_proxy_forwards(engine):
    swapper = engine.optimizer.optimizer_swapper
    handle = swapper.aio_handle
    traffic = OffloadTraffic(engine, FailOpen(), EventPool())
    proxy = swapper.aio_handle

    traffic.restore()
    proxy.async_pread(torch.zeros(6), "a", 0)

    assert swapper.aio_handle is handle
    assert swapper.gradient_swapper.aio_handle is handle
    assert proxy.wait() == 1
    assert moved(traffic) == {}


def test_after_a_rebuild_the_traffic_of_the_new_engine_is_added_and_the_old_one_is_restored(engine):
    handle = engine.optimizer.optimizer_swapper.aio_handle
    traffic = OffloadTraffic(engine, FailOpen(), EventPool())
    engine.optimizer.optimizer_swapper.aio_handle.async_pread(torch.zeros(6), "a", 0)
    rebuilt = make_engine()

    traffic.rebind_engine(rebuilt)
    rebuilt.optimizer.optimizer_swapper.aio_handle.async_pread(torch.zeros(10), "a", 0)

    assert engine.optimizer.optimizer_swapper.aio_handle is handle
    assert moved(traffic) == {"from_nvme": 24 + 40}


def test_a_failing_hook_is_counted_once_and_the_call_continues(engine, caplog):
    fail_open = FailOpen()
    traffic = OffloadTraffic(engine, fail_open, EventPool())

    engine.optimizer._reassign_or_swap_out_partitioned_parameters(0)
    engine.optimizer._reassign_or_swap_out_partitioned_parameters(0)

    assert fail_open.failures == {"offload": 1}
    assert moved(traffic) == {}


def test_a_monitored_optimizer_can_be_garbage_collected(engine):
    reference = weakref.ref(engine.optimizer)
    traffic = OffloadTraffic(engine, FailOpen(), EventPool())

    engine.optimizer = None
    gc.collect()

    assert reference() is None
    traffic.restore()


def test_an_engine_without_a_zero_optimizer_is_not_patched():
    engine = SimpleNamespace(optimizer=None, device=torch.device("cpu"))
    recorder = Recorder()

    traffic = OffloadTraffic(engine, FailOpen(), EventPool())
    traffic.publish(recorder)
    traffic.restore()

    assert OFFLOAD_BYTES not in recorder.snapshot().values
