"""Simulates ZeRO-3's parameter coordinator: which parameters it gathers together, and when.

Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py and parameter_offload.py.
Its decisions depend on the trace of the first micro-batch, on what is still gathered, and on
cached decisions, so the simulation starts at the first micro-batch. No CUDA event or clock
influences them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from .ds_options import DsOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVisit:
    """One call of a module's hook: on entry parameters are fetched, on exit they are released."""

    module: int
    enters: bool
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Parameters that are gathered together; `secondary` means from the smaller group of hpZ."""

    parameters: tuple[int, ...]
    secondary: bool


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Parameters that one call gathers; waiting for one of them waits for all."""

    parameters: tuple[int, ...]


@dataclass(slots=True)
class _GatherState:
    """The parameters in each state of gathering.

    Attributes:
        available: Parameters that are gathered.
        in_flight: Parameters that are being gathered.
        pending: The gather of each parameter that no module has waited for.
        secondary: Parameters held by the smaller group of hpZ.
        users: Modules that use each parameter at present.
    """

    available: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    pending: dict[int, _Prefetch] = field(default_factory=dict)
    secondary: set[int] = field(default_factory=set)
    users: dict[int, set[int]] = field(default_factory=dict)


_StateKey = tuple[frozenset[int], frozenset[int]]


class TracingError(Exception):
    """DeepSpeed itself fails on this model: its fetch queue and the modules disagree."""


