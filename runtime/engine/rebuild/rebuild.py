"""Another engine of the same model, in this process, with all of the old one's training state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from time import perf_counter
from typing import Any

import torch

from ....errors import RebuildError
from ...common import accelerator
from ...common.all_or_none import CollectiveAttempt, PeerFailedError
from ...common.host_group import HostCollectives
from ...common.training_config import zero_stage
from .check import device_of, unsupported_reason
from .fill import fill
from .memory import agree_on_ids, allocate_parameters
from .ranks import HostSum, guarded_collectives
from .snapshot import TrainingStateSnapshot, take_snapshot, unequal_members
from .strip import mark_hooks, strip_module
from .teardown import forget, let_go, teardown

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]
MakeEngine = Callable[[torch.nn.Module, dict[str, Any]], Any]


class UndoneRebuildError(RebuildError):
    """A new engine could not be made, and one of the old configuration stands in its place.

    Attributes:
        engine: It has the old engine's state, bit for bit. The old engine itself is gone, for both
            are of one module.
    """

    def __init__(self, message: str, engine: Any) -> None:
        super().__init__(message)
        self.engine = engine


def rebuild(
    engine: Any, config: Config, *, make_engine: MakeEngine, host_group: HostCollectives
) -> Any:
    """Return a new engine with another ds config in the place of one that runs.

    All ranks call it at the same time, between two windows, with the same config. The module and
    its parameters stay the same objects. So does an optimizer that the caller made: it gets its
    parameters back, empty of state, and DeepSpeed takes it as it did the first time; likewise an
    LR scheduler of it. What the new engine makes itself gets the state of what the old one made.
    The old engine is empty afterwards, whoever holds it.

    Args:
        engine: DeepSpeed's, of any ZeRO stage, with states on the device or the host.
        config: The new ds config. Precision, optimizer and scheduler must be those of the old one.
        make_engine: Calls deepspeed.initialize as for the first engine, with a module and a ds
            config of its own.
        host_group: How the ranks agree.

    Raises:
        RebuildError: It was refused, and nothing was touched.
        UndoneRebuildError: The new engine could not be made; its `engine` is to be used instead.
    """
    old = _config_of(engine)
    with CollectiveAttempt(host_group) as look:
        snapshot = _look(engine, old, config, host_group)
    if look.error is not None:
        raise _refused(look.error)
    began, device = perf_counter(), device_of(engine)
    with closing(HostSum(host_group.world_size)) as mover, _random_state_kept(device):
        builder = _Builder(engine, snapshot, make_engine, mover, host_group)
        made, error = builder.replace(engine, config)
        if error is not None:
            raise _undone(builder, old, error)
    seconds, stages = perf_counter() - began, (zero_stage(config), zero_stage(old))
    logger.info("rebuilt the engine in %.1f s: ZeRO stage %d, was %d", seconds, *stages)
    return made


class _Builder:
    """Makes engines of one module from one snapshot, and takes half of one away again."""

    def __init__(
        self,
        engine: Any,
        snapshot: TrainingStateSnapshot,
        make_engine: MakeEngine,
        mover: HostSum,
        host_group: HostCollectives,
    ) -> None:
        self._module: torch.nn.Module = engine.module
        self._client = engine.client_optimizer
        self._snapshot = snapshot
        self._make_engine = make_engine
        self._mover = mover
        self._host_group = host_group

    def replace(self, engine: Any, config: Config) -> tuple[Any, Exception | None]:
        """End an engine and build another; return as `build` does."""
        with CollectiveAttempt(self._host_group) as ending:
            teardown(engine)
            strip_module(self._module)
        return (None, ending.error) if ending.error is not None else self.build(config)

    def build(self, config: Config) -> tuple[Any, Exception | None]:
        """Return a filled engine, or the error that kept this rank or another from having one."""
        made: list[Any] = []
        undo_hooks = mark_hooks(self._module)
        agree_on_ids(self._host_group)
        with CollectiveAttempt(self._host_group) as attempt, guarded_collectives(attempt):
            parameters = self._snapshot.parameters
            partitioned = zero_stage(config) == 3
            allocate_parameters(self._module, parameters, config, partitioned=partitioned)
            self._give_back_parameters()
            made.append(self._make_engine(self._module, copy.deepcopy(dict(config))))
            fill(made[0], self._snapshot, self._mover, attempt)
        if attempt.error is None:
            return made[0], None
        if made:
            teardown(made.pop())
        undo_hooks()
        if self._client is not None:
            let_go(self._client)
        strip_module(self._module)
        forget(self._module)
        return None, attempt.error

    def _give_back_parameters(self) -> None:
        """Make the caller's own optimizer what it was before DeepSpeed took it."""
        client, snapshot = self._client, self._snapshot
        if not isinstance(client, torch.optim.Optimizer):
            return
        parameters = dict(self._module.named_parameters())
        client.state.clear()
        client.param_groups[:] = [
            {"params": [parameters[name] for name in members], **copy.deepcopy(options)}
            for members, options in zip(snapshot.members, snapshot.options, strict=True)
        ]


def _look(
    engine: Any, old: Config, config: Config, host_group: HostCollectives
) -> TrainingStateSnapshot:
    """Check all that can be checked, and copy the state; the engine stays as it is."""
    problem = unsupported_reason(engine, old, config)
    if problem is not None:
        raise RebuildError(problem)
    try:
        snapshot = take_snapshot(engine, host_group.rank, host_group.world_size)
    except ValueError as error:
        raise RebuildError(f"the optimizer's state does not move: {error}") from None
    odd = unequal_members(snapshot)
    if odd is not None and zero_stage(config) != 0:
        raise RebuildError(
            f"parameter {odd} was updated another number of times than others of its group, and "
            f"stage {zero_stage(config)} counts for a group as a whole; give such parameters a "
            "group of their own"
        )
    return snapshot


def _refused(error: Exception) -> RebuildError:
    if isinstance(error, PeerFailedError):
        return RebuildError("the engine was not rebuilt: another rank refused; see there")
    found = RebuildError(f"the engine was not rebuilt: {error}")
    found.__cause__ = None if isinstance(error, RebuildError) else error
    return found


def _undone(builder: _Builder, old: Config, error: Exception) -> UndoneRebuildError:
    """Build the old configuration again; what keeps it from that ends the training."""
    again, failed = builder.build(old)
    if failed is not None:
        raise failed
    undone = UndoneRebuildError(
        f"the engine could not be made with the new ds config: {type(error).__name__}: {error}. It "
        "runs on with the one before, and with all of its state",
        again,
    )
    undone.__cause__ = error
    return undone


def _config_of(engine: Any) -> Config:
    given = engine.config
    return given if isinstance(given, Mapping) else engine._config._param_dict


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == accelerator.current.kind else []
    with torch.random.fork_rng(devices=devices):
        yield
