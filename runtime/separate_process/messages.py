"""What the training process and its monitoring process tell each other.

A message is a pair of a name and a value. The training process sends first a `Setup` ("setup"),
then settled calls and steps ("second"), once a second with a `State`. The other names are in the
two modules that use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from ...metrics.settings import Settings
from ..common.process_info import ProcessInfo
from ..common.rank_store import STORE_TIMEOUT_SECONDS, job_store, without_prefixes
from ..instrumentation.flops import FlopsCounter
from ..memory.forecast.forecast_service import ForecastState
from ..memory.memory_reader import Readings
from .wire import SentCalls, SentGroup

SeriesKey = tuple[str, tuple[str, ...]]  # the name of a metric, and the values of its labels


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where another process finds the job's c10d store: a host and a port, or a file.

    The prefixes of the job's own store cannot be read, so ranks with a monitoring process and ranks
    without do not find each other.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    world_size: int = 1

    @classmethod
    def of_job(cls) -> StoreAddress | None:
        """Return the address of this job's store; None without a job, or for another kind."""
        store: Any = without_prefixes(job_store())
        if isinstance(store, c10d.TCPStore):
            return cls(host=store.host, port=store.port)
        if isinstance(store, c10d.FileStore):
            path: str = store.path  # type: ignore[attr-defined]
            with suppress(ValueError):  # the script destroys the group at this moment
                return cls(path=path, world_size=dist.get_world_size())
        return None

    def open(self) -> Store:
        """Return a client of the store. Prefixes of the job's own store are left out.

        Raises:
            RuntimeError: The store does not respond.
        """
        if self.path:
            return c10d.FileStore(self.path, self.world_size)
        timeout = timedelta(seconds=STORE_TIMEOUT_SECONDS)
        return c10d.TCPStore(
            self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False
        )


class JobStore:
    """The job's store, as another process finds it.

    Args:
        address: Where it is; None if the ranks share none.

    Attributes:
        address: The same. Another thread may change it, if the job has another store.
    """

    def __init__(self, address: StoreAddress | None) -> None:
        self.address = address
        self._opened: tuple[StoreAddress, Store] | None = None

    def find(self) -> Store | None:
        """Return a client of the store, the same one until the address changes. None without one.

        Raises:
            RuntimeError: The store does not respond.
        """
        address = self.address
        if address is None:
            return None
        if self._opened is None or self._opened[0] != address:
            self._opened = address, address.open()
        return self._opened[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is constant in a run, for the monitoring process of one rank.

    Attributes:
        settings: The settings of the run.
        process: The rank.
        watch_index: Number of watches that the training process had before.
        store: The job's store at the start; None if the ranks cannot be compared.
        on_device: Whether training runs on an accelerator.
        flops: Computes the FLOPs of a step.
        peak_flops: Peak FLOP/s of the device; None if unknown.
        baseline_bytes: Memory in use besides the engine, by device.
        devices_with_step_peaks: The devices whose memory peaks belong to steps.
        gpus: NVML's UUID of each GPU that the monitoring process reads, by device.
        info: The labels of `run_info` but for the id of the run.
        ds_config: The ds config of the engine, as JSON can have it.
        each_rank_has_own_data: Whether the ranks share only data.
        groups: The process groups seen so far.
        calls_before_start: The calls that were issued before the watch began.
    """

    settings: Settings
    process: ProcessInfo
    watch_index: int
    store: StoreAddress | None
    on_device: bool
    flops: FlopsCounter | None
    peak_flops: float | None
    baseline_bytes: Mapping[str, float]
    devices_with_step_peaks: frozenset[str]
    gpus: Mapping[str, str]
    info: tuple[str, ...]
    ds_config: Mapping[str, Any]
    each_rank_has_own_data: bool
    groups: Sequence[SentGroup]
    calls_before_start: SentCalls


@dataclass(slots=True, kw_only=True)
class State:
    """What may change every second in the training process.

    Attributes:
        values: Series with a new value: of a counter by how much it has grown, of other metrics
            the value. `removed` are those that have ended.
        store: The job's store; None while it has none.
        since_ns: The time of the last change of phase or replay, of a clock that processes share.
        issued: The number of the last call issued on each rank set, by its key.
        pause: Why this rank is expected to make no progress; None while it trains.
        hangs: Whether this rank announces a hang.
        device_readings: The last readings of the devices that the training process reads.
        idle_readings: Memory readings taken because no step has ended for a while.
        has_engine: Whether the engine still exists.
        variant: Number of changes of the engine's ds config or patches.
        is_patched: Whether methods of the engine are patched.
        step: The number of the engine's last step.
        seconds: The cost of monitoring in the training process, by part.
        dropped: The records that it has lost, by part.
        failures: The failures of its hooks, by name.
        num_dead_threads: Threads of monitoring there that ended though nobody stopped them.
        wants_records: Whether it has listeners for step records.
        batch_risks: The highest risk of a micro-batch since the last state, by device.
    """

    values: Sequence[tuple[SeriesKey, float]]
    removed: Sequence[SeriesKey]
    store: StoreAddress | None
    since_ns: int
    issued: Mapping[str, int]
    pause: str | None
    hangs: bool
    device_readings: Readings
    idle_readings: Readings | None
    has_engine: bool
    variant: int
    is_patched: bool
    step: int
    seconds: Mapping[str, float]
    dropped: Mapping[str, int]
    failures: Mapping[str, int]
    num_dead_threads: int
    wants_records: bool
    batch_risks: Mapping[str, float]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what is pickled: a tuple, which takes an eighth of the time of the object."""
        return _state_of, (_values_of_state(self),)


_NAMES_OF_STATE = tuple(each.name for each in fields(State))
_values_of_state = attrgetter(*_NAMES_OF_STATE)


def _state_of(values: Sequence[Any]) -> State:
    return State(**dict(zip(_NAMES_OF_STATE, values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What the monitoring process knows of other ranks, for the detection of hangs.

    Attributes:
        heartbeats: The last heartbeats of other ranks, read only while there is no progress.
        divergence: A message that names the ranks whose collectives diverged.
        others_hang: Whether another rank announces a hang.
    """

    heartbeats: Mapping[int, Any] = field(default_factory=dict)
    divergence: str | None = None
    others_hang: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKnowledge:
    """What the monitoring process knows of memory, for a report on an out-of-memory error.

    Attributes:
        categories: Bytes by device and category at the peak of the last detailed sample.
        forecasts: The state of the forecasts.
        growth_bytes_per_step: The growth of a memory leak, by device.
    """

    categories: Mapping[str, Mapping[str, float]]
    forecasts: ForecastState
    growth_bytes_per_step: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """Where the run is logged. Sent as soon as the run has an id.

    Attributes:
        run_id: The id of the run.
        folder: The run folder. None if no run log is written.
        log: The step log of this rank.
        identity: The fields that each line of the log contains.
        every_step: Whether the log contains each step.
    """

    run_id: str
    folder: str | None = None
    log: str | None = None
    identity: Mapping[str, str | int] = field(default_factory=dict)
    every_step: bool = True
