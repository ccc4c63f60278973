"""Engines that all-reduce buckets of whole gradients: ZeRO 0 and BF16_Optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from .collective_steps import run_all
from .compressor import Compressor
from .parameter_index import ParameterIndex
from .reduction_patch import Names, PatchSet, trainable


class Stage0:
    """Compresses the all-reduce in `engine.step()`."""

    def __init__(self, engine: Any, compressor: Compressor, names: Names) -> None:
        self._engine = engine
        self._compressor = compressor
        self._names = names
        self._places = ParameterIndex()
        self._wraps = PatchSet(engine)
        self._wraps.replace("_reduce_non_expert_gradients", self._noted)
        self._wraps.replace("allreduce_bucket", self._reduced)

    def close(self) -> None:
        """Put everything back."""
        self._wraps.close()

    def drop(self) -> None:
        """Nothing is ever under way between two calls."""

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(gradients: Sequence[torch.Tensor], elements_per_buffer: int) -> None:
            if hasattr(self._engine.optimizer, "fp32_groups_gradients_flat"):
                self._places = ParameterIndex(self._in_flat_groups(self._engine.optimizer))
            else:
                reduced = trainable(self._engine.module.parameters())
                names = [self._names[id(parameter)] for parameter in reduced]
                self._places = ParameterIndex(zip(names, gradients, strict=True))
            original(gradients, elements_per_buffer)

        return reduce

    def _in_flat_groups(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients within BF16_Optimizer's flat ones, and the padding at their ends."""
        for group, flat in enumerate(optimizer.fp32_groups_gradients_flat):
            parameters, gradients = (
                optimizer.bf16_groups[group],
                optimizer.fp32_groups_gradients[group],
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                yield self._names[id(parameter)], gradient
            yield f"padding of group {group}", flat[sum(g.numel() for g in gradients) :]

    def _reduced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(
            bucket: Sequence[torch.Tensor], dp_group: Any, dp_world_size: float | None = None
        ) -> torch.Tensor:
            if dist.get_world_size(group=dp_group) < 2:
                alone: torch.Tensor = original(bucket, dp_group, dp_world_size)
                return alone
            exchange = self._compressor.exchange(dp_group)
            places = [self._places.of(gradient) for gradient in bucket]
            divisor = exchange.num_ranks if self._engine.gradient_average else 1
            values = self._compressor.load(bucket, places, divisor)
            result = torch.empty_like(values)
            run_all(exchange.sum_for_all(values, result))
            self._compressor.keep(values, places)
            return result.to(bucket[0].dtype)

        return reduce
