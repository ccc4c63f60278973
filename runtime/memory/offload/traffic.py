"""Bytes moved, and seconds spent, by the ZeRO offload of one DeepSpeed engine, by direction.

Counted: gradients on their way to the host and back, updated parameters on their way to the
device, parts of parameters fetched to be gathered, `engine.offload_states` and `reload_states`, and
what is read from and written to NVMe. In `moves.py` stands which method moves what.

Seconds are those of the stretch of DeepSpeed's code that copies, without what is counted inside it:
on CUDA the time of its stream, by events, else the host's. The stretches of gradients at stage 3
hold their norms too, those of updated parameters the host's cast to 16 bits, those of states the
collection of garbage. Of NVMe it is the time that the host was blocked in submitting and waiting,
not that of the transfer, which overlaps. A synchronous gather has bytes and no seconds: its copies
cannot be told from the collective.

Not counted: ZenFlow, SuperOffload, DeepCompile and Muon on the host, whose copies are elsewhere;
activations that checkpointing moves; what loading a checkpoint, DeepSpeed's `safe_get` and
`safe_set` functions, or changes under `GatheredParameters` copy; all that was before the watch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch

from ....metrics.catalog.memory import OFFLOAD_BYTES, OFFLOAD_SECONDS
from ....metrics.recorder import Recorder
from ...collectives.events import EventPool
from ...common import accelerator
from ...common.fail_open import FailOpen
from ...common.patching import AttributePatch
from . import transfer_sizes as moves_of
from .clock import DIRECTIONS, OffloadClock
from .nvme import wrap_handles
from .states import states_offloaded, states_reloaded
from .transfer_sizes import NOTHING, Moves

STAGE_1_AND_2 = "DeepSpeedZeroOptimizer"
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"

Teller = Callable[..., Moves]
STATE_METHODS: Mapping[str, Teller] = {
    "offload_states": states_offloaded,
    "reload_states": states_reloaded,
}
STAGE_1_AND_2_METHODS: Mapping[str, Teller] = {
    "async_accumulate_grad_in_cpu_via_gpu": moves_of.stage_2_accumulated,
    "async_inplace_copy_grad_to_fp32_buffer_from_gpu": moves_of.stage_2_finished,
    "_restore_cpu_offload_grad_to_gpu": moves_of.stage_2_restored,
}
COMPACT_METHODS: Mapping[str, Teller] = {  # where gradients of 16 bits are summed in fp32
    "copy_grads_in_partition": moves_of.stage_2_in_partition,
}
STAGE_3_GRADIENT_METHODS: Mapping[str, Teller] = {
    "partition_grads": moves_of.stage_3_partitioned,
    "_finalize_offload_gradient_accumulation": moves_of.stage_3_finalized,
}
# Between these two lines of `step()` at stages 1 and 2 the updated parameters return.
UPDATE, RELEASE = "_optimizer_step", "_release_preflattened_grad_buffers"
STAGED = "_swap_out_tensor", moves_of.staged_for_nvme  # of the gradients' swapper
KEPT = "_retrieve_unswapped_grad_partitions", moves_of.kept_off_nvme  # of the optimizer's
STAGE_3_UPDATE = "_reassign_or_swap_out_partitioned_parameters"


class OffloadTraffic:
    """Wraps the methods of one engine's optimizer until `restore`; holds the engine weakly.

    Attributes:
        cost_ns: Nanoseconds the hooks took on the training thread.
    """

    def __init__(self, engine: Any, fail_open: FailOpen, events: EventPool) -> None:
        """Wrap. Nothing but the calls that move states is wrapped where nothing is offloaded.

        Args:
            engine: A DeepSpeed engine.
            fail_open: Guards what is done in the training's calls.
            events: Where CUDA events come from and go back to.
        """
        self.cost_ns = 0
        self._open = True
        self._returning = False
        self._directions: set[str] = set()
        self._wraps: list[AttributePatch] = []
        on_device = torch.device(engine.device).type == accelerator.current.kind
        self._clock = OffloadClock(events if on_device else None)
        self._returned = partial(self._of_optimizer, moves_of.stage_2_updated)
        # One guard for all: after a failure nothing is begun that would not be ended.
        self._guarded = fail_open.wrap("offload", lambda body, *args: body(*args))
        with ExitStack() as undo:  # what is wrapped is put back if the rest cannot be
            undo.callback(self.restore)
            self._wrap(engine.optimizer)
            undo.pop_all()

    def rebind_engine(self, engine: Any) -> None:
        """Take the hooks from one engine and put them on another; the sums go on."""
        self.restore()
        self._returning = False
        self._open = True
        with ExitStack() as undo:
            undo.callback(self.restore)
            self._wrap(engine.optimizer)
            undo.pop_all()

    def publish(self, recorder: Recorder) -> None:
        """Write the sums so far, of the directions that this engine has."""
        self._clock.settle()
        sums = zip(DIRECTIONS, self._clock.bytes, self._clock.seconds(), strict=True)
        with recorder.commit():
            for direction, num_bytes, seconds in sums:
                if num_bytes or direction in self._directions:
                    recorder.set(OFFLOAD_BYTES, num_bytes, direction)
                    recorder.set(OFFLOAD_SECONDS, seconds, direction)

    def restore(self) -> None:
        """Take every hook off again. The sums stay."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    def begin_io(self, moves: Moves, submits: bool) -> bool:
        """Begin to time a call to a handle of asynchronous I/O; return whether it is timed."""
        if not self._open:
            return False
        entered_ns = perf_counter_ns()
        begun = self._guarded(self._begin_io, moves, submits)
        self.cost_ns += perf_counter_ns() - entered_ns
        return bool(begun)

    def end_io(self) -> None:
        """End the call that began last."""
        self._end()

    def _wrap(self, optimizer: Any) -> None:
        kind = type(optimizer).__name__  # exactly these: what inherits from them copies otherwise
        if kind not in (STAGE_1_AND_2, STAGE_3) or getattr(optimizer, "zenflow", False):
            return
        self._optimizer = weakref.ref(optimizer)
        self._wrap_methods(optimizer, STATE_METHODS)
        if kind == STAGE_1_AND_2 and optimizer.cpu_offload:
            self._directions |= {"to_host", "to_device"}
            self._wrap_methods(optimizer, STAGE_1_AND_2_METHODS)
            groups = range(len(optimizer.bit16_groups))
            if any(optimizer._use_compact_grad_partition_buffer(i) for i in groups):
                self._wrap_methods(optimizer, COMPACT_METHODS)
            self._wraps += [
                AttributePatch(optimizer, UPDATE, self._around_update),
                AttributePatch(optimizer, RELEASE, self._around_release),
            ]
        if kind == STAGE_3 and (optimizer.offload_optimizer or optimizer.offload_param):
            self._directions |= {"to_host", "to_device"}
            self._wrap_stage_3(optimizer)

    def _wrap_stage_3(self, optimizer: Any) -> None:
        self._wrap_methods(optimizer, {STAGE_3_UPDATE: moves_of.stage_3_updated})
        if optimizer.offload_optimizer:
            self._wrap_methods(optimizer, STAGE_3_GRADIENT_METHODS)
        if optimizer.offload_param:
            for param in optimizer.module.parameters():
                self._wrap_gathers(param)
        swapper = optimizer.optimizer_swapper
        if swapper is not None:
            self._wrap_one(swapper.gradient_swapper, *STAGED)
            self._wrap_one(swapper, *KEPT)
        handles = wrap_handles(optimizer, self)
        if handles:
            self._directions |= {"to_nvme", "from_nvme"}
        self._wraps += handles

    def _wrap_methods(self, optimizer: Any, methods: Mapping[str, Teller]) -> None:
        for name, teller in methods.items():
            self._wrap_one(optimizer, name, partial(self._of_optimizer, teller))

    def _wrap_gathers(self, param: Any) -> None:
        """Wrap both ways in which one parameter, or a list of them, is gathered."""
        if hasattr(param, "all_gather"):
            tell = partial(_gathered, weakref.ref(param))
            self._wrap_one(param, "all_gather", tell, timed=False)
            self._wrap_one(param, "all_gather_coalesced", tell)

    def _wrap_one(self, owner: Any, name: str, tell: Teller, timed: bool = True) -> None:
        self._wraps.append(AttributePatch(owner, name, partial(self._around, tell, timed)))

    def _of_optimizer(self, teller: Teller, *args: Any, **kwargs: Any) -> Moves:
        return teller(self._optimizer(), *args, **kwargs)

    def _around(self, tell: Teller, timed: bool, original: Any) -> Any:
        """Wrap a method of which `tell` says, from its arguments, what it moves."""
        is_compiling = torch.compiler.is_compiling

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            begun = self._guarded(self._begin, tell, timed, args, kwargs)
            self.cost_ns += perf_counter_ns() - entered_ns
            try:
                return original(*args, **kwargs)
            finally:
                if begun:
                    self._end()

        return hooked

    def _around_update(self, original: Any) -> Any:
        """Wrap the update of a group: the copy to the device follows, in the caller's own code."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._returning:  # a copy that failed was never followed by the release
                self._returned_ended()
            result = original(*args, **kwargs)
            if self._open:
                entered_ns = perf_counter_ns()
                begun = self._guarded(self._begin, self._returned, True, args, kwargs)
                self._returning = bool(begun)
                self.cost_ns += perf_counter_ns() - entered_ns
            return result

        return hooked

    def _around_release(self, original: Any) -> Any:
        """Wrap what the caller does next after that copy."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._returning:
                self._returned_ended()
            return original(*args, **kwargs)

        return hooked

    def _returned_ended(self) -> None:
        self._returning = False
        self._end()

    def _begin(
        self, tell: Teller, timed: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        moves = tell(*args, **kwargs)
        if not any(moves):
            return False
        self._clock.count(moves)
        if timed:
            self._clock.begin(moves)
        return timed

    def _begin_io(self, moves: Moves, submits: bool) -> bool:
        if submits:
            self._clock.count(moves)
        self._clock.begin(moves, on_stream=False)
        return True

    def _end(self) -> None:
        entered_ns = perf_counter_ns()
        self._guarded(self._clock.end)
        self.cost_ns += perf_counter_ns() - entered_ns


def _gathered(lone: Callable[[], Any], *args: Any, **kwargs: Any) -> Moves:
    """Tell what is fetched for `param.all_gather_coalesced(...)` or `param.all_gather(...)`."""
    params = args[0] if args else kwargs.get("params", kwargs.get("param_list"))
    if params is None:
        params = [lone()]
    if not isinstance(params, list | tuple | set | dict):
        return NOTHING  # it may be good for one pass only, which is DeepSpeed's
    return moves_of.stage_3_fetched(params)
