"""Fake of the functions of pynvml that zerowatch calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int = 0) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """One GPU; a reading that is None is not supported. Units are NVML's own."""

    uuid: str
    utilization_percent: int | None = 40
    power_milliwatts: int | None = 250_000
    temperature_celsius: int | None = 61
    sm_megahertz: int | None = 1980
    energy_millijoules: int | None = 5_000_000
    sm_active_percent: float | None = None
    link_counters: dict[int, int] = field(default_factory=dict)
    narrow_fields: frozenset[int] = frozenset()  # counted in 32 bits


class FakeNvml:
    """Fake of the module; put it into sys.modules as `pynvml`."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_NVLINK_MAX_LINKS = 0
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    nvmlEventTypeXidCriticalError = 8
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    def __init__(self, *gpus: FakeGpu, loads: bool = True) -> None:
        self.gpus = gpus
        self.loads = loads
        self.opened = 0
        self.live_samples: list[SimpleNamespace] = []
        self._samples_taken = 0

    def nvmlInit(self) -> None:
        if not self.loads:
            raise NVMLError(12)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NVMLError(2)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=_supported(gpu.utilization_percent))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return _supported(gpu.power_milliwatts)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return _supported(gpu.temperature_celsius)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return _supported(gpu.sm_megahertz)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return _supported(gpu.energy_millijoules)

    def nvmlDeviceGetFieldValues(
        self, gpu: FakeGpu, wanted: list[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        return [
            _field_value(gpu.link_counters.get(number), is_narrow=number in gpu.narrow_fields)
            for number, _ in wanted
        ]

    def nvmlGpmQueryDeviceSupport(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(gpu.sm_active_percent is not None))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        sample = SimpleNamespace()
        self.live_samples.append(sample)
        return sample

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.live_samples.remove(sample)

    def nvmlGpmSampleGet(self, gpu: FakeGpu, sample: SimpleNamespace) -> None:
        self._samples_taken += 1
        sample.gpu, sample.number = gpu, self._samples_taken

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=float("nan"))])

    def nvmlGpmMetricsGet(self, question: SimpleNamespace) -> SimpleNamespace:
        assert question.sample2.number == question.sample1.number + 1, "samples out of order"
        question.metrics[0].value = question.sample2.gpu.sm_active_percent
        return question


def _supported(value: int | None) -> int:
    if value is None:
        raise NVMLError(3)
    return value


def _field_value(counter: int | None, *, is_narrow: bool) -> Any:
    if counter is None:
        return SimpleNamespace(nvmlReturn=3)
    if is_narrow:
        value = SimpleNamespace(ullVal=0, uiVal=counter % 2**32)
        return SimpleNamespace(nvmlReturn=0, valueType=1, value=value)
    value = SimpleNamespace(ullVal=counter, uiVal=0)
    return SimpleNamespace(nvmlReturn=0, valueType=3, value=value)
