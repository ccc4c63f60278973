"""Manages a TrainingRun's data: loader, batch size, split over ranks, learning-rate scaling.

The learning rate is scaled with the batch size, during each update only. For SGD the rule is
linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". For Adam and its variants it is the
square root: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms";
its changes of betas and epsilon are left out. Schedulers and checkpoints see the unscaled rate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from ....errors import CheckpointError, shortened
from ....metrics.step_record import StepRecord
from ...common.collective_attempt import raise_on_all_ranks
from ...common.host_group import HostGroup
from ...common.patching import AttributePatch
from ...common.peer_failures import FailureCapture, raise_failures
from ...common.undo import Undo
from ..engine_change import EngineChange
from ..engine_holder import EngineHolder
from .balancer import Balancer, BusyTime, EndedWindow
from .batch_split import BatchSplit, SplitSchedule
from .rank_differences import rank_differences
from .resumable_loader import ResumableLoader, StreamLoader, check_batch_samples, resumable_loader

logger = logging.getLogger(__name__)

_PREFETCH_FACTOR = 2  # torch's default
_LINEAR = ("sgd",)
_SQUARE_ROOT = ("adam", "lamb", "rmsprop", "adagrad")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStart:
    """Whether the data of a run starts at the beginning, and not at the position in a checkpoint.

    Attributes:
        is_requested: Whether the caller has asked for it.
        is_repeated: Whether an earlier attempt of this run asked for it, and has saved the position
            since. Otherwise each restart would start at the beginning, so the position is loaded in
            spite of a request, if it is of the loader's data.
    """

    is_requested: bool = False
    is_repeated: bool = False


class TrainingData:
    """Manages a run's loader, with its load balancing, batch size and position.

    Args:
        host_group: Group of all ranks.
        engine_holder: Holder of the engine. The engine's watch reports for how long collectives
            blocked training.
        balance: Whether the split of batches initially follows the speeds of the ranks; otherwise
            the split is even.

    Attributes:
        balances: Whether the split of batches follows the speeds of the ranks.
        batch_samples: Samples of a batch over all ranks; 0 without a loader.
        batches_ahead: Batches that the loader's workers load ahead of their use.

    Between two windows all ranks may set the first two, to the same values. At the end of the
    next window the ranks agree on the first batch that the change applies to. Until then the change
    may be undone, for example if another rank fails.
    """

    def __init__(
        self, host_group: HostGroup, engine_holder: EngineHolder, *, balance: bool
    ) -> None:
        self._host_group, self._engine_holder = host_group, engine_holder
        self.batch_samples = self.batches_ahead = 0
        self.balances = balance and host_group.world_size > 1
        self._is_balancing = self.balances
        self._balancer: Balancer | None = None
        self._loader: ResumableLoader | StreamLoader | None = None
        self._dataset: Any = None
        self._is_replacement_logged = False
        self._loaded: Mapping[str, Any] | None = None
        self._start, self._resumes = DataStart(), True  # `resume` of the loader
        self._num_used = 0  # batches that the loader had yielded when the last window ended
        self._has_trained = False  # whether a window of this process had a batch of a loader
        # The first batch with the requested size and split; -1 if all batches have them.
        self._changed_from = -1
        self._last_end = perf_counter()
        watch = engine_holder.engine.watch
        if host_group.world_size > 1:
            watch.subscribe_internal(self._add_record)
        if self.balances and not watch.is_open:
            logger.warning(
                "balance=True without monitoring: from ZeRO stage 2 on the time that ranks wait "
                "for each other is unknown, and shares stay even"
            )

    @property
    def has_requested_batch(self) -> bool:
        """Whether the last window's batch has the requested size and split.

        Batches that workers had loaded ahead of a change do not have them.
        """
        return self._num_used > self._changed_from

    def unsupported_balance_reason(self) -> str | None:
        """Return why the split cannot follow the speeds of the ranks; None if it can."""
        if self._host_group.world_size == 1:
            return "there is only one rank"
        return None if self._balancer is not None else self._no_sampler_reason()

    def unsupported_resize_reason(self) -> str | None:
        """Return why the batch size cannot change; None if it can."""
        optimizer = self._engine_holder.engine.basic_optimizer
        if scaling_exponent(optimizer) is None:
            name = type(optimizer).__name__
            return f"no rule scales the learning rate of {name} with the batch size"
        return self._no_sampler_reason()

    def batch_sizes(self) -> Sequence[int]:
        """Return the allowed batch sizes; empty if the run's loader does not choose the size."""
        return self._loader.batch_sizes if isinstance(self._loader, ResumableLoader) else ()

    def loader(
        self, dataset: Any, *, batch_samples: int, resume: bool = True, **options: Any
    ) -> ResumableLoader | StreamLoader:
        """Return a new loader of the run's data, at the loaded position if there is one.

        Without `resume` it starts at the beginning, and the loaded position is dropped, or one that
        is loaded before the first batch: see `DataStart`.

        The new loader replaces an earlier loader: position, balancing and batch size are those of
        the new one. A warning is logged if the earlier loader is of another dataset, or within an
        epoch. `options` are the options of `resumable_loader`. All ranks must call this.

        Raises:
            CheckpointError: The loaded position is of other data, or cannot be loaded; on all
                ranks.
            ValueError: No batches can be made, or the data differs between the ranks.
            PeerFailedError: Another rank cannot make the loader.
        """
        rank, world_size = self._host_group.rank, self._host_group.world_size
        can_split = world_size > 1 and not isinstance(dataset, IterableDataset)
        with FailureCapture() as failure:
            check_batch_samples(batch_samples, world_size)
            if not isinstance(resume, bool):
                raise ValueError(f"resume must be True or False, got {shortened(resume)}")
            if not isinstance(dataset, IterableDataset):
                _check_own_samples(self._engine_holder.engine, world_size)
            # A stream cannot be split; if balancing is requested for one, the loader raises.
            balancer = self._new_balancer(batch_samples) if can_split or self.balances else None
            loader = resumable_loader(
                dataset,
                batch_samples=batch_samples,
                rank=rank,
                world_size=world_size,
                splits=balancer.schedule if balancer else None,
                **options,
            )
        raise_failures(self._host_group, failure.take(), "loader")
        self._check_same_data(loader, batch_samples, resume=resume)
        start = replace(self._start, is_requested=self._start.is_requested or not resume)
        if self._loaded:
            stays = "The loader before it stays"
            self._loaded = self._position_to_load(loader, self._loaded, start, stays)
        self._start, self._resumes = start, resume
        self._warn_of_replacement(dataset)
        self._loader, self._dataset, self._num_used = loader, dataset, loader.position
        self._balancer, self._is_balancing = balancer, self.balances
        self.batch_samples, self._changed_from = batch_samples, -1
        workers, each = options.get("num_workers"), options.get("prefetch_factor")
        self.batches_ahead = (workers or 0) * (each or _PREFETCH_FACTOR)
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
        return self._loader

    def on_window_end(
        self, *, step: int, num_samples: int, seconds: float | None, collectives_inside: bool
    ) -> None:
        """Add a committed window to the measurements, and apply pending changes.

        All batches that were yielded so far count as used.

        Args:
            step: Number of the window's step in the engine.
            num_samples: Samples of this rank.
            seconds: Wall time of the window's forward and backward passes; None if the time is not
                representative.
            collectives_inside: Whether the passes contain communication, as in ZeRO 2 and 3.
        """
        if self._loader is not None:
            if self._loader.position > self._num_used:  # else the script has made the batch
                self._has_trained = True
            self._num_used = self._loader.position
        now, before = perf_counter(), self._last_end
        self._last_end = now
        if isinstance(self._loader, ResumableLoader):
            self._resize(self._loader)
        if self._balancer is None or self._loader is None:
            return
        self._balancer.busy_time.collectives_inside = collectives_inside
        window = EndedWindow(
            index=self._loader.position - 1,
            step=step,
            num_samples=num_samples,
            passes_seconds=seconds,
            seconds=now - before,
        )
        split = self._new_split(self._balancer, window)
        if split is not None and self._host_group.rank == 0:
            logger.info("shares change within the next batches: %s samples by rank", list(split))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the data, the state of the split and the requested batch size.

        A batch that was yielded and is in no committed window is yielded again after the state is
        loaded. From a stream it is lost, of which a warning is logged. A script that has read
        several such batches reads ahead, or has left out batches whose windows failed: none of them
        is yielded again.

        A loaded state is returned unchanged until a loader has it. Without a loader and a loaded
        state, the result is empty.
        """
        if self._loaded is not None or self._loader is None:
            return dict(self._loaded or {})
        balancer = self._balancer.state_dict() if self._balancer else None
        position = self._loader.state_dict()
        if self._loader.position == self._num_used + 1:
            if isinstance(self._loader, ResumableLoader):
                position["position"] -= 1
            else:
                logger.warning(
                    "the last batch of the stream is not trained yet, and a training that resumes "
                    "here will leave it out: call `save` after `train_batch`, not before"
                )
        return {
            "data": position,
            "shares": balancer,
            "batch_samples": self.batch_samples,
        }

    @property
    def starts_at_beginning(self) -> bool:
        """Whether this run, or an earlier attempt, asked to start the data at the beginning."""
        return self._start.is_requested or self._start.is_repeated or not self._resumes

    def set_start(self, start: DataStart) -> None:
        """Set where the data starts; the present loader may have a request of its own.

        Once a batch of a loader was trained, a load only goes back to a checkpoint of this run, and
        where the data of the run started stays.
        """
        if not self._has_trained:
            self._start = start

    def position_to_load(self, state: Mapping[str, Any], start: DataStart) -> Mapping[str, Any]:
        """Return a saved state if it is to be loaded, and an empty one if the position is dropped.

        All ranks must call this.

        Raises:
            CheckpointError: The position was saved with other data than the loader's; raised on all
                ranks.
        """
        if not state:
            return state
        if self._loader is None:
            if start.is_requested and not start.is_repeated:
                self._log_dropped()
                return {}
            return state
        # The streams of the ranks may differ in whether they have yielded a batch.
        own = [self._has_trained, self._loader.position > 0]
        gathered = self._host_group.all_gather(own).max(axis=0).astype(bool)
        self._has_trained, has_yielded = gathered.tolist()
        if self._has_trained and start.is_requested:
            # Also in a run that was restarted: a script leaves out the batches that it has read
            # since the checkpoint, such as those that made the loss rise.
            if self._host_group.rank == 0:
                logger.warning(
                    "the position in the data is not loaded, because of data=False: the data goes "
                    "on after the %d batches that the loader has yielded",
                    self._loader.position,
                )
            return {}
        # After its first batch, a load goes back to a checkpoint of this run.
        if not self._resumes and not has_yielded:
            start = replace(start, is_requested=True)
        return self._position_to_load(self._loader, state, start, "Nothing was loaded")

    def load_state_dict(self, state: Mapping[str, Any], start: DataStart | None = None) -> None:
        """Set the loader to a saved position, now or when the loader is made.

        All ranks must call this.

        Args:
            state: What `position_to_load` returned.
            start: What it was called with.

        Raises:
            CheckpointError: The position was saved with other data, cannot be loaded, or differs
                between the ranks; raised on all ranks.
        """
        if start is not None:
            self.set_start(start)
        if self._loader is None:
            self._loaded = state
            return
        if state:
            self._load_position(self._loader, state["data"])
            self._num_used, self._changed_from = self._loader.position, -1
            if isinstance(self._loader, ResumableLoader):
                self._scale_learning_rate(self._loader)
                # The last change may be to a size that is no longer requested, such as a trial's.
                # Checkpoints of earlier versions lack the requested size.
                self.batch_samples = state.get("batch_samples", self._loader.batch_samples)
            # Otherwise all ranks continue with an even split from that batch.
            if self._balancer is not None and self.balances and state["shares"] is not None:
                self._balancer.load_state_dict(state["shares"])
        self._loaded = None  # keep it if the load fails, for another loader

    def close(self) -> None:
        """Stop the loader's workers. Safe to call twice."""
        if self._loader is not None:
            self._loader.close()

    def _warn_of_replacement(self, dataset: Any) -> None:
        if self._loader is None or self._is_replacement_logged:
            return
        if dataset is self._dataset and not self._loader.is_within_epoch:
            return
        self._is_replacement_logged = True
        if self._host_group.rank == 0:
            logger.warning(
                "another call of TrainingRun.loader replaces the first loader: the position in "
                "checkpoints, the balancing and the batch size are those of the newest loader. For "
                "the data of an evaluation, use torch's DataLoader instead"
            )

    def _check_same_data(
        self, loader: ResumableLoader | StreamLoader, batch_samples: int, *, resume: bool
    ) -> None:
        """Raise an error on all ranks if the loaders of the ranks differ.

        Samples are not compared, because reading samples may be slow, draw random numbers, or open
        files before workers are forked.
        """
        has_length = isinstance(loader, ResumableLoader)
        values = {
            "dataset": "one with a length" if has_length else "an IterableDataset",
            "batch_samples": batch_samples,
            "balance": self.balances,
            "resume": resume,
            **(loader.order_settings if isinstance(loader, ResumableLoader) else {}),
        }
        differences = rank_differences(self._host_group, values)
        if differences is not None:
            raise ValueError(
                f"the loaders of the ranks differ: {differences}. Samples would be lost or "
                "repeated; pass the same dataset and options on every rank, as the loader divides "
                "each batch among them"
            )

    def _check_position(
        self, loader: ResumableLoader | StreamLoader, position: Mapping[str, Any], state: str
    ) -> None:
        with raise_on_all_ranks(self._host_group, "load the position in the data", state):
            loader.check_state_dict(position)

    def _position_to_load(
        self,
        loader: ResumableLoader | StreamLoader,
        state: Mapping[str, Any],
        start: DataStart,
        failed: str,
    ) -> Mapping[str, Any]:
        if not start.is_requested:
            self._check_position(loader, state["data"], failed)
            return state
        if start.is_repeated:
            with suppress(CheckpointError):  # of other data, so there is a reason for the request
                self._check_position(loader, state["data"], failed)
                if self._host_group.rank == 0:
                    logger.warning(
                        "the data goes on at the position in the checkpoint, in spite of "
                        "data=False or resume=False: this run was restarted, and had started the "
                        "data at the beginning before it saved this checkpoint"
                    )
                return state
        self._log_dropped()
        return {}

    def _log_dropped(self) -> None:
        if self._host_group.rank == 0:
            logger.warning(
                "the position in the data is dropped, because of data=False or resume=False: the "
                "data starts at the beginning. If you start this run again by hand after its next "
                "save, leave the argument out"
            )

    def _load_position(
        self, loader: ResumableLoader | StreamLoader, state: Mapping[str, Any]
    ) -> None:
        """Load a position; raise on all ranks if a rank fails or the positions differ."""
        action = "load the position in the data"
        with raise_on_all_ranks(self._host_group, action, "Restart from another checkpoint"):
            with FailureCapture() as failure:
                loader.load_state_dict(state)
            error = failure.take()
            if isinstance(error, CheckpointError):
                raise error
            if error is not None:
                name = type(error).__name__
                raise CheckpointError(f"cannot {action}: {name}: {error}") from error
        if isinstance(loader, StreamLoader):
            return  # each rank has its own position
        values = {name: loader.state_dict()[name] for name in ("position", "sizes")}
        differences = rank_differences(self._host_group, values)
        if differences is not None:
            raise CheckpointError(
                f"the position in the data differs between the ranks: {differences}. Samples would "
                "be lost or repeated; load the same checkpoint on every rank"
            )

    def _no_sampler_reason(self) -> str | None:
        if self._loader is None:
            return "batches do not come from TrainingRun.loader"
        return "each rank reads a stream" if isinstance(self._loader, StreamLoader) else None

    def _resize(self, loader: ResumableLoader) -> None:
        """Apply a requested batch size from the first batch that no rank has made yet.

        The split keeps its proportions.
        """
        if loader.batch_samples == self.batch_samples:
            return
        from_index = int(self._host_group.all_gather([loader.next_index]).max())
        loader.resize(from_index, self.batch_samples)
        self._changed_from = from_index
        self._scale_learning_rate(loader)
        if self._balancer is not None:
            self._balancer.reset_times()
        if self._host_group.rank == 0:
            logger.info(
                "batch size changes at batch %d: %d samples", from_index, self.batch_samples
            )

    def _scale_learning_rate(self, loader: ResumableLoader) -> None:
        """Scale the learning rate with the batch size, on this engine and its replacements."""
        if loader.is_resized and self._engine_holder.attached(EngineChange.LEARNING_RATE) is None:
            self._engine_holder.attach(EngineChange.LEARNING_RATE, BatchLearningRate(self))

    @property
    def batch_ratio(self) -> float:
        """Present batch size over the initial one."""
        return self._loader.batch_ratio if isinstance(self._loader, ResumableLoader) else 1.0

    def _new_split(self, balancer: Balancer, window: EndedWindow) -> BatchSplit | None:
        """Add a window; return the new split of later batches, or None if it stays the same."""
        if self._is_balancing and self.balances:
            return balancer.on_window_end(window)
        balancer.measure(window)
        if self._is_balancing == self.balances:
            return None
        self._is_balancing = self.balances
        split = balancer.start() if self.balances else balancer.stop()
        if split is not None:
            self._changed_from = balancer.schedule.latest_index
        return split

    def _new_balancer(self, batch_samples: int) -> Balancer:
        schedule = SplitSchedule(batch_samples, self._host_group.world_size)
        return Balancer(schedule, self._host_group, BusyTime())

    def _add_record(self, record: StepRecord) -> None:
        """Add how long collectives and votes blocked a step's passes. Runs on the watch thread."""
        if self._balancer is not None:
            exposed = record.comm_exposed_phase_seconds
            seconds = exposed.get("forward", 0.0) + exposed.get("backward", 0.0)
            self._balancer.busy_time.add_blocked(record.step, seconds)


