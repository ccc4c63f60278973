"""Replaces an engine in its process by an engine with another ds config and the same state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from time import perf_counter
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init

from ....errors import RebuildError
from ...collectives.collective_table import Guard, guarded_methods
from ...common import accelerator
from ...common.collective_attempt import CollectiveAttempt, PeerAttemptError
from ...common.ds_config import ds_config_of, zero_stage
from ...common.format_numbers import format_bytes
from ...common.host_group import HostCollectives
from ...common.patching import PatchSet
from ...devices.available_memory import available_rank_bytes
from .preconditions import unsupported_reason
from .state_snapshot import (
    HostSum,
    ParamSnapshot,
    TrainingStateSnapshot,
    needed_host_bytes,
    restore_snapshot,
    take_snapshot,
    unequal_members,
)
from .teardown import forget_module, release_tensors, strip_module, teardown, track_hooks

logger = logging.getLogger(__name__)

# Share of the available host memory that the copy of the state may use.
_USED_RATIO = 7 / 8

Config = Mapping[str, Any]
MakeEngine = Callable[[torch.nn.Module, dict[str, Any]], Any]
OnEngineLost = Callable[[Exception], object]


class UndoneRebuildError(RebuildError):
    """The new engine could not be made; an engine with the old ds config replaces the old engine.

    Attributes:
        engine: The replacement, with the old engine's exact state. The old engine was removed,
            because both use the same module.
    """

    def __init__(self, message: str, engine: Any) -> None:
        super().__init__(message)
        self.engine = engine


def rebuild(
    engine: Any,
    config: Config,
    *,
    make_engine: MakeEngine,
    host_group: HostCollectives,
    on_engine_lost: OnEngineLost = lambda error: None,
) -> Any:
    """Replace a running engine by an engine with another ds config, and return the new engine.

    All ranks must call this between the same two windows, with the same config. The module and its
    parameters stay the same objects. An optimizer and an LR scheduler that the caller made are
    passed to DeepSpeed again, the optimizer without its state. All training state of the old engine
    is copied to the new one. The old engine has no tensors afterwards, even if the caller holds it.

    Args:
        engine: A DeepSpeed engine of any ZeRO stage, with states on the device or the host.
        config: The new ds config. Precision, optimizer and scheduler must be as in the old ds
            config.
        make_engine: Function that calls deepspeed.initialize with a module and a ds config, as for
            the first engine.
        host_group: Group of all ranks.
        on_engine_lost: Function that all ranks call with their error if the old engine cannot be
            made again either. An error that it raises replaces this error.

    Raises:
        RebuildError: The rebuild is not supported; nothing has changed.
        UndoneRebuildError: The new engine could not be made. Use the error's `engine` instead.
    """
    old = ds_config_of(engine)
    with CollectiveAttempt(host_group) as check:
        snapshot = _checked_snapshot(engine, old, config, host_group)
    if check.error is not None:
        raise not_rebuilt(check.error)
    began, device = perf_counter(), torch.device(engine.device)
    with closing(HostSum(host_group.world_size)) as host_sum, _preserved_rng(device):
        builder = _Builder(engine, snapshot, make_engine, host_sum, host_group)
        replacement, error = builder.replace(engine, config)
        if error is not None:
            raise _rolled_back(builder, old, error, on_engine_lost)
    seconds, stages = perf_counter() - began, (zero_stage(config), zero_stage(old))
    logger.info("rebuilt the engine in %.1f s: ZeRO stage %d, was %d", seconds, *stages)
    return replacement


class _Builder:
    """Builds engines of one module from one snapshot, and removes partly built ones."""

    def __init__(
        self,
        engine: Any,
        snapshot: TrainingStateSnapshot,
        make_engine: MakeEngine,
        host_sum: HostSum,
        host_group: HostCollectives,
    ) -> None:
        self._module: torch.nn.Module = engine.module
        # A callable of the caller has made this optimizer, unless the caller has.
        self._client = None if engine.client_optimizer is None else engine.basic_optimizer
        self._snapshot = snapshot
        self._make_engine = make_engine
        self._host_sum = host_sum
        self._host_group = host_group

    def replace(self, engine: Any, config: Config) -> tuple[Any, Exception | None]:
        """Remove an engine, build another engine, and return the result of `build`."""
        with CollectiveAttempt(self._host_group) as ending:
            teardown(engine)
            strip_module(self._module)
        return (None, ending.error) if ending.error is not None else self.build(config)

    def build(self, config: Config) -> tuple[Any, Exception | None]:
        """Return an engine with the restored state, or the error of this or another rank."""
        engines: list[Any] = []
        undo_hooks = track_hooks(self._module)
        _synchronize_ids(self._host_group)
        with CollectiveAttempt(self._host_group) as attempt, guarded_collectives(attempt):
            parameters = self._snapshot.parameters
            partitioned = zero_stage(config) == 3
            _allocate_parameters(self._module, parameters, config, partitioned=partitioned)
            self._reset_client_optimizer()
            engines.append(self._make_engine(self._module, copy.deepcopy(dict(config))))
            restore_snapshot(engines[0], self._snapshot, self._host_sum, attempt)
        if attempt.error is None:
            return engines[0], None
        if engines:
            teardown(engines.pop())
        undo_hooks()
        if self._client is not None:
            release_tensors(self._client)
        strip_module(self._module)
        forget_module(self._module)
        return None, attempt.error

    def _reset_client_optimizer(self) -> None:
        """Reset the caller's own optimizer to what it was before DeepSpeed used it."""
        client, snapshot = self._client, self._snapshot
        if not isinstance(client, torch.optim.Optimizer):
            return
        parameters = dict(self._module.named_parameters())
        client.state.clear()
        client.param_groups[:] = [
            {"params": [parameters[name] for name in members], **copy.deepcopy(options)}
            for members, options in zip(snapshot.members, snapshot.options, strict=True)
        ]


