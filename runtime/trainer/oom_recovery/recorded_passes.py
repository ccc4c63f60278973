"""Records the collectives of each forward and backward, and issues the rest of an unfinished pass.

The ranks vote before the first collective of a pass, and not again before its end. A rank that runs
out of memory within a pass therefore issues the other collectives of that pass with scratch
tensors, and reports its error in the next vote. No other rank waits for it. All ranks then discard
the window, so the values that the scratch tensors contain do not matter, with one exception: the
gathers send the rank's own partitions, so that the other ranks compute with their usual weights.

A pass has a record if the last two passes at the same position issued the same collectives. A
record is used only if it is the same on all ranks, and if this pass has issued its first calls. In
the few windows in which records are missing, the ranks vote before each collective instead. Passes
that vary have no record, and after a few windows they are not recorded any more.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...common.deepspeed_internals import ZERO_1_AND_2, ZERO_3, class_path
from ...common.patching import PatchSet

logger = logging.getLogger(__name__)

# Parameters of the methods of DeepSpeed's backend object, in order.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "reduce": ("tensor", "dst", "op", "group", "async_op"),
    "reduce_scatter_tensor": ("output_tensor", "input_tensor", "op", "group", "async_op"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
}
# Name of each method's first parameter, and position of its group.
_PLACES = {name: (each[0], each.index("group")) for name, each in _PARAMETERS.items()}
_GATHER = "all_gather_into_tensor"
_COORDINATOR_PREFIX = "_PartitionedParameterCoordinator__"
_GATHER_METHOD = f"{_COORDINATOR_PREFIX}all_gather_params_"
_ORDER = f"{_COORDINATOR_PREFIX}submodule_order"
_SETTINGS = (
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "communication_data_type",
)
_TRACE_SETTINGS = (
    f"{_COORDINATOR_PREFIX}prefetch_bucket_sz",
    f"{_COORDINATOR_PREFIX}max_n_available_params",
    f"{_COORDINATOR_PREFIX}max_reuse_dist_in_numel",
)
_DIGEST_BYTES = 6
_EQUAL_NEEDED = 2
_DIFFERENCES_ALLOWED = 4  # after these, a position is not recorded any more
_WINDOWS_WITH_VOTES = 4  # after a change; ZeRO 3 changes its gathers in the second and third window
VOTES_NEEDED = -1  # instead of a digest
# Errors of reading a call whose arguments are not those of a collective with tensors.
_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class PassKey(NamedTuple):
    """Position of a pass in its window.

    Attributes:
        name: "forward" or "backward".
        is_first: Whether no backward precedes it in its window.
        number: Passes with the same name that directly precede it.
    """

    name: str
    is_first: bool
    number: int


class EngineGeneration(NamedTuple):
    """Values that change if the collectives of an engine's passes may change.

    Attributes:
        settings: The engine and its settings.
        trace: ZeRO 3's order of the modules, by which it gathers parameters; None at other stages.
    """

    settings: object
    trace: object = None


class Call(NamedTuple):
    """One collective of a pass.

    Attributes:
        name: Method of DeepSpeed's backend object.
        num_values: Elements of the tensor that is passed first.
        dtype: Its type.
        num_input: Elements of the input.
        op: Operation of a reduction; None for a gather.
        root: Rank that receives a reduction; None without one.
        group: Process group, which has all ranks.
        device: Device of the tensors.
        shards: Ids of the parameters whose partitions a gather sends, in order; None if unknown.
        reason: Why the call cannot be issued again; "" if it can.
    """

    name: str
    num_values: int
    dtype: torch.dtype | None
    num_input: int = 0
    op: Any = None
    root: int | None = None
    group: Any = None
    device: torch.device | None = None
    shards: tuple[int, ...] | None = None
    reason: str = ""

    def text(self) -> str:
        """Return a description that is equal on all ranks."""
        return repr((*self[:4], str(self.op), self.root, self.shards))


class PassRecorder:
    """Records the collectives of a run's passes.

    Attributes:
        num_outside: Collectives outside of windows since the last update. They may have changed
            which parameters are gathered.
        num_calls: Collectives of the window so far.
        has_varied: Whether a pass of the window has differed from its record.
        is_adding: Whether this pass is recorded, because it has no record to compare it with.
    """

    def __init__(self) -> None:
        self.num_outside = self.num_calls = 0
        self._has_foreign_calls = self._is_disturbed = self._is_paused = False
        self._num_forbidden = 0
        self._generation: EngineGeneration | None = None
        self._windows_left = _WINDOWS_WITH_VOTES
        self._records: dict[PassKey, _Record] = {}
        self._usable: dict[PassKey, list[Call]] = {}
        self._digest: int | None = 0  # None if it must be computed
        self.begin_window(is_recording=False)

    def prepare(self, generation: EngineGeneration) -> int:
        """Return a number that is equal on ranks with equal records.

        The number is 0 if this window has no records, and VOTES_NEEDED if the ranks should vote
        until it has. Call this before each window.

        Args:
            generation: Values that change if the collectives of a pass may change.
        """
        self._is_paused = self._has_foreign_calls
        if generation != self._generation:
            if self._generation is None or generation.settings != self._generation.settings:
                self._windows_left = _WINDOWS_WITH_VOTES
            self._forget_records()
            self._generation = generation
        self._usable = {}
        was_disturbed = self._is_disturbed
        self._is_disturbed = generation.trace is not None and self.num_outside > 0
        if self._has_foreign_calls:
            return 0
        if self._is_disturbed:
            return 0 if was_disturbed else VOTES_NEEDED
        if self._windows_left and not self._is_complete():
            self._windows_left -= 1
            return VOTES_NEEDED
        if self._digest is None:
            self._digest = _digest(self._records)
        self._usable = {key: each.calls for key, each in self._records.items() if each.is_usable}
        return self._digest

    def forbid(self) -> None:
        """Use no record in the next window, because the ranks' records differ.

        After a few such windows nothing is recorded, until the engine changes or a window is
        aborted.
        """
        self._usable = {}
        self._num_forbidden += 1
        self._is_paused = self._is_paused or self._num_forbidden > _DIFFERENCES_ALLOWED

    def pause(self) -> None:
        """Neither use nor record anything in the next window. Call this instead of `prepare`."""
        self._usable, self._is_paused = {}, True

    def clear(self) -> None:
        """Forget all records, because a window was aborted."""
        self._windows_left = _WINDOWS_WITH_VOTES
        self._forget_records()

    def _forget_records(self) -> None:
        self._records.clear()
        self._usable, self._digest, self._num_forbidden = {}, 0, 0

    def _is_complete(self) -> bool:
        """Return whether each pass so far has a record, or varies and will have none."""
        records = self._records.values()
        return bool(records) and all(each.is_usable or each.is_refused for each in records)

    def begin_window(self, *, is_recording: bool = True) -> None:
        """Begin a window, or an evaluation or update, which are not recorded."""
        self._is_recording = is_recording and not (self._is_disturbed or self._is_paused)
        self.num_calls = self._num_backwards = self._position = 0
        self._last: PassKey | None = None
        self._key: PassKey | None = None
        self.is_adding = self.has_varied = False
        self._calls: list[Call] = []
        self._expected: list[Call] | None = None

    def end_window(self, num_issued: int) -> None:
        """Stop recording for good if the window had collectives that are not recorded.

        The other ranks would enter such a collective without a vote.

        Args:
            num_issued: Collectives that this rank has issued in the window, without votes.
        """
        if self._is_recording and num_issued != self.num_calls:
            self._has_foreign_calls = True

    def begin_pass(self, name: str) -> None:
        """Begin a forward or backward of the engine."""
        last = self._last
        number = last.number + 1 if last is not None and last.name == name else 0
        self._key = PassKey(name, self._num_backwards == 0, number)
        self._calls, self._position = [], 0
        self._expected = self._usable.get(self._key) if self._is_recording else None
        record = self._records.get(self._key)
        self.is_adding = (
            self._is_recording
            and self._expected is None
            and (record is None or not record.is_refused)
        )

    def end_pass(self) -> None:
        """Compare the pass with the record of its position."""
        key, self._last, self._key = self._key, self._key, None
        if key is None:
            return
        self._num_backwards += key.name == "backward"
        if not self._is_recording:
            return
        if self._expected is None:
            if self.is_adding:
                record = self._records.setdefault(key, _Record())
                was_usable = record.is_usable
                record.add(self._calls)
                if record.is_usable != was_usable:
                    self._digest = None
            self.is_adding = False
        elif self._position != len(self._expected):
            self._refuse(key)

    def record(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a collective that is about to be issued. No error of this method is raised."""
        self.num_calls += 1
        expected = self._expected
        if expected is None and not self.is_adding:
            return
        try:
            if expected is None:
                self._calls.append(_call(name, args, kwargs))
                return
            if _is_same(expected[self._position], name, args, kwargs):
                self._position += 1
                return
        except _ERRORS as error:  # the collective itself raises what is wrong with its arguments
            logger.debug("a call of %s is not in the record of its pass: %r", name, error)
        if self._key is not None:
            self._refuse(self._key)

    def withdraw(self) -> None:
        """Remove the last recorded collective, because it was not issued."""
        self.num_calls -= 1
        if self._expected is not None:
            self._position -= 1

    @contextmanager
    def gathering(self, parameters: Iterable[Any]) -> Iterator[None]:
        """Record in a `with` block which parameters its gathers assemble."""
        start, ordered = len(self._calls), sorted(parameters, key=lambda each: int(each.ds_id))
        yield
        self._calls[start:] = _with_shards(self._calls[start:], ordered)

    def rest(self) -> tuple[list[Call], str]:
        """Return the calls that the unfinished pass has still to issue, and why it cannot.

        The reason is "" if it can.
        """
        if self._key is None or self._expected is None:
            return [], "the collectives of this pass are not known"
        rest = self._expected[self._position :]
        return rest, next((call.reason for call in rest if call.reason), "")

    def _refuse(self, key: PassKey) -> None:
        """Do not use this record any more: the pass has issued other collectives than before."""
        self.has_varied = True
        self._records.setdefault(key, _Record()).is_refused = True
        self._digest, self._expected, self._usable = None, None, {}
        self._is_recording = self.is_adding = False


