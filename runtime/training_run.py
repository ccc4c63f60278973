"""The owned training loop: which micro-batches make a step, exactly once, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import BatchError
from .common.host_group import HostGroup
from .common.training_config import MICRO_BATCH, training_config, zero_stage
from .engine.live_settings.choose_modules import ModuleSelector
from .engine_factory import EngineFactory
from .trainer.checkpoint.manager import CheckpointManager
from .trainer.data.data_source import TrainingData
from .trainer.engine_holder import EngineHolder
from .trainer.metrics import TrainerMetrics
from .trainer.replay_setup import prepare
from .trainer.window.micro_batches import Loss
from .trainer.window.result import WindowResult
from .trainer.window_runner import WindowRunner
from .tuner.model_traits import warn_of_batch_statistics
from .tuner.session import new_tuning, tuner_settings

NumericsName = Literal["bitwise", "reassociation", "statistical", "unrestricted"]


class TrainingRun:
    """Trains a model by whole batches; owns the engine, its windows and the account of samples.

    All ranks call its methods alike, and at the same moment.

    Args:
        model: A torch module. All ranks must make the same one.
        config: A ds config, as a dict or the path of a JSON file. Its
            `train_micro_batch_size_per_gpu` is the first plan: how a batch is cut at most.
        loss: Called as `loss(model, micro_batch)` with DeepSpeed's engine and a part of the batch
            on the engine's device. Returns the mean loss of the part, best in float32, or (mean
            loss, weight): with the number of target tokens as the weight, token means are exact
            across micro-batches and ranks. Where the weight may be 0 the mean must still be finite.
        optimizer: A torch optimizer on the model's parameters, or a callable that takes parameters
            and returns one; else the ds config's.
        lr_scheduler: As for deepspeed.initialize; else the ds config's.
        settings: Settings nested as in zerowatch.toml.
        balance: Whether ranks get samples of `loader`'s batches in proportion to their measured
            speed, so that they end together; else evenly.
        compression: How gradients travel: None as DeepSpeed sends them, or "bf16", "fp16", "int8",
            "fp8". These change the numbers; what 8 bits lose is sent with the next window.
        activation_checkpointing: True for the model's own switch or its repeated block; or a class,
            its name, a pattern of module names such as "blocks.*", or several of these.
        tuner: "off"; "advise", which says what would make training faster; or "auto", which tries
            it, keeps what helps and takes back what does not. By default the setting `tuner.mode`.
        numerics: What the tuner may change in the numbers: "bitwise" nothing, "reassociation" the
            order of sums, "statistical" also the rounding, "unrestricted" also the batch size. By
            default the setting `tuner.numerics`.

    Raises:
        DsConfigError: The ds config cannot be used.
        SettingsError: A setting is wrong.
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
    ) -> None:
        ours, maker = training_config(config), EngineFactory(optimizer, lr_scheduler)
        engine = maker.first(model, ours, tuner_settings(settings, tuner, numerics))
        warn_of_batch_statistics(model)
        with ExitStack() as undo:  # what is open already is closed if the rest cannot be
            undo.callback(engine.watch.close)
            prepare(engine)
            self.host_group = undo.enter_context(closing(HostGroup()))
            figures = TrainerMetrics.of_watch(engine.watch)
            size, which = ours[MICRO_BATCH], activation_checkpointing
            changes = EngineHolder(engine, ours, self.host_group, figures, maker.create_replacement)
            windows = WindowRunner(
                loss,
                changes,
                self.host_group,
                figures,
                micro_batch_samples=size,
                checkpointed=which,
            )
            self._changes = undo.enter_context(closing(changes))
            self._windows = undo.enter_context(closing(windows))
            self._sharing = TrainingData(self.host_group, changes, balance=balance)
            undo.callback(self._sharing.close)
            self._saving = CheckpointManager(changes, windows, self._sharing, self.host_group)
            changes.checkpoint_activations(which)
            changes.compress(compression)
            self._tuning = new_tuning(changes, windows, self.host_group, self._sharing)
            undo.callback(self._tuning.close)
            self._undo = undo.pop_all()

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; another one after `rebuild`."""
        return self._changes.engine

    @property
    def config(self) -> Mapping[str, Any]:
        """The ds config in use."""
        return self._changes.config

    @property
    def steps(self) -> int:
        """Windows committed so far."""
        return self._windows.steps

    @property
    def samples(self) -> int:
        """Samples committed so far, over all ranks."""
        return self._windows.samples

    @property
    def micro_batch_samples(self) -> int:
        """Samples that a micro-batch holds at most, as asked for."""
        return self._windows.micro_batch_samples

    @property
    def module(self) -> torch.nn.Module:
        """The model, as it was given."""
        module: torch.nn.Module = self.engine.module
        return module

    @property
    def watch(self) -> Any:
        """The watch on the engine."""
        return self.engine.watch

    def train_batch(self, batch: Any) -> WindowResult:
        """Make one update from a global batch, of which this rank gives its share.

        The update is that of the whole batch in one piece, however it is cut and shared out. After
        an error the run stands as it did before, unless memory ran out within the update itself:
        then it goes on from its last save only.

        Args:
            batch: Mappings and sequences of tensors or arrays with one row per sample. It must stay
                as it is until this returns.

        Raises:
            BatchError: A rank's share cannot be trained on; raised on all ranks.
            NonFiniteLossError: The loss is nan or inf; raised on all ranks, before any update.
            RuntimeError: Memory does not hold even one sample at a time; on other ranks
                PeerOutOfMemory.
        """
        self._tuning.before_window()
        result = self._windows.train(batch)
        self._sharing.window_ended(
            step=self.engine.global_steps,
            num_samples=sum(result.micro_batches),
            seconds=None if result.replays else self._windows.passes_seconds,
            collectives_inside=zero_stage(self.config) > 1,
        )
        if not self._tuning.is_on_trial:  # else the run's next life would begin with it
            self._saving.window_ended()
        self._tuning.window_ended(result)
        return result

    def evaluate(self, batch: Any) -> float:
        """Return the weighted mean loss over all ranks, without gradients, in evaluation mode.

        Raises:
            BatchError: A rank's share cannot be used; raised on all ranks.
        """
        self._tuning.interrupted()
        return self._windows.evaluate(batch)

    def loader(self, dataset: Any, *, batch_samples: int, **options: Any) -> Any:
        """Return a loader of this rank's share of each global batch, whose place is saved too.

        Args:
            dataset: With `__len__` and `__getitem__`, or an IterableDataset.
            batch_samples: Samples of a global batch, over all ranks.
            options: seed, shuffle, drop_last, and of torch's DataLoader collate_fn, num_workers,
                prefetch_factor, pin_memory, timeout, worker_init_fn, multiprocessing_context.

        Raises:
            ValueError: These do not make batches.
        """
        return self._sharing.loader(dataset, batch_samples=batch_samples, **options)

    def set_micro_batch(self, num_samples: int) -> None:
        """Cut the next batches into micro-batches of at most that many samples.

        Ranks may differ; the one that needs the most micro-batches decides how many there are.

        Raises:
            BatchError: That is no size.
        """
        if num_samples < 1:
            raise BatchError(f"a micro-batch holds 1 sample or more, got {num_samples}")
        self._tuning.settle()
        self._windows.micro_batch_samples = num_samples
        self._tuning.changed()

    def compress(self, compression: str | None, *, asynchronous: bool = False) -> None:
        """Send gradients in another form from the next window on; None for DeepSpeed's own way.

        Args:
            compression: As of the constructor.
            asynchronous: Whether ZeRO 1 and 2 go on with backward while gradients travel.

        Raises:
            ValueError: There is no such form, or this engine's gradients cannot be had.
        """
        with self._by_hand():
            self._changes.compress(compression, asynchronous=asynchronous)

    def checkpoint_activations(self, which: ModuleSelector | bool) -> None:
        """Checkpoint activations from the next window on, as of the constructor; False: no longer.

        Raises:
            ZerowatchError: No such module is there.
        """
        with self._by_hand():
            self._changes.checkpoint_activations(which)

    def rebuild(self, changes: Mapping[str, Any]) -> None:
        """Put another engine in the place of this one, with its whole training state.

        Args:
            changes: What is to be different in the ds config, nested as it is, such as
                {"zero_optimization": {"stage": 3}}.

        Raises:
            RebuildError: Nothing has changed; training goes on as it was.
        """
        with self._by_hand():
            self._changes.rebuild(changes)

    def save(self, folder: str | Path, *, client: Any = None, keep: int = 2) -> Path:
        """Save the run between two windows, whole or not at all; return the folder of this save.

        With the engine go the plan, the random generators, the place in `loader`'s data, what
        compression owes, and the account of steps and samples.

        Args:
            folder: Of this run's saves alone, reached by all ranks.
            client: The caller's own: numbers, text, tensors, and lists and dicts of these.
            keep: How many saves to leave, this one included.

        Raises:
            CheckpointError: It cannot be written; earlier saves are as they were.
        """
        self._tuning.settle()
        return self._saving.save(folder, client, keep)

    def load(self, folder: str | Path) -> Any:
        """Take the last save up again; call it before the first window, however the run began.

        A run that was started again after a failure also learns what its earlier lives found out
        about memory.

        Returns:
            What `save` was given as `client`; None also where nothing was saved yet.

        Raises:
            CheckpointError: The save is damaged, or that of another model or number of ranks.
            RebuildError: The engine it was saved from cannot be built here.
        """
        self._tuning.settle()
        state = self._saving.load(folder)
        self._tuning.changed()
        return None if state is None else state.client

    def on_window_abort(self, undo: Callable[[], None]) -> None:
        """Have `undo` called on all ranks before a window is run again, as memory ran out.

        Forwards of the window may have run; what they did to state of the script's own, such as
        running means or counts, is to be undone there.
        """
        self._windows.replay.on_window_abort.append(undo)

    def close(self) -> None:
        """Take the watch off and give back what the run holds. Safe to call twice."""
        self._undo.close()

    @contextmanager
    def _by_hand(self) -> Iterator[None]:
        """Let the caller change the engine in the block; the tuner takes its own trial back."""
        self._tuning.settle()
        yield
        self._windows.replay.plans.forget()
        self._tuning.changed()