def _checked_snapshot(
    engine: Any, old: Config, config: Config, host_group: HostCollectives
) -> TrainingStateSnapshot:
    """Check that the rebuild is supported, and copy the state; the engine is unchanged."""
    problem = unsupported_reason(engine, old, config)
    if problem is not None:
        raise RebuildError(problem)
    try:
        needed, available = needed_host_bytes(engine, host_group.world_size), available_rank_bytes()
        if needed > _USED_RATIO * available:
            raise RebuildError(
                f"the copy of the training state needs {format_bytes(needed)} of host memory on "
                f"this rank, and {format_bytes(available)} are available to it"
            )
        snapshot = take_snapshot(engine, host_group.rank, host_group.world_size)
    except ValueError as error:
        raise RebuildError(f"the optimizer's state cannot be moved: {error}") from None
    unequal = unequal_members(snapshot)
    if unequal is not None and zero_stage(config) != 0:
        raise RebuildError(
            f"parameter {unequal} has another number of updates than the rest of its group, and "
            f"stage {zero_stage(config)} counts updates per group; give such parameters a group "
            "of their own"
        )
    return snapshot


def not_rebuilt(error: Exception) -> RebuildError:
    """Return the error of a rebuild that was refused before anything changed."""
    reason = str(error)
    if isinstance(error, PeerAttemptError):
        reason = "another rank refused, whose error has the reason"
    refusal = RebuildError(f"the engine was not rebuilt: {reason}")
    refusal.__cause__ = None if isinstance(error, RebuildError) else error
    return refusal


def _rolled_back(
    builder: _Builder, old: Config, error: Exception, on_engine_lost: OnEngineLost
) -> UndoneRebuildError:
    """Build an engine with the old ds config. If that fails too, the training ends."""
    again, failed = builder.build(old)
    if failed is not None:
        on_engine_lost(failed)
        raise failed
    undone = UndoneRebuildError(
        f"the engine could not be made with the new ds config: {type(error).__name__}: {error}. "
        "Training continues with the previous ds config and all of its state",
        again,
    )
    undone.__cause__ = error
    return undone


@contextmanager
def _preserved_rng(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == accelerator.current.kind else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def guarded_collectives(attempt: CollectiveAttempt) -> Iterator[None]:
    """Check before each collective of DeepSpeed that no rank has failed."""
    backend: Any = deepspeed_comm.cdb

    def guarded(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            attempt.check_peers()
            return original(*args, **kwargs)

        return call

    patches = PatchSet()
    patches.add_existing(backend, guarded_methods(Guard.REBUILD), guarded)
    try:
        yield
    finally:
        patches.restore()


def _synchronize_ids(host_group: HostCollectives) -> None:
    """Make all ranks number modules and parameters from the same number.

    DeepSpeed numbers modules and parameters across all engines of a process, and refuses to train
    if the numbers differ between ranks. They differ if one rank got further than other ranks in
    building an engine that failed.
    """
    Init.param_id = host_group.all_max(Init.param_id)
    (count,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = host_group.all_max(count[0])


class _SingleParameter(torch.nn.Module):
    """Wraps one parameter as a module, so that parameters can be partitioned one at a time."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter


def _allocate_parameters(
    module: torch.nn.Module,
    parameters: Mapping[str, ParamSnapshot],
    config: Mapping[str, Any],
    *,
    partitioned: bool,
) -> None:
    """Allocate zeros for each parameter. For stage 3, partition each parameter at once.

    So no rank holds the whole model in stage 3. The values are restored later. If DeepSpeed
    partitioned the model itself, it would broadcast values that are overwritten anyway.
    """
    first: Any = None
    for name, parameter in module.named_parameters():
        kept = parameters[name]
        parameter.data = torch.empty_strided(
            kept.shape, kept.stride, dtype=kept.dtype, device=kept.device
        ).zero_()
        if not partitioned:
            continue
        if first is None:
            first = parameter
            Init(
                module=_SingleParameter(parameter), config_dict_or_path=copy.deepcopy(dict(config))
            )
        else:
            first.convert_to_zero_parameters([parameter])
