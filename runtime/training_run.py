"""Trains a model in a loop that owns the engine: each global batch becomes exactly one update.

Terms such as window, local batch, replay and checkpoint are defined in docs/concepts.md.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from ..errors import BatchError, RebuildError, ZerowatchError, shortened
from ..metrics.settings import load_settings
from .common.deepspeed_internals import training_run_refusal
from .common.ds_config import MICRO_BATCH, read_zerowatch_block, training_config, zero_stage
from .common.host_group import HostGroup
from .common.process_info import this_process
from .engine.compression.gradient_compressor import check_kind
from .engine.live_settings.activation_checkpointing import ModuleSelector
from .entry_points import initialize, initialize_unwatched
from .monitor.console_logging import show_own_lines
from .monitor.watch import NullWatch, WatchHandle
from .trainer.checkpoint.manager import CheckpointManager
from .trainer.data.training_data import TrainingData
from .trainer.engine_holder import EngineHolder
from .trainer.oom_recovery.prepare_engine import prepare_engine
from .trainer.run_end import RunEnd
from .trainer.run_metrics import RunMetrics
from .trainer.window.micro_batches import Loss
from .trainer.window.step_result import StepResult
from .trainer.window_runner import WindowRunner
from .tuner.job_facts import warn_of_batch_statistics
from .tuner.session import create_tuner_session, tuner_settings

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])
NumericsName = Literal["bitwise", "reassociation", "statistical", "unrestricted"]


def _collective(method: Method) -> Method:
    """Wrap a method that all ranks call.

    If another rank's failure has ended the run, the method raises that failure, not the error that
    followed from it on this rank.
    """

    @functools.wraps(method)
    def call(run: TrainingRun, *args: Any, **kwargs: Any) -> Any:
        with run._run_end.call():
            return method(run, *args, **kwargs)

    return cast(Method, call)


class TrainingRun:
    """Trains a model by global batches; owns the DeepSpeed engine and chooses its micro-batches.

    Stability: beta. The tuner and compression arguments are experimental.

    Each call of `train_batch` makes one update from one global batch, however the batch is split
    into micro-batches. If memory runs out, the batch is run again in smaller micro-batches. All
    ranks must make the same calls in the same order.

    Args:
        model: A torch module; the same on all ranks.
        config: A ds config, as a dict or the path of a JSON file. Its
            `train_micro_batch_size_per_gpu` is the maximum size of a micro-batch, in samples.
        loss: Called as `loss(model, micro_batch)`; returns the mean loss, or (mean loss, weight).

            - `model` is DeepSpeed's engine. `micro_batch` is a part of the batch on the engine's
              device: tensors of shape `[n, ...]`, n at least 1, nested as in the batch.
            - The mean loss is a tensor of one element, shape `[]` or `[1]`, of any floating dtype
              (preferably float32), with a gradient. It must be finite even if the weight is 0.
            - The weight is a 0-d tensor or a number; by default it is n. If the weight is the
              number of target tokens, the loss is the exact mean over the tokens of all
              micro-batches and ranks.
            - All ranks must run the same number of micro-batches. A rank with too few samples runs
              `loss` on an extra micro-batch and ignores the returned weight.
        optimizer: A torch optimizer on the model's parameters, or a callable that takes parameters
            and returns an optimizer. By default the optimizer of the ds config.
        lr_scheduler: An LR scheduler for `deepspeed.initialize`. By default the scheduler of the ds
            config.
        settings: Settings, nested as in zerowatch.toml.
        balance: Whether each rank gets samples of `loader`'s batches in proportion to its measured
            speed, so that all ranks finish together. By default all ranks get the same number.
        compression: Format in which gradients are sent: "bf16", "fp16", "int8" or "fp8", or None
            for DeepSpeed's own format. Compression rounds the gradients. The rounding errors of the
            8-bit formats are added to the next window's gradients. Experimental.
        activation_checkpointing: True for the model's own switch or its repeated block; or a class,
            its name, a pattern of module names such as "blocks.*", or several of these.
        tuner: "off"; "advise" to report changes that would make training faster; or "auto" to try
            these changes on the run and keep the changes that help. By default the setting
            `tuner.mode`. Experimental.
        numerics: What the tuner may change in the computed numbers: "bitwise" changes nothing,
            "reassociation" changes the order of sums, "statistical" also the rounding, and
            "unrestricted" also the batch size. By default the setting `tuner.numerics`.
            Experimental.
        loss_decomposable: Whether the loss of a batch is the weighted mean of the losses of its
            parts. Pass False for a loss that compares the samples of a micro-batch with each other,
            such as a contrastive loss: the tuner then changes micro-batches only if `numerics` is
            "statistical" or "unrestricted".

    Raises:
        DsConfigError: The ds config cannot be used.
        SettingsError: A setting is wrong.
        TypeError: An argument has a wrong type.
        ValueError: `compression` is unknown, or not possible with this engine.
        ZerowatchError: `activation_checkpointing` selects no module, or the installed DeepSpeed is
            too old.

    Examples:
        >>> def loss(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> run = zerowatch.TrainingRun(model, config="ds_config.json", loss=loss)
        >>> for batch in run.loader(dataset, batch_samples=256):
        ...     result = run.train_batch(batch)
        >>> run.save("checkpoints")
        >>> run.close()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        config: object,
        loss: Loss,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        settings: Mapping[str, Any] | None = None,
        balance: bool = False,
        compression: str | None = None,
        activation_checkpointing: ModuleSelector | bool = False,
        tuner: Literal["off", "advise", "auto"] | None = None,
        numerics: NumericsName | None = None,
        loss_decomposable: bool = True,
    ) -> None:
        _check_arguments(
            model, loss, balance, compression, activation_checkpointing, loss_decomposable
        )
        ds_config = training_config(config)
        background = load_settings(settings, read_zerowatch_block(ds_config)).checkpoint.background
        factory = _EngineFactory(optimizer, lr_scheduler)
        engine = factory.create_initial(model, ds_config, tuner_settings(settings, tuner, numerics))
        warn_of_batch_statistics(model)
        with ExitStack() as undo:  # closes the opened parts if a later part fails
            engine.watch.writes_report = True
            undo.callback(engine.watch.close)
            prepare_engine(engine)
            self._host_group = group = undo.enter_context(closing(HostGroup()))
            self._run_end = undo.enter_context(closing(RunEnd(group)))
            metrics = RunMetrics.of_watch(engine.watch)
            holder = EngineHolder(
                engine, ds_config, group, metrics, factory.create_replacement, self._run_end
            )
            runner = WindowRunner(
                loss,
                holder,
                group,
                metrics,
                self._run_end,
                micro_batch_samples=ds_config[MICRO_BATCH],
                activation_checkpointing=activation_checkpointing,
            )
            self._engine_holder = undo.enter_context(closing(holder))
            self._window_runner = undo.enter_context(closing(runner))
            self._data = TrainingData(group, holder, balance=balance)
            undo.callback(self._data.close)
            self._checkpoints = CheckpointManager(
                holder, runner, self._data, group, background=background
            )
            undo.callback(self._checkpoints.close)
            holder.checkpoint_activations(activation_checkpointing)
            holder.compress(compression)
            self._tuner = create_tuner_session(
                holder, runner, group, self._data, loss_decomposable=loss_decomposable
            )
            undo.callback(self._tuner.close)
            self._run_end.start()
            self._undo = undo.pop_all()
        self._client_state: Any = None

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; `rebuild` replaces it by a new engine."""
        return self._engine_holder.engine

    @property
    def config(self) -> Mapping[str, Any]:
        """The ds config in use."""
        return self._engine_holder.config

    @property
    def steps(self) -> int:
        """Steps completed so far, including skipped steps and the steps of a loaded checkpoint."""
        return self._window_runner.steps

    @property
    def samples(self) -> int:
        """Samples trained on so far, over all ranks."""
        return self._window_runner.samples

    @property
    def micro_batch_samples(self) -> int:
        """Requested maximum samples of a micro-batch; fewer are used after memory ran out."""
        return self._window_runner.micro_batch_samples

    @property
    def client_state(self) -> Any:
        """The `client_state` in the loaded checkpoint; None if no checkpoint was loaded."""
        return self._client_state

    @property
    def module(self) -> torch.nn.Module:
        """The model, as passed to the constructor."""
        module: torch.nn.Module = self.engine.module
        return module

    @property
    def watch(self) -> WatchHandle:
        """The watch on the engine. If monitoring is off, its methods do nothing."""
        handle: WatchHandle = self.engine.watch
        return handle

    @_collective
    def train_batch(self, batch: Any) -> StepResult:
        """Make one update from a global batch. Each rank passes its local batch.

        The update is the same as an update from the whole batch at once, however the batch is split
        over the ranks and into micro-batches.

        Args:
            batch: Mappings and sequences of tensors or numpy arrays of shape `[local_batch, ...]`,
                any dtype, on any device. local_batch may differ between ranks. Other leaves, such
                as numbers, text and 0-d tensors, are passed to the loss as they are. Do not modify
                the batch before this method returns.

        Returns:
            The step's number, mean loss, micro-batches and time; see `StepResult`.

        Raises:
            BatchError: A rank's local batch cannot be trained on, or all weights are 0; raised on
                all ranks. The run is in its state before the call.
            NonFiniteLossError: The loss is nan or inf; raised on all ranks. The run is in its state
                before the call. With fp16's dynamic loss scale this error is not raised: the step
                is skipped instead.
            RuntimeError: Not even one sample fits in this rank's memory. The other ranks raise
                PeerOutOfMemoryError, a subclass of RuntimeError. The run is in its state before the
                call, unless memory ran out within the update itself.
            TypeError: The loss returned neither a mean loss nor (mean loss, weight).
            PeerFailedError: The loss raised an error on another rank. That rank raises the error
                itself. All ranks are in their state before the call, and the next call may pass the
                same batch or another batch. Some errors end the run instead: each error in the
                update, and an error in a forward of ZeRO 3 or in a backward of ZeRO 2 or 3, if it
                occurs on some ranks only and after the first windows. Then `can_continue` is False,
                later calls raise on all ranks, and the run must be restarted.

        Each error in the update, such as one of the optimizer, of the LR scheduler or of memory,
        ends the run, also on a single rank: the weights may be updated in part. Later calls raise.
        Make the model and its TrainingRun again, or restart the script, and load the last
        checkpoint.

        On an engine that cannot discard a batch, each error in its passes ends the run, and later
        calls raise. A warning at the start names the reason.

        Examples:
            >>> result = run.train_batch({"x": x, "y": y})  # [local_batch, 1024], [local_batch]
            >>> result.loss
            0.693
        """
        self._tuner.on_window_start()
        result = self._window_runner.train(batch)
        self._data.on_window_end(
            step=self.engine.global_steps,
            num_samples=sum(result.micro_batches),
            seconds=None if result.replays else self._window_runner.passes_seconds,
            collectives_inside=zero_stage(self.config) > 1,
        )
        # Files written during a trial would contain the tuner's trial configuration.
        if not self._tuner.is_on_trial:
            self._checkpoints.on_window_end()
        self._tuner.on_window_end(result)
        return result

    @_collective
    def evaluate(self, batch: Any) -> float:
        """Return the mean loss of a batch over all ranks, without gradients, in evaluation mode.

        Args:
            batch: This rank's local batch, in the form that `train_batch` takes.

        Returns:
            The weighted mean loss, the same on all ranks. It is nan or inf if the loss of a
            micro-batch is. Each module is in its previous mode again.

        Raises:
            BatchError: A rank's local batch cannot be used, or all weights are 0; raised on all
                ranks.
            RuntimeError: Memory ran out. An evaluation is not run again in smaller micro-batches.
            PeerFailedError: The loss raised an error on another rank; see `train_batch`.
        """
        self._tuner.exclude_step_time()
        return self._window_runner.evaluate(batch)

    @_collective
    def loader(
        self, dataset: Any, *, batch_samples: int, resume: bool = True, **options: Any
    ) -> Any:
        """Return a loader of this rank's part of each global batch.

        Checkpoints save the loader's position. A run has one loader: another call replaces the
        loader before, and position, balancing and batch size are then those of the new loader. For
        the data of `evaluate`, use torch's DataLoader.

        Args:
            dataset: A dataset with `__len__` and `__getitem__`, or an IterableDataset.
            batch_samples: Samples of a global batch, over all ranks.
            resume: Whether the loader starts at the position that `load` reads, before or after
                this call. False drops this position, and the loader starts at the beginning, such
                as of other data. A run that `zerowatch run` restarts after its next save goes on
                where it was in that data.
            options: seed, shuffle and drop_last. Also these options of torch's DataLoader:
                collate_fn, num_workers, prefetch_factor, pin_memory, timeout, worker_init_fn and
                multiprocessing_context.

        Returns:
            An iterable of batches, one epoch per iteration. Leaves have the shape
            `[local_batch, ...]`.

        Raises:
            ValueError: No batches can be made with these arguments. Or the length of the dataset,
                or an option, differs between the ranks; in this case all ranks raise the error.
            CheckpointError: The loaded position is of other data, or of batches of another size;
                raised on all ranks. The loader before it, if there is one, stays.
            PeerFailedError: Another rank cannot make the loader.
        """
        self._tuner.pause_trial()
        loader = self._data.loader(dataset, batch_samples=batch_samples, resume=resume, **options)
        self._tuner.on_user_change()
        return loader

    def set_micro_batch(self, num_samples: int) -> None:
        """Set the maximum samples of a micro-batch from the next batch on.

        The ranks may set different values. All ranks then run as many micro-batches as the rank
        that needs the most.

        Raises:
            BatchError: `num_samples` is not a whole number of at least 1. Nothing has changed.
        """
        if not _is_count(num_samples):
            raise BatchError(
                "num_samples of a micro-batch must be a whole number, 1 or more, got "
                f"{shortened(num_samples)}"
            )
        self._tuner.pause_trial()
        self._window_runner.micro_batch_samples = num_samples
        self._tuner.on_user_change()

    @_collective
    def compress(self, compression: str | None, *, asynchronous: bool = False) -> None:
        """Set the format in which gradients are sent from the next window on. Experimental.

        Args:
            compression: Format, as in the constructor; None for DeepSpeed's own reduction.
            asynchronous: Whether ZeRO 1 and 2 continue with backward while gradients are reduced.

        Raises:
            ValueError: The format does not exist, or this engine does not support it. The previous
                format stays in use.
        """
        with self._user_change():
            self._engine_holder.compress(compression, asynchronous=asynchronous)

    @_collective
    def checkpoint_activations(self, which: ModuleSelector | bool) -> None:
        """Checkpoint activations from the next window on.

        Args:
            which: Modules, as in the constructor; False turns activation checkpointing off.

        Raises:
            ZerowatchError: `which` selects no module. The previous choice stays in use.
        """
        with self._user_change():
            self._engine_holder.checkpoint_activations(which)

    @_collective
    def rebuild(self, changes: Mapping[str, Any]) -> None:
        """Replace the engine by an engine with a changed ds config and the same training state.

        Args:
            changes: The keys of the ds config to change, nested as in the ds config.

        Raises:
            RebuildError: The new engine cannot be built. Training can continue as before.

        After another error, or an interrupt, the run may have ended; later calls then raise.

        Examples:
            >>> run.rebuild({"zero_optimization": {"stage": 3}})
        """
        if not isinstance(changes, Mapping):
            raise RebuildError(
                "the engine was not rebuilt: changes must be a mapping of keys of the ds config, "
                f"such as {{'zero_optimization': {{'stage': 3}}}}, got {shortened(changes)}"
            )
        with self._user_change():
            self._engine_holder.rebuild(changes)

    @_collective
    def save(
        self,
        folder: str | Path,
        *,
        client_state: Any = None,
        keep: int = 2,
        background: bool | None = None,
    ) -> Path:
        """Write a checkpoint between two accumulation windows, completely or not at all.

        Besides the engine's state, a checkpoint holds the micro-batch plan, the random generators,
        the position in `loader`'s data, the residuals of compression, and the counts of steps and
        samples.

        Args:
            folder: Folder that all ranks can access and that holds only this run's checkpoints.
            client_state: The caller's own state: numbers, text, tensors, and lists and dicts of
                these.
            keep: How many checkpoints to keep, including this one; at least 1. Checkpoints that
                `load` passed over do not count and are deleted. These are damaged checkpoints, and
                checkpoints newer than the loaded one.
            background: Whether only the copy of the state to host memory is waited for, and a
                thread writes it while training goes on. By default the setting
                `checkpoint.background`. A save first waits until the previous one is written.

        Returns:
            The folder of this checkpoint. With `background` it exists once the checkpoint is
            complete.

        Raises:
            CheckpointError: The checkpoint cannot be written, the folder is in use by another run,
                or it has checkpoints of a run that this run has not loaded. Or the previous
                checkpoint could not be written in the background: this one was made nevertheless,
                and the error names it. Raised on all ranks. Earlier checkpoints are unchanged, and
                training can continue.
            TypeError: `folder` is no path.
            ValueError: `keep` is not a whole number of at least 1.

        Examples:
            >>> run.save("checkpoints", background=True)
            PosixPath('/data/checkpoints/step-00001000')
        """
        _check_folder(folder)
        if not _is_count(keep):
            raise ValueError(
                "keep must be a whole number, 1 or more, because the new checkpoint is kept, got "
                f"{shortened(keep)}"
            )
        self._tuner.pause_trial()
        return self._checkpoints.save(folder, client_state, keep, background=background)

    @_collective
    def wait_for_save(self) -> None:
        """Wait until the last checkpoint of `save(background=True)` is complete.

        Raises:
            CheckpointError: It could not be written; raised on all ranks.
        """
        self._checkpoints.wait()

    @_collective
    def load(
        self, folder: str | Path, *, fallback: bool | None = None, data: bool = True
    ) -> int | None:
        """Load the last checkpoint. Call this before the first batch, in new and restarted runs.

        All files are checked first. The check takes about 0.8 s per GiB, divided among the ranks.
        No code in the files is run: a checkpoint that holds more than plain data is refused. A run
        that was restarted after a failure also loads the micro-batch sizes that failed.

        Args:
            folder: Folder that was passed to `save`: the parent of the folders that it returned.
            fallback: If the last checkpoint is damaged, whether to log a warning and load the last
                undamaged checkpoint before it. By default this is done only if the launcher
                restarts the job, as `zerowatch run --max-restarts` does. All ranks must allow it.
            data: Whether to load the position in `loader`'s data; the same on all ranks. False
                leaves the loader where it is: before its first batch such as for other data, later
                to leave out the batches since the checkpoint. If it was False before the first
                batch, a run that `zerowatch run` restarts after its next save goes on where it was
                in that data.

        Returns:
            The step after which training resumes; None if there is no checkpoint yet. The caller's
            own state is in `client_state`. If n other ranks wrote the checkpoint, rank k gets the
            state of rank `k % n`.

        Raises:
            CheckpointError: The checkpoint is damaged, was saved from another model or with another
                number of ranks for each copy of the model, or holds objects. Or it was saved with
                other data than the loader's: then nothing was loaded. Or the positions in the data
                differ between the ranks. Or `folder` is a file, or itself a checkpoint.
                Raised on all ranks; the caller may then load another checkpoint.
            RebuildError: The engine that the checkpoint was saved from cannot be built here.
            TypeError: `folder` is no path, or `fallback` or `data` is neither True nor False.
        """
        _check_folder(folder)
        _check_choices(fallback=False if fallback is None else fallback, data=data)
        self._tuner.pause_trial()
        state = self._checkpoints.load(folder, fallback=fallback, data=data)
        self._tuner.on_user_change()
        self._client_state = None if state is None else state.client_state
        return None if state is None else state.steps

    def on_window_abort(self, undo: Callable[[], None]) -> None:
        """Register a function to call on all ranks before a window is run again.

        Forward passes of the window may have run before memory ran out. `undo` reverts the changes
        that these passes made to the script's own state, such as running means or counts. If `undo`
        raises an error on one rank, `train_batch` raises it there, and PeerFailedError on the other
        ranks.
        """
        self._window_runner.replay.on_window_abort.append(undo)

    def __repr__(self) -> str:
        """Return the steps and samples of the run, and the state of its watch."""
        return f"<zerowatch.TrainingRun: {self.steps} steps, {self.samples} samples, {self.watch}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows for the run: the state of its watch."""
        return self.watch._repr_html_()

    def close(self) -> None:
        """Close the watch and free the run's resources. Safe to call twice.

        Waits until the last checkpoint is written.

        Raises:
            CheckpointError: The last checkpoint could not be written in the background.
        """
        self._undo.close()

    @contextmanager
    def _user_change(self) -> Iterator[None]:
        """Pause the tuner's trial while the caller changes the run in the `with` block."""
        self._tuner.pause_trial()
        yield
        self._window_runner.replay.planner.invalidate()
        self._tuner.on_user_change()


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _check_folder(folder: object) -> None:
    """Check the folder of checkpoints.

    Raises:
        TypeError: It is no path.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, a str or a pathlib.Path, got {shortened(folder)}")


def _check_choices(**arguments: object) -> None:
    """Check arguments that are True or False.

    Raises:
        TypeError: One is neither.
    """
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shortened(value)}")


def _check_arguments(
    model: object,
    loss: object,
    balance: object,
    compression: str | None,
    activation_checkpointing: object,
    loss_decomposable: object,
) -> None:
    """Check arguments whose errors would otherwise be raised late or in internal functions.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The compression is unknown.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shortened(model)}")
    if not callable(loss):
        raise TypeError(
            "loss must be a function, called as loss(model, micro_batch), got " + shortened(loss)
        )
    _check_choices(balance=balance, loss_decomposable=loss_decomposable)
    if compression is not None:
        check_kind(compression)
    if not isinstance(activation_checkpointing, bool | str | type | Sequence | None):
        raise TypeError(
            "activation_checkpointing must be True, False, a class, its name, a pattern of module "
            f"names, or several of these, got {shortened(activation_checkpointing)}"
        )


