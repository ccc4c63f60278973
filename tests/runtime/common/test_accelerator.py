"""Tests of the accelerator of this process: whether it is in use, and whether it has failed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock

from zerowatch.runtime.common import accelerator


def test_a_device_whose_kernel_has_failed_is_recognized_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.current.run(20)
    started_ns = device.host.now_ns

    before = accelerator.has_failed()
    device.is_broken = True

    assert (before, accelerator.has_failed()) == (False, True)
    assert device.host.now_ns == started_ns


def test_a_device_that_is_not_in_use_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.is_broken = True
    monkeypatch.setattr(device, "is_initialized", lambda: False)

    assert not accelerator.has_failed()


@pytest.mark.parametrize(("kind", "index"), [("cuda", 1), ("cpu", None)])
def test_training_is_on_the_device_that_deepspeed_chose(
    monkeypatch: pytest.MonkeyPatch, kind: str, index: int | None
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    monkeypatch.setattr(device, "current_device", lambda: 1)
    chosen = SimpleNamespace(device_name=lambda: kind)
    deepspeed = SimpleNamespace(get_accelerator=lambda: chosen)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", deepspeed)

    assert accelerator.training_device_index() == index


@pytest.mark.parametrize(
    ("devices", "index"),
    [(["cuda:1", "cuda:2"], 1), (["cpu", "cuda:2"], 2), (["cpu"], 0), ([], 0)],
    ids=str,
)
def test_training_is_on_the_device_of_the_model_s_first_parameter_there(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], index: int
) -> None:
    FakeCuda(ManualClock()).patch(monkeypatch)
    monkeypatch.setattr(accelerator, "device_kind", lambda: "cuda")
    parameters = [SimpleNamespace(device=torch.device(each)) for each in devices]
    model: Any = SimpleNamespace(parameters=lambda: iter(parameters))

    assert accelerator.training_device_index(model) == index
    assert accelerator.training_device_index() == 0


CUDA = accelerator.CudaAccelerator()


@pytest.mark.parametrize(
    ("name", "hardware_id", "is_slice"),
    [
        ("NVIDIA H100 80GB HBM3", "GPU-1234-3", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-1234-3", True),
        ("MIGHTY GPU", "GPU-1234-3", False),
    ],
)
def test_a_device_is_identified_as_its_vendor_s_tools_print_it(
    monkeypatch: pytest.MonkeyPatch, name: str, hardware_id: str, is_slice: bool
) -> None:
    properties = lambda index: SimpleNamespace(uuid=f"1234-{index}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    assert (CUDA.hardware_id(3), CUDA.is_slice(3)) == (hardware_id, is_slice)
    assert (CUDA.device_name(3), CUDA.device_uuid(3)) == (name, "1234-3")


@pytest.mark.parametrize(
    ("value", "hip", "has_one"),
    [("1", None, True), ("8", None, False), (None, None, False), ("1", "6.2", False)],
)
def test_one_connection_is_one_queue_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, value: str | None, hip: str | None, has_one: bool
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    monkeypatch.setattr(torch.version, "hip", hip)

    assert CUDA.has_one_queue() is has_one


def test_the_current_stream_is_made_once_for_each_stream_of_each_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = {"device": 0, "handle": 7}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current["device"])
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: current["handle"], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(**current))
    used = accelerator.CudaAccelerator()

    first = used.current_stream()
    found = {}
    for device, handle in ((0, 7), (0, 8), (1, 7), (0, 7)):
        current.update(device=device, handle=handle)
        found[device, handle] = used.current_stream()

    assert found[0, 7] is first
    assert {key: (each.device, each.handle) for key, each in found.items()} == {
        key: key for key in found
    }


def test_on_a_stream_the_one_before_is_current_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, stream = (11, 0, 1), SimpleNamespace(stream_id=22, device_index=0, device_type=1)
    made: list[tuple[int, ...]] = [before]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: made[-1], raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_setStream", lambda *values: made.append(values), raising=False
    )

    with pytest.raises(KeyError), CUDA.on_stream(stream):
        raise KeyError

    assert made == [before, (22, 0, 1), before]


def test_only_a_stream_of_cuda_has_a_handle() -> None:
    assert CUDA.stream_handle(SimpleNamespace(cuda_stream=77)) == 77
    assert CUDA.stream_handle(SimpleNamespace()) is None


def test_the_memory_fraction_is_one_where_torch_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, name, lambda index: 0.25 + index, raising=False)
    known = CUDA.memory_fraction(0)
    monkeypatch.delattr(torch.cuda, name)

    assert (known, CUDA.memory_fraction(0)) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("settings", "expands"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:512, Expandable_Segments: TRUE", True),
        ("expandable_segments:False", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("source", ["torch", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments_are_a_setting_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch, source: str, settings: str, expands: bool
) -> None:
    name = "_accelerator_getAllocatorSettings"
    monkeypatch.delattr(torch._C, name, raising=False)
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    if source == "torch":
        monkeypatch.setattr(torch._C, name, lambda: settings, raising=False)
    else:
        monkeypatch.setenv(source, settings)

    assert CUDA.has_expandable_segments() is expands


@pytest.mark.parametrize(
    ("available", "initialized", "emptied"),
    [(True, True, 1), (True, False, 0), (False, True, 0)],
)
def test_the_cache_is_emptied_only_of_a_device_in_use(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool, emptied: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))

    CUDA.empty_cache()

    assert len(calls) == emptied


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_history_that_the_script_records_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: is_recorded, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)
    )

    started = CUDA.start_memory_history(77)
    CUDA.stop_memory_history()

    assert started is not is_recorded
    assert calls == ([] if is_recorded else [{"max_entries": 77}]) + [{"enabled": None}]


class FakeRuntime:
    """The runtime and torch's current device, as a list of the calls of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[object] = []
        self.status = 0
        self.has_function = True
        self.error: RuntimeError | None = None
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)
        monkeypatch.setattr(accelerator, "_runtime_function", self._function)

    def _set_device(self, index: int) -> None:
        self.calls.append(index)
        if self.error is not None:
            raise self.error

    def _function(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return self.status

        return call if self.has_function else None


@pytest.mark.parametrize(("status", "may_query"), [(0, True), (1, False)])
def test_a_thread_is_on_its_device_before_its_first_other_call_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, status: int, may_query: bool
) -> None:
    runtime = FakeRuntime(monkeypatch)
    runtime.status = status

    assert CUDA.prepare_thread(3) is may_query
    assert runtime.calls == [3, "ThreadExchangeStreamCaptureMode"]


