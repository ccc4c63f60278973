"""Compresses the all-reduce of whole gradients, for ZeRO 0 and BF16_Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ...common.patching import MethodPatches
from .bucket_compressor import BucketCompressor, ParameterIndex, ParameterNames
from .compressed_all_reduce import run_collective_steps


class Stage0Reduction:
    """Replaces the gradient all-reduce in `engine.step()` by a compressed all-reduce."""

    def __init__(self, engine: Any, compressor: BucketCompressor, names: ParameterNames) -> None:
        self._engine = engine
        self._compressor = compressor
        self._names = names
        self._index = ParameterIndex()
        self._patches = MethodPatches(engine)
        self._patches.replace("_reduce_non_expert_gradients", self._indexing)
        self._patches.replace("allreduce_bucket", self._compressing)

    def close(self) -> None:
        """Restore the original methods."""
        self._patches.close()

    def discard(self) -> None:
        """Do nothing: no reduction is in flight between two calls."""

    def _indexing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(gradients: Sequence[torch.Tensor], elements_per_buffer: int) -> None:
            if hasattr(self._engine.optimizer, "fp32_groups_gradients_flat"):
                self._index = ParameterIndex(self._in_flat_groups(self._engine.optimizer))
            else:
                # DeepSpeed reduces these, in this order.
                reduced = (
                    p for p in self._engine.module.parameters() if p.requires_grad and p.numel()
                )
                names = [self._names[id(parameter)] for parameter in reduced]
                self._index = ParameterIndex(zip(names, gradients, strict=True))
            original(gradients, elements_per_buffer)

        return reduce

    def _in_flat_groups(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients in BF16_Optimizer's flat gradients, and the padding at their ends."""
        for group, flat in enumerate(optimizer.fp32_groups_gradients_flat):
            parameters = optimizer.bf16_groups[group]
            gradients = optimizer.fp32_groups_gradients[group]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                yield self._names[id(parameter)], gradient
            yield f"padding of group {group}", flat[sum(g.numel() for g in gradients) :]

    def _compressing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(
            bucket: Sequence[torch.Tensor], dp_group: Any, dp_world_size: float | None = None
        ) -> torch.Tensor:
            if dist.get_world_size(group=dp_group) < 2:
                unchanged: torch.Tensor = original(bucket, dp_group, dp_world_size)
                return unchanged
            exchange = self._compressor.exchange(dp_group)
            spans = [self._index.spans_of(gradient) for gradient in bucket]
            divisor = exchange.num_ranks if self._engine.gradient_average else 1
            values = self._compressor.pack(bucket, spans, divisor)
            result = torch.empty_like(values)
            run_collective_steps(exchange.all_reduce(values, result))
            self._compressor.keep_errors(values, spans)
            return result.to(bucket[0].dtype)

        return reduce