@dataclass(slots=True)
class _Record:
    """Record of the passes at one position.

    Attributes:
        calls: Collectives of the last pass.
        num_equal: Consecutive passes with these collectives.
        num_differences: Passes with other collectives than the pass before.
        is_refused: Whether the passes at this position differ.
    """

    calls: list[Call] = field(default_factory=list)
    num_equal: int = 0
    num_differences: int = 0
    is_refused: bool = False

    @property
    def is_usable(self) -> bool:
        return self.num_equal >= _EQUAL_NEEDED and not self.is_refused

    def add(self, calls: list[Call]) -> None:
        if self.num_equal and calls == self.calls:
            self.num_equal += 1
            return
        # What was equal for a time and then differed varies with the batch, and may do so again.
        self.is_refused = self.is_usable or self.num_differences >= _DIFFERENCES_ALLOWED
        self.num_differences += self.num_equal > 0
        self.num_equal, self.calls = 1, calls


def _digest(records: Mapping[PassKey, _Record]) -> int:
    """Return a digest of the usable records that a float64 holds exactly; 0 without any."""
    digest, usable = hashlib.blake2b(digest_size=_DIGEST_BYTES), False
    for key, record in sorted(records.items(), key=lambda item: item[0]):
        if record.is_usable:
            usable = True
            digest.update(repr((key, [call.text() for call in record.calls])).encode())
    return int.from_bytes(digest.digest(), "big") if usable else 0


