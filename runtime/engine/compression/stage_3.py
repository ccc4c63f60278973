"""ZeRO 3: each rank gets the sums of its parts of the parameters, and nothing else travels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from .collective_steps import run_all
from .compressor import Compressor
from .parameter_index import GradientSpan
from .reduction_patch import Names, PatchSet

_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_SCATTER_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class Stage3:
    """Compresses the reduce-scatter, and the all-reduce that takes its place on demand."""

    def __init__(self, optimizer: Any, compressor: Compressor, names: Names) -> None:
        self._optimizer = optimizer
        self._compressor = compressor
        self._names = names
        self._wraps = PatchSet(optimizer)
        self._wraps.replace(_SCATTER, self._scatter_grads)
        self._wraps.replace(_SCATTER_BUCKET, self._scatter_bucket)

    def close(self) -> None:
        """Put everything back."""
        self._wraps.close()

    def drop(self) -> None:
        """Nothing is ever under way between two calls."""

    def _scatter_grads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(parameters: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            group = self._optimizer._get_param_partition_group(parameters[0])
            if dist.get_world_size(group=group) < 2:
                alone: list[torch.Tensor] = original(parameters, dtype)
                return alone
            return self._scattered(parameters, group)

        return scatter

    def _scatter_bucket(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(buffer: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
            bucket = self._optimizer.ipg_buckets[dtype]
            if dist.get_world_size(group=bucket.process_group) < 2:
                alone: list[torch.Tensor] = original(buffer, dtype)
                return alone
            parts = self._scattered(bucket.params, bucket.process_group)
            return [
                torch.nn.functional.pad(part, (0, parameter.partition_numel() - len(part)))
                for part, parameter in zip(parts, bucket.params, strict=True)
            ]

        return scatter

    def _scattered(self, parameters: Sequence[Any], group: Any) -> list[torch.Tensor]:
        """Return the averages of this rank's parts, without padding."""
        exchange = self._compressor.exchange(group)
        places = [
            self._part(parameter, rank, exchange.num_ranks)
            for rank in range(exchange.num_ranks)
            for parameter in parameters
        ]
        gradients = [parameter.grad.reshape(-1) for parameter in parameters] * exchange.num_ranks
        stretches = [
            gradient.narrow(0, place.start, place.length)
            for gradient, place in zip(gradients, places, strict=True)
        ]
        lengths = [place.length for place in places]
        each = len(parameters)
        sizes = [sum(lengths[r * each : (r + 1) * each]) for r in range(exchange.num_ranks)]
        # A gradient is averaged over as many ranks as hold its parts: refusal.py sees to that.
        whose = [[place] for place in places]
        values = self._compressor.load(stretches, whose, exchange.num_ranks)
        run_all(exchange.scatter(values, sizes))
        rank = dist.get_rank(group=group)
        own = values.narrow(0, sum(sizes[:rank]), sizes[rank])
        parts = own.to(self._optimizer.gradient_accumulation_dtype, copy=True)
        own.zero_()
        self._compressor.keep(values, whose)
        return list(parts.split(lengths[rank * each : (rank + 1) * each]))

    def _part(self, parameter: Any, rank: int, num_ranks: int) -> GradientSpan:
        size = parameter.grad.numel()
        share = math.ceil(size / num_ranks)
        start = min(rank * share, size)
        return GradientSpan(self._names[id(parameter)], size, start, min(share, size - start))