def test_a_thread_that_cannot_be_prepared_makes_no_further_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(monkeypatch)
    runtime.has_function = False
    without_function = CUDA.prepare_thread(3)
    runtime.has_function, runtime.error = True, RuntimeError("CUDA error: device-side assert")

    assert (without_function, CUDA.prepare_thread(3)) == (False, False)
    assert runtime.calls == [3, 3]


class FakeEventRuntime:
    """The functions of the runtime that query an event, and clear an error of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status, self.handles, self.num_cleared = 0, [], 0
        functions = {"EventQuery": self._query, "GetLastError": self._clear}
        monkeypatch.setattr(accelerator, "_runtime_function", functions.get)

    def _query(self, handle: Any) -> int:
        self.handles.append(handle.value)
        return self.status

    def _clear(self) -> int:
        self.num_cleared += 1
        return self.status


EVENT = SimpleNamespace(cuda_event=2**40, query=lambda: pytest.fail("holds the interpreter lock"))


@pytest.mark.parametrize(("status", "has_passed"), [(0, True), (600, False)])
def test_an_event_is_queried_by_the_runtime_s_function_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, status: int, has_passed: bool
) -> None:
    runtime = FakeEventRuntime(monkeypatch)
    runtime.status = status

    assert accelerator.CudaAccelerator().query_event(EVENT) is has_passed
    assert (runtime.handles, runtime.num_cleared) == ([2**40], 0 if has_passed else 1)


def test_the_query_of_an_event_raises_the_error_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeEventRuntime(monkeypatch)
    runtime.status = 710  # cudaErrorAssert

    with pytest.raises(RuntimeError, match="710"):
        accelerator.CudaAccelerator().query_event(EVENT)
    assert runtime.num_cleared == 1


def test_an_event_that_was_never_recorded_has_passed_as_for_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeEventRuntime(monkeypatch)

    assert accelerator.CudaAccelerator().query_event(SimpleNamespace(cuda_event=0))
    assert runtime.handles == []


@pytest.mark.parametrize(
    ("status", "after"), [(0, ("destroyed", 2**40)), (2, ("error cleared", None))]
)
def test_the_driver_is_asked_by_an_event_of_the_runtime_s_own_that_does_not_remain(
    monkeypatch: pytest.MonkeyPatch, status: int, after: tuple[str, int | None]
) -> None:
    calls: list[tuple[str, int | None]] = []

    def create(handle: Any) -> int:
        calls.append(("created", None))
        if status == 0:
            handle._obj.value = 2**40
        return status

    functions = {
        "EventCreate": create,
        "EventDestroy": lambda handle: calls.append(("destroyed", handle.value)),
        "GetLastError": lambda: calls.append(("error cleared", None)),
    }
    monkeypatch.setattr(accelerator, "_runtime_function", functions.get)
    accelerator.CudaAccelerator().ask_driver()
    monkeypatch.setattr(accelerator, "_runtime_function", lambda name: None)
    accelerator.CudaAccelerator().ask_driver()

    assert calls == [("created", None), after]


@pytest.mark.parametrize("has_passed", [True, False])
def test_without_the_runtime_s_functions_torch_queries_the_event(
    monkeypatch: pytest.MonkeyPatch, has_passed: bool
) -> None:
    monkeypatch.setattr(accelerator, "_runtime_function", lambda name: None)
    event = SimpleNamespace(cuda_event=7, query=lambda: has_passed)

    assert accelerator.CudaAccelerator().query_event(event) is has_passed


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_runtime_that_torch_has_loaded_for_itself_only_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    function = "int hipThreadExchangeStreamCaptureMode(int *mode) { return 0; }"
    compile_library(tmp_path / "libruntime.so", function)
    torch_library = tmp_path / "_C.so"
    compile_library(torch_library, "int unused;", "-Wl,--no-as-needed", tmp_path / "libruntime.so")
    monkeypatch.setattr(torch._C, "__file__", str(torch_library))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    assert CUDA.prepare_thread(0)


def compile_library(path: Path, source: str, *options: object) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *map(str, options)]
    subprocess.run([*command, "-o", str(path)], input=source, text=True, check=True)


def test_without_a_device_there_is_no_uuid_and_no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    monkeypatch.setattr(device, "device_uuid", lambda index: f"uuid-{index}", raising=False)
    monkeypatch.setattr(device, "is_slice", lambda index: True, raising=False)
    found = []
    for available in (True, False):
        monkeypatch.setattr(device, "is_available", lambda available=available: available)
        found.append((accelerator.device_uuid(2), accelerator.device_is_slice(2)))

    assert found == [("uuid-2", True), (None, False)]


@pytest.mark.parametrize(
    ("found", "is_available", "kind"),
    [
        (None, False, "cpu"),
        (SimpleNamespace(type="xpu"), True, "xpu"),
        (SimpleNamespace(type="cuda"), False, "cpu"),  # the usual build, without a GPU
    ],
)
def test_without_deepspeed_training_is_on_torch_s_device(
    monkeypatch: pytest.MonkeyPatch, found: object, is_available: bool, kind: str
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.accelerator", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_available)

    assert accelerator.device_kind() == kind


def test_a_torch_that_raises_without_a_device_trains_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.delitem(sys.modules, "deepspeed.accelerator", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)

    assert accelerator.device_kind() == "cpu"