class Zero3Coordinator:
    """Simulates the parameter coordinator of one engine, micro-batch by micro-batch.

    Attributes:
        peak_bytes: The most bytes that were gathered at once.
    """

    def __init__(
        self,
        visits: Sequence[ModuleVisit],
        module_parameters: Sequence[tuple[int, ...]],
        numels: Sequence[int],
        widths: Sequence[int],
        persistent: Iterable[int],
        options: DsOptions,
    ) -> None:
        """Create the coordinator of a new engine.

        Args:
            visits: The visits of one micro-batch, in order.
            module_parameters: Each module's own parameters.
            numels: The elements of each parameter.
            widths: The bytes of one element of each parameter.
            persistent: The parameters that stay gathered between uses.
            options: The configuration.
        """
        self._visits = visits
        self._parameters = module_parameters
        self._numels = numels
        self._widths = widths
        self._persistent = frozenset(persistent)
        self._options = options
        self._order = [visit.module for visit in visits if visit.enters]
        self._trace = [
            (parameter, step)
            for step, module in enumerate(self._order)
            for parameter in sorted(set(module_parameters[module]))
        ]
        self._has_secondary = options.hpz_partition_size > 1
        self._state = _GatherState()
        if self._has_secondary:
            self._state.secondary.update(range(len(numels)))
        self._to_release: dict[tuple[int, int], frozenset[int]] = {}
        # Gathers and next state by state, once no new decision is cached: they no longer change.
        self._simulated: dict[_StateKey, tuple[list[Gather], _GatherState]] = {}
        self._complete = False
        self._recording = False
        self.peak_bytes = 0
        self._reset_trace_position()

    def _reset_trace_position(self) -> None:
        self._step = 0
        self._num_available = 0
        self._queue = deque(self._trace) if self._complete else deque()
        self._fetched_for: dict[int, int] = {}
        self._backward: dict[int, None] = {}
        self._gathers: list[Gather] = []

    def micro_batches(self, count: int) -> Counter[Gather]:
        """Simulate the passes of a step; return how often each gather is made.

        Once the passes repeat, the rest is computed: a step may have thousands of micro-batches.

        Raises:
            TracingError: DeepSpeed itself fails on this model.
        """
        passes: list[list[Gather]] = []
        first_passes: dict[_StateKey, int] = {}
        gathers: Counter[Gather] = Counter()
        for num_left in range(count, 0, -1):
            key = self._begin_pass()
            if key in first_passes:
                cycle = passes[first_passes[key] :]
                for index, repeated in enumerate(cycle):
                    times = (num_left - index + len(cycle) - 1) // len(cycle)
                    for gather in repeated if times > 0 else ():
                        gathers[gather] += times
                for _ in range(num_left % len(cycle)):  # to the state after the last pass
                    self._run_pass(self._begin_pass())
                break
            if key in self._simulated:  # from here on the key determines the pass
                first_passes[key] = len(passes)
            passes.append(self._run_pass(key))
            gathers.update(passes[-1])
        return gathers

    def micro_batch(self) -> list[Gather]:
        """Simulate one forward and backward pass; return what it gathers.

        Raises:
            TracingError: DeepSpeed itself fails on this model.
        """
        return self._run_pass(self._begin_pass())

    def _begin_pass(self) -> _StateKey:
        """Wait for what is in flight, and return what the pass depends on."""
        for parameter in list(self._state.pending):
            self._wait(self._state.pending[parameter])
            self._release(parameter)
        self._state.pending.clear()
        self._complete, self._recording = self._recording or self._complete, True
        self._reset_trace_position()
        return frozenset(self._state.available), frozenset(self._state.secondary)

    def _run_pass(self, key: _StateKey) -> list[Gather]:
        if key in self._simulated:
            self._gathers, after = self._simulated[key]
            self._state = deepcopy(after)
            return self._gathers
        num_decisions = len(self._to_release)
        self._run_visits()
        if self._complete and len(self._to_release) == num_decisions:
            self._simulated[key] = (self._gathers, deepcopy(self._state))
        return self._gathers

    def _run_visits(self) -> None:
        for visit in self._visits:
            if visit.enters:
                self._enter(visit)
            else:
                self._leave(visit)
        self._release_leftovers()

    def end_step(self, trained: Iterable[int]) -> None:
        """Simulate the optimizer's step: release all, then gather persistent parameters again."""
        state = self._state
        for prefetch in state.pending.values():
            self._wait(prefetch)
        state.pending.clear()
        state.users.clear()
        for parameter in list(state.available):
            self._release(parameter)
        state.available.update(self._persistent)
        state.secondary.difference_update(trained)

    def _enter(self, visit: ModuleVisit) -> None:
        own = self._parameters[visit.module]
        if not visit.forward:
            self._backward[visit.module] = None
        self._gather(dict.fromkeys(own))
        for parameter in own:
            self._state.users.setdefault(parameter, set()).add(visit.module)
            prefetch = self._state.pending.pop(parameter, None)
            if prefetch is not None:
                self._wait(prefetch)
        if self._complete:
            self._drop_from_queue(set(own))
            self._prefetch()
        self._step += 1

    def _drop_from_queue(self, own: set[int]) -> None:
        due = {p for p in own if self._fetched_for.get(p, -1) < self._step}
        dropped: set[int] = set()
        while self._queue and len(dropped) < len(due):
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = step
            dropped.add(parameter)
        if dropped != due:
            raise TracingError

    def _prefetch(self) -> None:
        options, state = self._options, self._state
        limit = min(options.max_live_parameters - self._num_available, options.prefetch_bucket_size)
        chosen: dict[int, None] = {}
        numel = 0
        while self._queue and numel < limit and options.prefetch_bucket_size > 0:
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for.get(parameter, -1), step)
            absent = parameter not in state.available and parameter not in state.in_flight
            if absent and parameter not in chosen:
                chosen[parameter] = None
                numel += self._numels[parameter]
        if numel > 0:
            self._gather(chosen)

    def _gather(self, wanted: Iterable[int]) -> None:
        state = self._state
        absent = [p for p in wanted if p not in state.available and p not in state.in_flight]
        self._num_available += sum(self._numels[p] for p in absent)
        for secondary in (True, False):
            part = tuple(sorted(p for p in absent if (p in state.secondary) is secondary))
            if part:
                self._gathers.append(Gather(parameters=part, secondary=secondary))
                state.in_flight.update(part)
                prefetch = _Prefetch(part)
                state.pending.update(dict.fromkeys(part, prefetch))
        held = state.available | state.in_flight
        held_bytes = sum(self._numels[p] * self._widths[p] for p in held)
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def _wait(self, prefetch: _Prefetch) -> None:
        arrived = self._state.in_flight.intersection(prefetch.parameters)
        self._state.in_flight -= arrived
        self._state.available |= arrived

    def _leave(self, visit: ModuleVisit) -> None:
        own = self._parameters[visit.module]
        to_release = self._may_release(visit.module) if self._complete else frozenset(own)
        if not visit.forward:
            self._backward.pop(visit.module, None)
        for parameter in dict.fromkeys(own):
            self._state.users.get(parameter, set()).discard(visit.module)
            if parameter in to_release:
                self._release(parameter)

    def _may_release(self, module: int) -> frozenset[int]:
        """Return the parameters without a near reuse; the first answer per step is cached."""
        key = (module, self._step)
        if key not in self._to_release:
            self._to_release[key] = self._without_reuse(module)
        return self._to_release[key]

    def _without_reuse(self, module: int) -> frozenset[int]:
        candidates = set(self._parameters[module]) - self._persistent
        candidates = {p for p in candidates if self._fetched_for.get(p, -1) <= self._step}
        traversed = 0
        for later in self._order[self._step :]:
            if traversed >= self._options.max_reuse_distance or not candidates:
                break
            for parameter in self._parameters[later]:
                candidates.discard(parameter)
                traversed += self._numels[parameter]
        return frozenset(candidates)

    def _release(self, parameter: int) -> None:
        state = self._state
        if parameter in state.available and not state.users.get(parameter):
            state.available.discard(parameter)
            self._num_available -= self._numels[parameter]
            if self._has_secondary:
                state.secondary.add(parameter)

    def _release_leftovers(self) -> None:
        """Release parameters of modules whose input has no gradient: no hook sees their end."""
        while self._backward:
            module, _ = self._backward.popitem()
            for parameter in dict.fromkeys(self._parameters[module]):
                self._state.users.get(parameter, set()).discard(module)
                if parameter not in self._persistent:
                    self._release(parameter)