def gathers_recorded(engine: Any, recorder: PassRecorder, patches: PatchSet) -> None:
    """Patch ZeRO 3's coordinator so that the recorder knows which parameters a gather sends."""
    if class_path(engine.optimizer) != ZERO_3:
        return

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    patches.add_existing(coordinator, [_GATHER_METHOD], partial(recorded_gather, recorder))


def recorded_gather(recorder: PassRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the coordinator's function that gathers parameters."""

    def gather(params: Iterable[Any], forward: bool, quantize: bool = False) -> Any:
        if not recorder.is_adding:
            return original(params, forward, quantize)
        with recorder.gathering([] if quantize else _partitioned(params)):
            return original(params, forward, quantize)

    return gather


def _partitioned(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters that a gather sends; none if any has a secondary partition."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    sent = [each for each in parameters if each.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    return [] if any(each.ds_secondary_tensor is not None for each in sent) else sent


def engine_generation(engine: Any, *changes: object) -> EngineGeneration:
    """Return values that change if the collectives of the engine's passes may change.

    Args:
        engine: DeepSpeed's engine.
        changes: Further such values.
    """
    optimizer = engine.optimizer
    settings = [getattr(optimizer, name, None) for name in _SETTINGS]
    if class_path(optimizer) != ZERO_3:
        return EngineGeneration((id(engine), settings, changes))
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    settings += [getattr(coordinator, name, None) for name in _TRACE_SETTINGS]
    order = getattr(coordinator, _ORDER, ())
    trace = (coordinator.is_complete_trace(), id(order), len(order))
    return EngineGeneration((id(engine), settings, changes), trace)


def has_collectives_within_passes(engine: Any) -> bool:
    """Return whether ZeRO issues collectives between the start and the end of a pass."""
    optimizer = engine.optimizer
    if class_path(optimizer) != ZERO_1_AND_2:
        return class_path(optimizer) == ZERO_3
    return bool(optimizer.partition_gradients or optimizer.overlap_comm)


def partitions_of(engine: Any) -> dict[int, torch.Tensor]:
    """Return this rank's partitions of ZeRO 3's parameters, by the id of the parameter."""
    parameters = engine.module.parameters()
    return {each.ds_id: each.ds_tensor for each in parameters if hasattr(each, "ds_id")}


def _call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    parameters = _PARAMETERS.get(name)
    if parameters is None:
        return Call(name, 0, None, reason=f"{name} cannot be issued with other values")
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    first = next((given[each] for each in parameters[:1] if each in given), None)
    sent = given.get("input_tensor", first)
    if not isinstance(first, torch.Tensor) or not isinstance(sent, torch.Tensor):
        return Call(name, 0, None, reason=f"{name} has no tensor")
    group, reason = given.get("group"), ""
    if dist.get_world_size(group) != dist.get_world_size():
        reason = f"a group of {name} does not have all ranks"
    elif first.dtype is not sent.dtype or first.device != sent.device:
        reason = f"{name} has tensors of different kinds"
    elif name == _GATHER:
        reason = "a gather sends values other than partitions of parameters"
    return Call(
        name,
        first.numel(),
        first.dtype,
        num_input=sent.numel(),
        op=given.get("op"),
        root=given.get("dst"),
        group=group,
        device=first.device,
        reason=reason,
    )


def _is_same(call: Call, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a recorded call is issued again, as far as its description shows."""
    recorded, num_values, dtype, _, _, root, group, _, _, reason = call  # faster than attributes
    if name != recorded or reason:
        return name == recorded
    first, group_at = _PLACES[name]
    tensor = args[0] if args else kwargs[first]
    if tensor.dtype is not dtype or tensor.numel() != num_values:
        return False
    given = args[group_at] if len(args) > group_at else kwargs.get("group")
    if given is not group and (given or dist.group.WORLD) is not (group or dist.group.WORLD):
        return False
    return root is None or root == (args[1] if len(args) > 1 else kwargs["dst"])


def _with_shards(calls: Sequence[Call], parameters: Sequence[Any]) -> list[Call]:
    """Add the parameters to the calls that gather them.

    DeepSpeed gathers each parameter by a call of its own, or all parameters of a type by one call.
    """
    sizes = [int(each.ds_tensor.ds_numel) for each in parameters]
    ids = [int(each.ds_id) for each in parameters]
    if any(call.name != _GATHER for call in calls):
        return list(calls)
    if [call.num_input for call in calls] == sizes:
        parts: list[tuple[int, ...]] = [(number,) for number in ids]
    elif len(calls) == 1 and calls[0].num_input == sum(sizes):
        parts = [tuple(ids)]
    else:
        return list(calls)
    return [call._replace(shards=part, reason="") for call, part in zip(calls, parts, strict=True)]


def issue(
    calls: Sequence[Call],
    backend: Any,
    partitions: Mapping[int, torch.Tensor],
    probe: Callable[[torch.Tensor], None],
) -> bool:
    """Issue collectives with scratch tensors; return whether memory and partitions sufficed.

    If not, no collective is issued.

    Args:
        calls: What to issue.
        backend: DeepSpeed's backend object.
        partitions: This rank's partitions of parameters, by the id of the parameter.
        probe: Allocates and frees the memory that a collective on a tensor needs.

    Raises:
        Exception: A collective failed. The other ranks may wait in it.
    """
    needed = {number for call in calls for number in call.shards or ()}
    if not needed <= partitions.keys():
        return False
    sizes: dict[torch.device, int] = {}
    for call in calls:
        if call.device is not None and call.dtype is not None:
            num_bytes = max(call.num_values, call.num_input) * call.dtype.itemsize
            sizes[call.device] = max(sizes.get(call.device, 0), num_bytes)
    try:
        scratch = {
            device: torch.empty(size, dtype=torch.uint8, device=device)
            for device, size in sizes.items()
        }
        for tensor in scratch.values():
            probe(tensor)
    except (RuntimeError, MemoryError):
        return False
    for call in calls:
        assert call.device is not None and call.dtype is not None
        size = max(call.num_values, call.num_input)
        whole = scratch[call.device][: size * call.dtype.itemsize].view(call.dtype)
        _issue(call, backend, whole, partitions)
    return True


def _issue(
    call: Call, backend: Any, whole: torch.Tensor, partitions: Mapping[int, torch.Tensor]
) -> None:
    method = getattr(backend, call.name)
    if call.name == _GATHER:
        part = whole.narrow(0, dist.get_rank(call.group) * call.num_input, call.num_input)
        start = 0
        for number in call.shards or ():
            partition = partitions[number].reshape(-1)
            part.narrow(0, start, partition.numel()).copy_(partition)
            start += partition.numel()
        method(whole, part, group=call.group)
        return
    whole.zero_()
    options = {} if call.op is None else {"op": call.op}
    if call.name == "reduce_scatter_tensor":
        part = whole.narrow(0, dist.get_rank(call.group) * call.num_values, call.num_values)
        method(part, whole, group=call.group, **options)
    elif call.name == "reduce":
        method(whole, call.root, group=call.group, **options)
    else:
        method(whole, group=call.group, **options)
