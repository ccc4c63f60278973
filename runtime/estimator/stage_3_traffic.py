"""Estimates the collectives of a step with ZeRO-3: parameter gathers, and gradient reductions.

`zero3_coordinator.py` decides which parameters are gathered together.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, partition_parameters.py and
runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .buckets import fill_buckets
from .ds_options import DsOptions
from .model_shape import ModelShape, ModuleShape, Topology
from .step_estimate import EstimatedCall
from .zero3_coordinator import Gather, ModuleVisit, Zero3Coordinator

_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage3Step:
    """The calls of one step, and the most bytes gathered at once."""

    calls: tuple[EstimatedCall, ...]
    gathered_bytes: int


def stage_3_step(
    model: ModelShape, options: DsOptions, topology: Topology, micro_batches: int
) -> Stage3Step:
    """Simulate one step with ZeRO-3, and the warm-up before it.

    Raises:
        TracingError: DeepSpeed itself fails on this model.
    """
    partition = _ParameterPartition(model=model, options=options, topology=topology)
    widths = [parameter.width_in_training(options.model_dtype) for parameter in model.parameters]
    peak = 0
    calls: list[EstimatedCall] = []
    is_divided = topology.data_parallel > 1
    # A single rank copies offloaded parameters to its GPU, and frees the copies, without a
    # collective. On CPU, it uses the offloaded ones themselves.
    if is_divided or (options.offload_param != "none" and not options.on_cpu):
        gathers, peak = _gathers_of_a_step(model, widths, options, micro_batches)
        for gather, times in gathers.items() if is_divided else ():
            calls += [replace(call, times=times) for call in partition.gather(gather)]
    calls += [replace(call, times=micro_batches) for call in _reduction(model, options, partition)]
    calls += _step_checks(model, options, partition)
    calls += partition.gather_persistent(persistent_parameters(model, options))
    return Stage3Step(calls=tuple(calls), gathered_bytes=peak)


def persistent_parameters(model: ModelShape, options: DsOptions) -> list[int]:
    """Return the indices of the parameters that stay gathered, as they are small.

    Source: parameter_offload.py.
    """
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

    Modules run once each, in the order of the tree. DeepSpeed's hooks see the start of a module's
    backward if its output needs a gradient, and the end only if its input does.
    """
    walk = _ModuleWalk(model=model, forward=[], backward=[], parameters=[])
    walk.run(model.root, False)
    return walk.forward + walk.backward[::-1], walk.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleWalk:
    """Walks the module tree and collects the visits of forward and backward."""

    model: ModelShape
    forward: list[ModuleVisit]
    backward: list[ModuleVisit]  # in reverse
    parameters: list[tuple[int, ...]]

    def run(self, module: ModuleShape, needs_gradient: bool) -> bool:
        """Visit a module and its submodules; return whether its output needs a gradient."""
        number = len(self.parameters)
        self.parameters.append(module.parameters)
        input_gradient = needs_gradient and module.differentiable_input
        self.forward.append(ModuleVisit(module=number, enters=True, forward=True))
        if input_gradient:
            self.backward.append(ModuleVisit(module=number, enters=False, forward=False))
        output = input_gradient or any(
            self.model.parameters[index].requires_grad for index in module.parameters
        )
        for child in module.children:
            output = self.run(child, output) or output
        self.forward.append(ModuleVisit(module=number, enters=False, forward=True))
        if output:
            self.backward.append(ModuleVisit(module=number, enters=True, forward=False))
        return output


def _gathers_of_a_step(
    model: ModelShape, widths: Sequence[int], options: DsOptions, micro_batches: int
) -> tuple[Mapping[Gather, int], int]:
    """Return each gather of a step with its number, and the most bytes gathered at once."""
    visits, parameters = module_visits(model)
    numels = [parameter.numel for parameter in model.parameters]
    persistent = persistent_parameters(model, options)
    coordinator = Zero3Coordinator(visits, parameters, numels, widths, persistent, options)
    trained = [index for index, p in enumerate(model.parameters) if p.is_trained]
    for _ in range(_WARM_UP_STEPS + 1):
        gathers = coordinator.micro_batches(micro_batches)
        coordinator.end_step(trained)
    return gathers, coordinator.peak_bytes


