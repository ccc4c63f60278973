"""Which parameters ZeRO-3 gathers together, and when: a model of DeepSpeed's coordinator.

Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py and parameter_offload.py.
What it decides depends on the trace of the first micro-batch, on what is still gathered, and on
decisions that DeepSpeed caches, so it is played through from the first micro-batch on. No event
and no clock has a say in it, on GPUs neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from .options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleVisit:
    """A module is entered (its parameters fetched) or left (released), forward or backward."""

    module: int
    enters: bool
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One decision to gather parameters; `secondary` from the smaller group of hpZ."""

    parameters: tuple[int, ...]
    secondary: bool


@dataclass(slots=True, eq=False)
class _Prefetch:
    """Parameters being gathered by one call; waiting for one of them waits for all."""

    parameters: tuple[int, ...]


@dataclass(slots=True)
class _State:
    available: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)
    waiting: dict[int, _Prefetch] = field(default_factory=dict)
    secondary: set[int] = field(default_factory=set)
    users: dict[int, set[int]] = field(default_factory=dict)


_Held = tuple[frozenset[int], frozenset[int]]


class TracingError(Exception):
    """DeepSpeed itself would fail here: its fetch queue and the modules disagree."""


class Zero3Coordinator:
    """Plays one engine's life, micro-batch by micro-batch.

    Attributes:
        peak_numel: The most elements that were gathered at any time.
    """

    def __init__(
        self,
        visits: Sequence[ModuleVisit],
        module_parameters: Sequence[tuple[int, ...]],
        numels: Sequence[int],
        persistent: Iterable[int],
        options: Options,
    ) -> None:
        """Start the life of an engine.

        Args:
            visits: What one micro-batch does, in order.
            module_parameters: Each module's own parameters.
            numels: The elements of each parameter.
            persistent: The parameters that stay gathered between uses.
            options: The configuration.
        """
        self._visits = visits
        self._parameters = module_parameters
        self._numels = numels
        self._persistent = frozenset(persistent)
        self._options = options
        self._order = [visit.module for visit in visits if visit.enters]
        self._trace = [
            (parameter, step)
            for step, module in enumerate(self._order)
            for parameter in sorted(set(module_parameters[module]))
        ]
        self._has_secondary = options.hpz_partition_size > 1
        self._state = _State()
        if self._has_secondary:
            self._state.secondary.update(range(len(numels)))
        self._to_release: dict[tuple[int, int], frozenset[int]] = {}
        # What follows from each state, once no new decision is cached: it will not change again.
        self._played: dict[_Held, tuple[list[Gather], _State]] = {}
        self._complete = False
        self._recording = False
        self.peak_numel = 0
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._num_available = 0
        self._queue = deque(self._trace) if self._complete else deque()
        self._fetched_for: dict[int, int] = {}
        self._backward: dict[int, None] = {}
        self._gathers: list[Gather] = []

    def micro_batch(self) -> list[Gather]:
        """Play one forward and backward pass; return what was gathered."""
        for parameter in list(self._state.waiting):
            self._wait(self._state.waiting[parameter])
            self._release(parameter)
        self._state.waiting.clear()
        self._complete, self._recording = self._recording or self._complete, True
        self._begin()
        held = (frozenset(self._state.available), frozenset(self._state.secondary))
        if held in self._played:
            self._gathers, after = self._played[held]
            self._state = deepcopy(after)
            return self._gathers
        num_decided = len(self._to_release)
        self._play()
        if self._complete and len(self._to_release) == num_decided:
            self._played[held] = (self._gathers, deepcopy(self._state))
        return self._gathers

    def _play(self) -> None:
        for visit in self._visits:
            if visit.enters:
                self._enter(visit)
            else:
                self._leave(visit)
        self._release_leftovers()

    def end_step(self, trained: Iterable[int]) -> None:
        """Play what the optimizer's step does: all is released, the persistent gathered again."""
        state = self._state
        for flight in state.waiting.values():
            self._wait(flight)
        state.waiting.clear()
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
            flight = self._state.waiting.pop(parameter, None)
            if flight is not None:
                self._wait(flight)
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
        room = options.max_live_parameters - self._num_available
        limit = min(room, options.prefetch_bucket_size)
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
                flight = _Prefetch(part)
                state.waiting.update(dict.fromkeys(part, flight))
        held = sum(self._numels[p] for p in state.available | state.in_flight)
        self.peak_numel = max(self.peak_numel, held)

    def _wait(self, flight: _Prefetch) -> None:
        landed = self._state.in_flight.intersection(flight.parameters)
        self._state.in_flight -= landed
        self._state.available |= landed

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
        """Return what need not stay for a later use; the first answer at a place is kept."""
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
        """Release what belongs to modules whose inputs have no gradient: no hook told their end."""
        while self._backward:
            module, _ = self._backward.popitem()
            for parameter in dict.fromkeys(self._parameters[module]):
                self._state.users.get(parameter, set()).discard(module)
                if parameter not in self._persistent:
                    self._release(parameter)
