"""Measures the bytes of a model's activations by a pass on fake tensors, without computation.

Fake tensors have shapes and storages, but no memory. Attention is torch's on CPU, which keeps as
little as flash attention does.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .model_memory import Activations

# Errors of a pass on fake tensors, which have no values.
_PASS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, None: None}


class UnknownActivationsError(Exception):
    """The model did not run on token ids; the message has the reason."""


def trace_activations(
    module: nn.Module, dtype: str | None, *, samples: int, tokens: int
) -> Activations:
    """Return the activation bytes per sample, from passes of `samples` and twice as many samples.

    Args:
        module: The model, on any device; it is not changed.
        dtype: Data type of parameters in training; None for their own.
        samples: Samples of a micro-batch.
        tokens: Length of a sample.

    Raises:
        UnknownActivationsError: The model does not take token ids, or needs their values.
    """
    try:
        with (
            _without_tracebacks(),
            _fused_attention(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            fake = _fake_copy(module, _DTYPES[dtype])
            peaks, doubled_peaks = (_peaks(fake, size, tokens) for size in (samples, 2 * samples))
    except _PASS_ERRORS as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UnknownActivationsError(f"{type(error).__name__}: {reason}") from error
    sample_bytes, later_sample_bytes = (
        max(0, doubled - peak) // samples
        for peak, doubled in zip(peaks, doubled_peaks, strict=True)
    )
    fixed_bytes, later_fixed_bytes = (
        peak - samples * each
        for peak, each in zip(peaks, (sample_bytes, later_sample_bytes), strict=True)
    )
    return Activations(
        tokens=tokens,
        sample_bytes=sample_bytes,
        fixed_bytes=fixed_bytes,
        loss_sample_bytes=sample_bytes - later_sample_bytes,
        loss_fixed_bytes=fixed_bytes - later_fixed_bytes,
    )


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Disable torch's log of failed operations; the raised error has the same text."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Run torch's fused kernel for attention that has dropout, or a value of another width.

    The kernel on CPU supports neither: torch would store the scores instead, which grow with the
    square of the tokens. The kernels of CUDA store no scores: dropout needs a seed only.

    All threads of the process attend so meanwhile: do not trace in a process that trains on CPU.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(_ATTENTION, _attend, "AutogradCPU")
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    _dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attend without dropout, over as many channels as query, key and value all have.

    The channels are views, so that no copies are stored in addition.
    """
    width = value.shape[-1]
    common = min(width, query.shape[-1])
    query, key, value = (each[..., :common] for each in (query, key, value))
    mixed = _ATTENTION.decompose(query, key, value, attn_mask, 0.0, is_causal, **options)
    return nn.functional.pad(mixed, (0, width - common)) if width > common else mixed


def _fake_copy(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy in training mode whose parameters and buffers are fake tensors on CPU."""
    fakes: dict[int, Any] = {}
    for buffer in module.buffers():
        fakes[id(buffer)] = _empty_like(buffer, dtype)
    for parameter in module.parameters():
        fakes[id(parameter)] = nn.Parameter(
            _empty_like(parameter, dtype), requires_grad=parameter.requires_grad
        )
    return copy.deepcopy(module, fakes).train()


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    new_dtype = dtype if tensor.is_floating_point() else None
    return torch.empty(tensor.shape, dtype=new_dtype or tensor.dtype, device="cpu")


def _peaks(module: nn.Module, samples: int, tokens: int) -> tuple[int, int]:
    """Return the most live bytes, and the most from the first finished gradient on."""
    ids = torch.zeros(samples, tokens, dtype=torch.long, device="cpu")
    live = LiveBytes()
    peaks: list[int] = []

    def on_gradient(parameter: torch.Tensor) -> None:
        if not peaks:
            peaks.append(live.peak)
            live.peak = live.live
        parameter.grad = None  # ZeRO frees each once it is reduced

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in trained]
    with live:
        output = _call(module, ids)
        _loss(output, ids).backward()
    for hook in hooks:
        hook.remove()
    return max([*peaks, live.peak]), live.peak


def _call(module: nn.Module, ids: torch.Tensor) -> Any:
    names = inspect.signature(module.forward).parameters
    if "input_ids" not in names:
        return module(ids)
    labels = {"labels": ids} if "labels" in names else {}
    return module(input_ids=ids, **labels)


def _loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss, or the fp32 cross-entropy of its logits.

    Raises:
        TypeError: The output has neither.
    """
    for tensor in _candidates(output):
        if tensor.is_floating_point() and tensor.dim() == 0:
            return tensor
        if tensor.is_floating_point() and tensor.shape[:-1] == ids.shape:
            return nn.functional.cross_entropy(tensor.flatten(0, 1).float(), ids.flatten())
    raise TypeError("the output is neither a loss nor logits for each token")


def _candidates(output: Any) -> Iterable[torch.Tensor]:
    first = output[0] if isinstance(output, tuple | list) and output else None
    values = (getattr(output, "loss", None), getattr(output, "logits", None), output, first)
    return (value for value in values if isinstance(value, torch.Tensor))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages in a `with` block, as a device's allocator does.

    Storages that existed before are not counted, nor those on the meta device. Fake tensors count
    with their size.

    Attributes:
        live: Bytes of the storages that are alive.
        peak: The maximum of `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._bytes_of: dict[int, int] = {}

    def __torch_dispatch__(  # noqa: D105 - the hook that torch calls for each operation
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        existing = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), existing)
        return output

    def _count(self, storage: torch.UntypedStorage, existing: set[int]) -> None:
        key = storage._cdata
        if key in self._bytes_of or key in existing:
            return
        self._bytes_of[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._bytes_of.pop(key)
