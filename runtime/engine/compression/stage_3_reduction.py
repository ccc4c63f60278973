"""Compresses the gradient reduction of ZeRO 3: each rank receives only its partitions' sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ...common.patching import MethodPatches
from .bucket_compressor import BucketCompressor, GradientSpan, ParameterNames
from .compressed_all_reduce import run_collective_steps

_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_SCATTER_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class Stage3Reduction:
    """Replaces stage 3's reduce-scatter or all-reduce of gradients by a compressed reduction."""

    def __init__(self, optimizer: Any, compressor: BucketCompressor, names: ParameterNames) -> None:
        self._optimizer = optimizer
        self._compressor = compressor
        self._names = names
        self._patches = MethodPatches(optimizer)
        self._patches.replace(_SCATTER, self._scatter_grads)
        self._patches.replace(_SCATTER_BUCKET, self._scatter_bucket)

    def close(self) -> None:
        """Restore the original methods."""
        self._patches.close()

    def discard(self) -> None:
        """Do nothing: no reduction is in flight between two calls."""

    def _scatter_grads(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(parameters: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
            group = self._optimizer._get_param_partition_group(parameters[0])
            if dist.get_world_size(group=group) < 2:
                unchanged: list[torch.Tensor] = original(parameters, dtype)
                return unchanged
            return self._reduce_scatter(parameters, group)

        return scatter

    def _scatter_bucket(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(buffer: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
            bucket = self._optimizer.ipg_buckets[dtype]
            if dist.get_world_size(group=bucket.process_group) < 2:
                unchanged: list[torch.Tensor] = original(buffer, dtype)
                return unchanged
            parts = self._reduce_scatter(bucket.params, bucket.process_group)
            return [
                torch.nn.functional.pad(part, (0, parameter.partition_numel() - len(part)))
                for part, parameter in zip(parts, bucket.params, strict=True)
            ]

        return scatter

    def _reduce_scatter(self, parameters: Sequence[Any], group: Any) -> list[torch.Tensor]:
        """Return the averages of this rank's partitions, without padding."""
        exchange = self._compressor.exchange(group)
        spans = [
            self._partition(parameter, rank, exchange.num_ranks)
            for rank in range(exchange.num_ranks)
            for parameter in parameters
        ]
        gradients = [parameter.grad.reshape(-1) for parameter in parameters] * exchange.num_ranks
        partitions = [
            gradient.narrow(0, span.start, span.length)
            for gradient, span in zip(gradients, spans, strict=True)
        ]
        lengths = [span.length for span in spans]
        count = len(parameters)
        sizes = [sum(lengths[r * count : (r + 1) * count]) for r in range(exchange.num_ranks)]
        # A gradient is averaged over the ranks that hold its partitions: `unsupported_reason`
        # excludes all other cases.
        spans_of_each = [[span] for span in spans]
        values = self._compressor.pack(partitions, spans_of_each, exchange.num_ranks)
        run_collective_steps(exchange.reduce_scatter(values, sizes))
        rank = dist.get_rank(group=group)
        own = values.narrow(0, sum(sizes[:rank]), sizes[rank])
        parts = own.to(self._optimizer.gradient_accumulation_dtype, copy=True)
        own.zero_()
        self._compressor.keep_errors(values, spans_of_each)
        return list(parts.split(lengths[rank * count : (rank + 1) * count]))

    def _partition(self, parameter: Any, rank: int, num_ranks: int) -> GradientSpan:
        size = parameter.grad.numel()
        per_rank = math.ceil(size / num_ranks)
        start = min(rank * per_rank, size)
        return GradientSpan(self._names[id(parameter)], size, start, min(per_rank, size - start))
