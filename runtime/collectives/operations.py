"""The operations that the tap wraps: where each keeps its tensors, and what it is called.

Payload bytes follow nccl-tests' convention (PERFORMANCE.md there): all_gather counts its whole
output, reduce_scatter its whole input, the others the tensor that they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...metrics.catalog.labels import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """How to read a call of one function.

    `payload` names the parameters that may hold the payload, by spelling; the first that the
    function has is used. `per_member` marks a tensor that stands for one of group-size equal parts.
    A process group counts one per call; `counted_by_group` marks the functions of which it counts
    more, differing by backend and size, so that the group itself must be asked. The handles of
    point-to-point operations have no future that could tell when they ended, and no number that is
    common to the group.
    """

    label: str
    payload: tuple[str, ...] = ()
    per_member: bool = False
    counted_by_group: bool = False
    has_future: bool = True
    point_to_point: bool = False


_ALL_REDUCE = Operation(label="all_reduce", payload=("tensor", "tensors"))
_ALL_GATHER = Operation(
    label="all_gather",
    payload=(
        "output_tensor",
        "output_tensors",
        "tensor_list",
        "output_tensor_lists",
        "output_tensor_list",
    ),
)
_REDUCE_SCATTER = Operation(label="reduce_scatter", payload=("input", "input_tensor", "input_list"))
_ALL_TO_ALL = Operation(label="all_to_all", payload=("input", "input_tensor_list"))
_BARRIER = Operation(label="barrier")

# One call, many operations; torch issues them by isend and irecv, which are not wrapped.
# gloo counts messages in a group's sequence number, and NCCL need not: the group is asked.
_SEND = Operation(label="send", payload=("tensor",), point_to_point=True, counted_by_group=True)
_RECV = replace(_SEND, label="recv")
P2P_BATCH = replace(_SEND, has_future=False)

OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": _ALL_REDUCE,
    "all_reduce_coalesced": _ALL_REDUCE,
    "all_gather": _ALL_GATHER,
    "all_gather_into_tensor": _ALL_GATHER,
    "all_gather_single": _ALL_GATHER,
    "_all_gather_base": _ALL_GATHER,
    "all_gather_base": _ALL_GATHER,
    "all_gather_coalesced": _ALL_GATHER,
    "reduce_scatter": replace(_REDUCE_SCATTER, counted_by_group=True),
    "reduce_scatter_tensor": _REDUCE_SCATTER,
    "reduce_scatter_single": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "reduce": Operation(label="reduce", payload=("tensor",)),
    "broadcast": Operation(label="broadcast", payload=("tensor",)),
    "all_to_all": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "gather": Operation(label="gather", payload=("tensor",), per_member=True),
    "scatter": Operation(label="scatter", payload=("tensor",), per_member=True),
    "send": _SEND,
    "recv": _RECV,
    "barrier": _BARRIER,
    "monitored_barrier": replace(_BARRIER, counted_by_group=True),
    "batch_isend_irecv": P2P_BATCH,
}

# Methods of DeepSpeed's backend object that the functions above do not cover, each with its
# parameters: DeepSpeed hides them behind (*args, **kwargs). isend and irecv are wrapped only here,
# because torch's P2POp compares its own by identity. The two tensor forms stand here because the
# backend captures torch's functions when it is made.
BACKEND_METHODS: Mapping[str, tuple[Operation, tuple[str, ...]]] = {
    "isend": (
        replace(_SEND, has_future=False),
        ("tensor", "dst", "group", "tag"),
    ),
    "irecv": (
        replace(_RECV, has_future=False),
        ("tensor", "src", "group", "tag"),
    ),
    "all_gather_into_tensor": (
        _ALL_GATHER,
        ("output_tensor", "input_tensor", "group", "async_op"),
    ),
    "all_gather_coalesced": (
        _ALL_GATHER,
        ("output_tensors", "input_tensors", "group", "async_op"),
    ),
    "reduce_scatter_tensor": (
        _REDUCE_SCATTER,
        ("output_tensor", "input_tensor", "op", "group", "async_op"),
    ),
    "inference_all_reduce": (_ALL_REDUCE, ("tensor", "op", "group")),
}

Getter = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
_SEND_PLACE, _RECV_PLACE = OPS.index("send"), OPS.index("recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Finds what a call is about among its arguments.

    `payloads` gives (place of the operation in OPS, bytes, dtype) of each operation that the call
    issues.
    """

    operation: Operation
    group: Getter
    payloads: Getter


def reader_for(operation: Operation, parameters: Sequence[str]) -> Reader:
    """Make the reader of one function from the names of its parameters, in their order.

    Raises:
        ValueError: The function has none of the parameters that should hold its payload, so this
            torch or DeepSpeed spells it in a way unknown here.
    """
    if operation is P2P_BATCH:
        return Reader(operation=operation, group=_batch_group, payloads=_batch_payloads)
    spellings = [name for name in operation.payload if name in parameters]
    if operation.payload and not spellings:
        raise ValueError(
            f"none of {operation.payload} is among {tuple(parameters)}; "
            "add this version's spelling to runtime/collectives/operations.py"
        )
    return Reader(
        operation=operation,
        group=_getter(parameters, "group"),
        payloads=_payloads(OPS.index(operation.label), parameters, spellings),
    )


def _getter(parameters: Sequence[str], name: str) -> Getter:
    """Read one parameter, given by place or by name; None where it is left out."""
    if name not in parameters:
        return lambda args, kwargs: None
    place = parameters.index(name)
    return lambda args, kwargs: args[place] if len(args) > place else kwargs.get(name)


def _payloads(op: int, parameters: Sequence[str], spellings: Sequence[str]) -> Getter:
    if not spellings:
        return lambda args, kwargs: ((op, 0, None),)
    name = spellings[0]
    place = parameters.index(name)

    def payloads(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = args[place] if len(args) > place else kwargs.get(name)
        if type(value) is torch.Tensor and not value.is_sparse:  # nearly always: the short way
            return ((op, value.nbytes, value.dtype),)
        return ((op, payload_bytes(value), payload_dtype(value)),)

    return payloads


def _batch_list(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["p2p_op_list"]


def _batch_group(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _batch_list(args, kwargs)[0].group


def _batch_payloads(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return [
        (
            _SEND_PLACE if p2p.op.__name__ == "isend" else _RECV_PLACE,
            payload_bytes(p2p.tensor),
            p2p.tensor.dtype,
        )
        for p2p in _batch_list(args, kwargs)
    ]


def payload_bytes(value: Any) -> int:
    """Sum the bytes of a tensor, or of nested lists of tensors; None counts nothing."""
    if isinstance(value, torch.Tensor):
        # A sparse tensor has no `nbytes`: count it as the dense one it stands for.
        return value.numel() * value.element_size() if value.is_sparse else value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(payload_bytes, value))
    return 0  # nothing, or what the original will complain of


def payload_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor, or of the first in nested lists of tensors."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) else None
