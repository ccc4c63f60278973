"""The collectives of a step with ZeRO-3: gathers for each module, scattered gradients.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, partition_parameters.py and
runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .buckets import fill_buckets
from .coordinator import Gather, ModuleVisit, Zero3Coordinator
from .options import Options
from .plan import Call
from .shapes import ModelShape, ModuleShape, Topology

_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage3Step:
    """One step: its calls, and the most parameters' elements that were gathered at once."""

    calls: tuple[Call, ...]
    peak_gathered: int


def stage_3_step(
    model: ModelShape, options: Options, topology: Topology, micro_batches: int
) -> Stage3Step:
    """Play one step.

    Raises:
        TracingError: DeepSpeed would fail on this model.
    """
    partition = _Partition(model=model, options=options, topology=topology)
    peak = model.num_parameters if options.offload_param != "none" else 0
    calls: list[Call] = []
    if topology.data_parallel > 1:
        gathers, peak = _gathers_of_a_step(model, options, micro_batches)
        calls += [call for gather in gathers for call in partition.gather(gather)]
    for _ in range(micro_batches):
        calls += _reduction(model, options, partition)
    calls += _checks(model, options, partition)
    calls += partition.gather_persistent(persistent_parameters(model, options))
    return Stage3Step(calls=tuple(calls), peak_gathered=peak)


def persistent_parameters(model: ModelShape, options: Options) -> list[int]:
    """Return those small enough to stay gathered (parameter_offload.py, mark_persistent...)."""
    kept, total = [], 0
    for index, parameter in enumerate(model.parameters):
        if parameter.numel + total > options.model_persistence_threshold:
            continue
        if parameter.numel <= options.param_persistence_threshold:
            kept.append(index)
            total += parameter.numel
    return kept


def module_visits(model: ModelShape) -> tuple[list[ModuleVisit], list[tuple[int, ...]]]:
    """Return the visits of one micro-batch, and each module's own parameters.

    Modules run in the order of the tree, each once. A module's start in backward is seen if its
    output needs a gradient, its end only if its input does.
    """
    tour = _ModuleWalk(model=model, forward=[], backward=[], parameters=[])
    tour.run(model.root, False)
    return tour.forward + tour.backward[::-1], tour.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleWalk:
    model: ModelShape
    forward: list[ModuleVisit]
    backward: list[ModuleVisit]  # last first
    parameters: list[tuple[int, ...]]

    def run(self, module: ModuleShape, needs_gradient: bool) -> bool:
        """Visit a module and those below it; return whether its output needs a gradient."""
        number = len(self.parameters)
        self.parameters.append(module.parameters)
        takes_gradient = needs_gradient and module.differentiable_input
        self.forward.append(ModuleVisit(module=number, enters=True, forward=True))
        if takes_gradient:
            self.backward.append(ModuleVisit(module=number, enters=False, forward=False))
        output = takes_gradient or any(
            self.model.parameters[index].requires_grad for index in module.parameters
        )
        for child in module.children:
            output = self.run(child, output) or output
        self.forward.append(ModuleVisit(module=number, enters=False, forward=True))
        if output:
            self.backward.append(ModuleVisit(module=number, enters=True, forward=False))
        return output


def _gathers_of_a_step(
    model: ModelShape, options: Options, micro_batches: int
) -> tuple[list[Gather], int]:
    visits, parameters = module_visits(model)
    numels = [parameter.numel for parameter in model.parameters]
    persistent = persistent_parameters(model, options)
    coordinator = Zero3Coordinator(visits, parameters, numels, persistent, options)
    trained = [index for index, p in enumerate(model.parameters) if p.trained]
    for _ in range(_WARM_UP_STEPS + 1):
        gathers = [g for _ in range(micro_batches) for g in coordinator.micro_batch()]
        coordinator.end_step(trained)
    return gathers, coordinator.peak_numel


def _reduction(model: ModelShape, options: Options, partition: _Partition) -> Iterator[Call]:
    """Yield the calls that reduce the gradients of one micro-batch."""
    sizes = {index: parameter.numel for index, parameter in enumerate(model.parameters)}
    limit = options.reduce_bucket_size
    order = model.gradient_order(weights_first=options.weights_first)
    for bucket in fill_buckets(order, sizes, limit):
        elements = sum(sizes[index] for index in bucket)
        if options.contiguous_gradients and elements <= limit and not options.reduce_scatter:
            op = "all_reduce"
        else:
            op = "reduce_scatter"
            elements = sum(partition.aligned(index) for index in bucket)
        yield Call(
            op=op,
            elements=elements,
            dtype=options.communication_dtype,
            purpose="gradients",
            group_size=partition.ranks,
        )


def _checks(model: ModelShape, options: Options, partition: _Partition) -> Iterator[Call]:
    ranks = partition.ranks
    if options.checks_overflow:
        yield Call(op="all_reduce", elements=1, dtype="uint8", purpose="overflow", group_size=ranks)
    dtype = "fp64" if options.offload_optimizer == "none" else "fp32"
    for group in model.groups():
        parts = [partition.aligned(index) // ranks for index in group]
        for _ in range(_num_sub_groups(parts, options.sub_group_size)):
            yield Call(op="all_reduce", elements=1, dtype=dtype, purpose="norm", group_size=ranks)


def _num_sub_groups(parts: Sequence[int], limit: int) -> int:
    """Count the sub-groups of a param group (stage3.py, _create_fp16_sub_groups)."""
    count, filled = 0, 0
    for part in parts:
        filled += part
        if filled >= limit:
            count, filled = count + 1, 0
    return count + (filled > 0) if sum(parts) > limit else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partition:
    """How parameters are cut over the ranks, and what gathering them takes."""

    model: ModelShape
    options: Options
    topology: Topology

    @property
    def ranks(self) -> int:
        return self.topology.data_parallel

    def aligned(self, index: int) -> int:
        """Return a parameter's elements with the padding that makes all parts equal."""
        numel = self.model.parameters[index].numel
        return numel + -numel % self.ranks

    def gather(self, gather: Gather) -> Iterator[Call]:
        if self.options.allgather_sequential or len(gather.parameters) == 1:
            for index in gather.parameters:
                yield self._call(gather, "all_gather", self.aligned(index), self._dtype(index))
            return
        fetch_by_sum = self.options.use_all_reduce_for_fetch and not gather.secondary
        for dtype, elements in self._by_dtype(gather.parameters).items():
            op = "all_reduce" if fetch_by_sum else "all_gather"
            yield self._call(gather, op, elements, dtype)

    def gather_persistent(self, indices: Sequence[int]) -> Iterator[Call]:
        """Yield the calls at the end of a step: one per parameter (partition_parameters.py)."""
        if self.ranks == 1 and len(indices) != 1:  # only the sequential path asks a lone rank
            return
        whole = Gather(parameters=(), secondary=False)
        for index in indices:
            yield self._call(whole, "all_gather", self.aligned(index), self._dtype(index))

    def _by_dtype(self, indices: Sequence[int]) -> Mapping[str, int]:
        sums: dict[str, int] = {}
        for index in indices:
            dtype = self._dtype(index)
            sums[dtype] = sums.get(dtype, 0) + self.aligned(index)
        return sums

    def _dtype(self, index: int) -> str:
        return self.options.model_dtype or self.model.parameters[index].dtype

    def _call(self, gather: Gather, op: str, elements: int, dtype: str) -> Call:
        size = self.options.hpz_partition_size if gather.secondary else self.ranks
        return Call(op=op, elements=elements, dtype=dtype, purpose="parameters", group_size=size)