def _reduction(
    model: ModelShape, options: DsOptions, partition: _ParameterPartition
) -> Iterator[EstimatedCall]:
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
        yield EstimatedCall(
            op=op,
            elements=elements,
            dtype=options.communication_dtype,
            purpose="gradients",
            group_size=partition.ranks,
        )


def _step_checks(
    model: ModelShape, options: DsOptions, partition: _ParameterPartition
) -> Iterator[EstimatedCall]:
    """Yield the calls that check for overflow and compute the gradient norm."""
    ranks = partition.ranks
    if options.checks_overflow:
        yield EstimatedCall(
            op="all_reduce", elements=1, dtype="uint8", purpose="overflow", group_size=ranks
        )
    dtype = "fp64" if not options.offloads_optimizer else "fp32"
    for _ in sub_groups(model, options, ranks):
        yield EstimatedCall(
            op="all_reduce", elements=1, dtype=dtype, purpose="norm", group_size=ranks
        )


def sub_groups(model: ModelShape, options: DsOptions, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the parts that one rank has of the parameters of each sub-group, in elements.

    Source: stage3.py, _create_fp16_sub_groups.
    """
    for group in model.param_groups():
        parts = [-(-model.parameters[index].numel // ranks) for index in group]
        divides = sum(parts) > options.sub_group_size
        first, numel = 0, 0
        for end, part in enumerate(parts, start=1):
            numel += part
            if end == len(parts) or (divides and numel >= options.sub_group_size):
                yield tuple(parts[first:end])
                first, numel = end, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterPartition:
    """The partitioning of parameters over the ranks, and the calls that gather them."""

    model: ModelShape
    options: DsOptions
    topology: Topology

    @property
    def ranks(self) -> int:
        return self.topology.data_parallel

    def aligned(self, index: int) -> int:
        """Return a parameter's elements, padded to equal parts."""
        numel = self.model.parameters[index].numel
        return numel + -numel % self.ranks

    def gather(self, gather: Gather) -> Iterator[EstimatedCall]:
        if self.options.allgather_sequential or len(gather.parameters) == 1:
            for index in gather.parameters:
                yield self._call(gather, "all_gather", self.aligned(index), self._dtype(index))
            return
        uses_all_reduce = self.options.use_all_reduce_for_fetch and not gather.secondary
        for dtype, elements in self._by_dtype(gather.parameters).items():
            op = "all_reduce" if uses_all_reduce else "all_gather"
            yield self._call(gather, op, elements, dtype)

    def gather_persistent(self, indices: Sequence[int]) -> Iterator[EstimatedCall]:
        """Yield the calls at the end of a step, one per parameter (partition_parameters.py)."""
        is_sequential = self.options.allgather_sequential or len(indices) == 1
        if self.ranks == 1 and not is_sequential:
            return
        from_all_ranks = Gather(parameters=(), secondary=False)
        for index in indices:
            yield self._call(from_all_ranks, "all_gather", self.aligned(index), self._dtype(index))

    def _by_dtype(self, indices: Sequence[int]) -> Mapping[str, int]:
        sums: dict[str, int] = {}
        for index in indices:
            dtype = self._dtype(index)
            sums[dtype] = sums.get(dtype, 0) + self.aligned(index)
        return sums

    def _dtype(self, index: int) -> str:
        return self.model.parameters[index].dtype_in_training(self.options.model_dtype)

    def _call(self, gather: Gather, op: str, elements: int, dtype: str) -> EstimatedCall:
        size = self.options.hpz_partition_size if gather.secondary else self.ranks
        return EstimatedCall(
            op=op, elements=elements, dtype=dtype, purpose="parameters", group_size=size
        )
