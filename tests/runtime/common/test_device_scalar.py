"""Tests of scalars that are copied from a device: no allocation there, lost copies, errors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from zerowatch.runtime.common import device_scalar
from zerowatch.runtime.common.device_scalar import (
    PendingScalar,
    arrived,
    lose,
    mean,
    read,
    scalar,
    total,
)


class Operators(TorchDispatchMode):
    """Records the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


class OnDevice(torch.Tensor):
    """A tensor in host memory that claims to be on a device."""

    device = torch.device("cuda:0")  # type: ignore[assignment]


class Sharded(torch.Tensor):
    """A DTensor: its operations raise, and `to_local` returns the tensor of this rank."""

    placements: tuple[Placement, ...]
    local: torch.Tensor

    def to_local(self) -> torch.Tensor:
        return self.local

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ == "__get__":  # an attribute, such as `device`
                return func(*args, **kwargs or {})
        raise AssertionError(f"{func.__name__} of a DTensor")


def sharded(local: torch.Tensor, *placements: Placement) -> Sharded:
    made = torch.Tensor._make_subclass(Sharded, torch.zeros(()))
    made.placements, made.local = placements, local
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    monkeypatch.setattr(device_scalar, "_slots", {})
    with torch.device("cpu"):  # its first use notes the functions that it is for: torch's own
        empty = torch.empty
        empty(0)
    monkeypatch.setattr(  # a machine without a device has no pinned memory
        torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options)
    )
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_copy_allocates_on_the_host_only_and_is_exact(device: FakeCuda, dtype) -> None:
    source = torch.tensor([3.140625], dtype=torch.float64).to(dtype)

    with Operators() as operators:
        pending = PendingScalar(source)

    assert pending.read() == float(source)
    assert set(operators.names) <= {"empty", "unbind", "detach", "view", "copy_"}
    assert operators.names.count("empty") == 1


def test_a_copy_is_read_once_the_device_has_made_it(device: FakeCuda) -> None:
    device.current.run(20)
    pending = PendingScalar(torch.tensor(7.0))

    assert not pending.arrived()
    assert pending.read() is None
    device.synchronize()
    assert pending.arrived()
    assert pending.read() == 7.0


def test_a_copy_that_has_arrived_survives_an_error_of_the_device_and_another_is_lost(
    device: FakeCuda,
) -> None:
    early = PendingScalar(torch.tensor(1.0))
    assert early.arrived()
    device.current.run(20)
    late = PendingScalar(torch.tensor(2.0))

    device.is_broken = True
    with pytest.raises(torch.AcceleratorError):
        late.arrived()
    for one in (early, late, 3.0, None):
        lose(one)

    assert early.read() == 1.0
    assert late.arrived()
    assert late.read() is None
    assert mean([early, late]) == 1.0


@pytest.mark.parametrize("name", ["empty", "record"])
def test_a_copy_that_cannot_be_started_raises_that_error_only(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"no {name}")

    owner = torch if name == "empty" else device
    monkeypatch.setattr(owner, "empty" if name == "empty" else "record_event", fail)

    with pytest.raises(RuntimeError, match=f"no {name}"):
        PendingScalar(torch.tensor(2.0))  # pytest fails on an error in __del__


def test_copies_that_were_read_lend_their_memory_and_events_to_later_ones(
    device: FakeCuda,
) -> None:
    for number in range(1000):
        assert PendingScalar(torch.tensor(float(number))).read() == number

    assert device.num_events == 1


def test_copies_at_the_same_time_have_memory_of_their_own(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_scalar, "_BLOCK_SIZE", 4)
    for _ in range(2):
        device.current.run(20)
        pending = [PendingScalar(torch.tensor(float(number))) for number in range(10)]
        device.synchronize()
        assert [one.read() for one in pending] == list(range(10))
    assert device.num_events == 10


def test_a_copy_that_nobody_reads_lends_its_memory_once_it_is_done(device: FakeCuda) -> None:
    device.current.run(20)
    PendingScalar(torch.tensor(1.0))  # dropped before the device has made it
    second = PendingScalar(torch.tensor(2.0))
    assert device.num_events == 2
    device.synchronize()
    third = PendingScalar(torch.tensor(3.0))

    assert device.num_events == 2
    assert (second.read(), third.read()) == (2.0, 3.0)


def test_copies_of_other_types_and_devices_share_no_memory(device: FakeCuda) -> None:
    first = PendingScalar(torch.tensor(1.0))
    assert first.read() == 1.0
    device.current_index = 1

    second = PendingScalar(torch.tensor(2.0).as_subclass(OnDevice))
    third = PendingScalar(torch.tensor(3.0, dtype=torch.bfloat16))

    assert (second.read(), third.read()) == (2.0, 3.0)
    assert device.num_events == 3