def _check_own_samples(engine: Any, world_size: int) -> None:
    """Check that each rank trains on samples of its own.

    Raises:
        ValueError: Several ranks share a copy of the model, and so their samples.
    """
    if engine.seq_dp_world_size == world_size and engine.sequence_parallel_size == 1:
        return
    raise ValueError(
        "the loader of a TrainingRun divides each batch over all ranks, but the ranks of one copy "
        "of the model (tensor or sequence parallelism) need the same samples; use a loader of your "
        "own, such as torch's with a DistributedSampler over the copies, or pass an "
        "IterableDataset that yields to each rank what it needs"
    )


class BatchSource(Protocol):
    """Supplies batches whose size may change."""

    @property
    def batch_ratio(self) -> float:
        """Present batch size over the initial one."""


class BatchLearningRate:
    """Scales the learning rate of each update with the batch size; an attachment of the engine."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def attach(self, engine: Any) -> Undo:
        """Scale each update of an engine, until the returned function is called."""
        optimizer = engine.basic_optimizer
        exponent, is_on = scaling_exponent(optimizer) or 0.0, True

        def make(step: Callable[..., Any]) -> Callable[..., Any]:
            def scaled(*args: Any, **kwargs: Any) -> Any:
                factor = self._source.batch_ratio**exponent if is_on else 1.0
                if factor == 1.0:
                    return step(*args, **kwargs)
                groups = list(optimizer.param_groups)
                rates = [group["lr"] for group in groups]
                try:
                    for group in groups:
                        group["lr"] = group["lr"] * factor
                    return step(*args, **kwargs)
                finally:
                    for group, rate in zip(groups, rates, strict=True):
                        group["lr"] = rate

            return scaled

        patch = AttributePatch(optimizer, "step", make)

        def undo() -> None:
            nonlocal is_on
            is_on = False  # in case another wrapper now wraps this one
            patch.restore()

        return undo


def scaling_exponent(optimizer: Any) -> float | None:
    """Return the power of the batch size that the learning rate scales with; None if unknown.

    Args:
        optimizer: The base optimizer, below DeepSpeed's wrapper.
    """
    name = type(optimizer).__name__.lower()
    if any(one in name for one in _LINEAR):
        return 1.0
    return 0.5 if any(one in name for one in _SQUARE_ROOT) else None