class _EngineFactory:
    """Builds the run's first engine, and the engines that replace it.

    Args:
        optimizer: The caller's optimizer, or a callable that takes parameters and returns an
            optimizer; None for the optimizer of the ds config.
        lr_scheduler: The caller's scheduler; None for the scheduler of the ds config.
    """

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        if callable(optimizer):
            optimizer = _called_once(optimizer)
        self._options = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    def create_initial(
        self,
        module: torch.nn.Module,
        config: Mapping[str, Any],
        settings: Mapping[str, Any] | None,
    ) -> Any:
        """Return an engine with a watch, which does nothing if another run's watch is open.

        Raises:
            DsConfigError: DeepSpeed refuses its configuration.
            SettingsError: A setting is wrong.
            ZerowatchError: This release of DeepSpeed is too old.
        """
        refusal = training_run_refusal()
        if refusal is not None:
            raise ZerowatchError(refusal)
        engine = initialize(
            model=module,
            model_parameters=_trained(module),
            config=copy.deepcopy(dict(config)),
            settings=_in_this_process(settings, config),
            **self._options,
        )[0]
        if not engine.watch.watches(engine):
            if engine.watch.is_open and this_process().rank == 0:
                logger.warning(
                    "this TrainingRun is not monitored, because another engine of this process "
                    "is; close() its TrainingRun or watch before you make the next TrainingRun"
                )
            engine.watch = NullWatch()
        return engine

    def create_replacement(self, module: torch.nn.Module, config: Mapping[str, Any]) -> Any:
        """Return an engine without a watch."""
        return initialize_unwatched(
            model=module,
            model_parameters=_trained(module),
            config=copy.deepcopy(dict(config)),
            **self._options,
        )[0]


def _in_this_process(
    settings: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the settings without `process.separate`: a TrainingRun reads what is measured."""
    if not load_settings(settings, read_zerowatch_block(config)).process.separate:
        return settings
    show_own_lines()
    logger.warning("process.separate is not used with a TrainingRun, which reads what is measured")
    return {**(settings or {}), "process": {"separate": False}}


def _called_once(make_optimizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a callable that makes an optimizer at its first call, and then returns the same one.

    A rebuild to stage 3 partitions the parameters first, so that a second call could not group them
    by their shapes. The rebuild itself gives the optimizer its groups again.
    """
    made: list[Any] = []

    def optimizer_of(parameters: Any) -> Any:
        if not made:
            made.append(make_optimizer(parameters))
        return made[0]

    return optimizer_of


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