def test_two_threads_that_read_a_copy_give_its_memory_back_once(device: FakeCuda) -> None:
    pending = PendingScalar(torch.tensor(1.0))
    query, values = device.Event.query, list[float | None]()

    def read_meanwhile(event: Any) -> bool:
        device.Event.query = query
        values.append(pending.read())  # as another thread does here
        return bool(query(event))

    device.Event.query = read_meanwhile
    values.append(pending.read())
    later = [PendingScalar(torch.tensor(number)) for number in (2.0, 3.0)]

    assert values == [None, 1.0]
    assert [one.read() for one in later] == [2.0, 3.0]


@pytest.mark.parametrize("first", [True, False], ids=["inference first", "training first"])
def test_memory_is_lent_in_and_out_of_inference_mode(device: FakeCuda, first: bool) -> None:
    for is_inference in (first, not first, first):
        weight = torch.tensor(2.0, requires_grad=True)
        with torch.inference_mode(is_inference):
            pending = PendingScalar(weight * 3)
        assert pending.read() == 6.0


def test_no_event_is_asked_for_while_a_graph_is_captured(device: FakeCuda) -> None:
    device.current.run(20)
    pending = PendingScalar(torch.tensor(2.0))
    device.Event.query = lambda event: 1 / 0
    device.capturing = True

    del pending  # pytest fails on an error in __del__


@pytest.mark.parametrize("is_broken", [False, True])
def test_pinned_memory_is_never_freed(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        made.append(weakref.ref(tensor := empty(*size, **options)))
        return tensor

    monkeypatch.setattr(torch, "empty", counted)
    device.current.run(20)
    pending = PendingScalar(torch.tensor(2.0))
    pending.lose()

    device.is_broken = is_broken
    del pending
    device_scalar._slots.clear()

    assert [block() is not None for block in made] == [True]


@pytest.mark.parametrize("source", [3, 3.0, torch.tensor(3), torch.tensor([3.0])], ids=repr)
def test_a_value_of_the_host_is_a_number_at_once(source: Any) -> None:
    found = scalar(source)

    assert (type(found), found) == (float, 3.0)
    assert arrived(found)
    assert read(found) == 3.0


def test_nothing_stays_nothing() -> None:
    assert scalar(None) is None
    assert arrived(None)
    assert read(None) is None


def test_a_tensor_of_the_device_is_copied_unless_a_graph_is_captured(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.tensor(5.0).as_subclass(OnDevice)
    monkeypatch.setattr(device, "is_capturing", lambda: False)
    copied = scalar(source)
    monkeypatch.setattr(device, "is_capturing", lambda: True)

    assert isinstance(copied, PendingScalar) and read(copied) == 5.0
    assert scalar(source) is None
    monkeypatch.setattr(device, "is_capturing", lambda: False)
    assert scalar(torch.zeros((), device="meta")) is None  # of another kind of device


def test_a_tensor_of_another_device_than_the_current_is_not_read(device: FakeCuda) -> None:
    source = torch.tensor(5.0).as_subclass(OnDevice)
    device.current_index = 1

    assert scalar(source) is None
    assert not device.used_devices  # an event there would create a context


@pytest.mark.parametrize("kind", [torch.Tensor, OnDevice])
def test_a_loss_that_each_rank_has_is_read_from_the_rank_s_own_tensor(
    device: FakeCuda, kind: type[torch.Tensor]
) -> None:
    local = torch.tensor(5.0).as_subclass(kind)

    assert read(scalar(sharded(local, Replicate(), Replicate()))) == 5.0


@pytest.mark.parametrize(
    ("local", "placements"),
    [
        (torch.tensor(5.0), [Partial()]),
        (torch.tensor([5.0]), [Replicate(), Shard(0)]),
        (torch.empty(0), [Replicate()]),  # a rank outside of the mesh
    ],
    ids=str,
)
def test_a_loss_whose_value_needs_a_collective_is_not_read(
    device: FakeCuda, local: torch.Tensor, placements: list[Placement]
) -> None:
    assert scalar(sharded(local, *placements)) is None


def test_the_sum_and_the_mean_are_over_known_values(device: FakeCuda) -> None:
    device.current.run(20)
    late = PendingScalar(torch.tensor(100.0))

    assert (total([3.0, None, 8.0, late]), mean([3.0, None, 8.0, late])) == (11.0, 5.5)
    assert (arrived(late), read(late)) == (False, None)
    assert (total([None, late]), mean([None, late])) == (None, None)
    device.synchronize()
    assert total([3.0, None, 8.0, late]) == 111.0


def test_the_copy_is_on_the_host_if_the_script_has_another_default_device(
    device: FakeCuda,
) -> None:
    source = torch.tensor(7.0)

    with torch.device("meta"):
        pending = PendingScalar(source)

    assert pending.read() == 7.0
