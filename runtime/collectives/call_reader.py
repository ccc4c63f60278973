"""Reads the process group, payload bytes and dtype of a call from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...metrics.catalog.labels import OPS
from .collective_table import OPERATIONS, Function, Operation

Getter = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
ON_CPU = -1  # what torch returns as the device of a tensor in host memory
_SEND = OPS.index("send")
_RECV = OPS.index("recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCall:
    """Where a function without peculiarities has its arguments, for `RecordedFunction`.

    Attributes:
        op: The index of the operation in OPS.
        payload_place: The place of the parameter that holds the payload; -1 without a payload.
        payload_name: The name of this parameter.
        group_place: The place of the parameter `group`; the number of parameters without it.
    """

    op: int
    payload_place: int
    payload_name: str
    group_place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReader:
    """Reads the arguments of the calls of one function.

    Attributes:
        group: Returns the process group.
        payloads: Returns (index in OPS, bytes, dtype) of each operation that the call issues.
        device_index: Returns the device of the payload, ON_CPU for host memory. Without a payload
            it is the first of the argument `device_ids`, or None.
        payload_times_group_size: Copied from `collective_table.Operation`, like the following
            fields, because each call reads them.
        use_group_sequence: Copied from `collective_table.Function`.
        has_future: Copied from `collective_table.Function`.
        point_to_point: Copied from `collective_table.Operation`.
        plain: Set if all ranks of the group issue the call together, the group counts it as one,
            and its payload is that of one parameter.
    """

    group: Getter
    payloads: Getter
    device_index: Getter
    payload_times_group_size: bool
    use_group_sequence: bool
    has_future: bool
    point_to_point: bool
    plain: PlainCall | None = None


def torch_readers(
    parameters_of: Callable[[str], Sequence[str] | None],
) -> Iterator[tuple[str, CallReader]]:
    """Yield the readers of torch's functions, by name.

    Args:
        parameters_of: Returns the parameters of a function in order, or None if this version of
            torch does not have the function.

    Raises:
        ValueError: See `call_reader`.
    """
    for row in OPERATIONS:
        for function in row.functions:
            parameters = parameters_of(function.name) if function.in_torch else None
            if parameters is not None:
                yield function.name, call_reader(row, function, parameters)


def backend_readers() -> Iterator[tuple[str, CallReader]]:
    """Yield the readers of the wrapped methods of DeepSpeed's backend object, by name."""
    for row in OPERATIONS:
        for function in row.functions:
            if function.backend_parameters is not None:
                yield function.name, call_reader(row, function, function.backend_parameters)


def functional_readers(
    parameters_of: Callable[[str], Sequence[str] | None], group_of: Callable[[Any], Any]
) -> Iterator[tuple[str, CallReader]]:
    """Yield the readers of functional collectives, by name. Their results are waited for later.

    Args:
        parameters_of: Returns the parameters of a function in order, or None without the function.
        group_of: Returns the process group, from any form in which a caller may give it.
    """
    for row in OPERATIONS:
        for name in row.functional:
            parameters = parameters_of(name)
            if parameters is None:
                continue
            given = _getter(parameters, "group")
            yield (
                name,
                CallReader(
                    group=_resolved(given, group_of),
                    payloads=_payloads(OPS.index(row.label), parameters, parameters[:1]),
                    device_index=_device_index(_getter(parameters, parameters[0])),
                    payload_times_group_size=row.label == "all_gather",  # the whole output
                    use_group_sequence=False,
                    has_future=False,
                    point_to_point=False,
                ),
            )


def call_reader(row: Operation, function: Function, parameters: Sequence[str]) -> CallReader:
    """Make the reader of one function from the names of its parameters, in order.

    Raises:
        ValueError: None of the parameters is known to hold the payload. This version of torch or
            DeepSpeed spells the parameter differently.
    """
    spellings = [name for name in row.payload if name in parameters]
    if row.payload and not spellings and not function.is_p2p_batch:
        raise ValueError(
            f"none of {row.payload} is among {tuple(parameters)}; "
            "add this version's spelling to runtime/collectives/collective_table.py"
        )
    return CallReader(
        group=_batch_group if function.is_p2p_batch else _getter(parameters, "group"),
        payloads=(
            _batch_payloads
            if function.is_p2p_batch
            else _payloads(OPS.index(row.label), parameters, spellings)
        ),
        device_index=(
            _batch_device_index
            if function.is_p2p_batch
            else _device_index(_getter(parameters, spellings[0]))
            if spellings
            else _first_device_id(_getter(parameters, "device_ids"))
        ),
        payload_times_group_size=row.payload_times_group_size,
        use_group_sequence=function.use_group_sequence,
        has_future=function.has_future,
        point_to_point=row.point_to_point,
        plain=_plain_call(row, function, parameters, spellings),
    )


def _plain_call(
    row: Operation, function: Function, parameters: Sequence[str], spellings: Sequence[str]
) -> PlainCall | None:
    is_peculiar = function.use_group_sequence or not function.has_future
    if is_peculiar or row.point_to_point or row.payload_times_group_size:
        return None
    name = spellings[0] if spellings else ""
    return PlainCall(
        op=OPS.index(row.label),
        payload_place=parameters.index(name) if name else -1,
        payload_name=name,
        group_place=parameters.index("group") if "group" in parameters else len(parameters),
    )


def payload_bytes(value: Any) -> int:
    """Return the bytes of a tensor or of nested lists of tensors, or 0 for any other value."""
    if isinstance(value, torch.Tensor):
        # A sparse tensor does not have `nbytes`, so the bytes of its dense form are counted.
        return value.numel() * value.element_size() if value.is_sparse else value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(payload_bytes, value))
    return 0  # None, or an argument that the original will refuse


def payload_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor, or of the first tensor in nested lists."""
    tensor = _first_tensor(value)
    return None if tensor is None else tensor.dtype


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


def _resolved(getter: Getter, group_of: Callable[[Any], Any]) -> Getter:
    return lambda args, kwargs: group_of(getter(args, kwargs))


def _device_index(payload: Getter) -> Getter:
    def device_index(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        tensor = _first_tensor(payload(args, kwargs))
        return None if tensor is None else tensor.get_device()

    return device_index


def _first_device_id(device_ids: Getter) -> Getter:
    def device_index(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        given = device_ids(args, kwargs)
        index: int | None = given[0] if isinstance(given, list) and given else None
        return index

    return device_index


def _getter(parameters: Sequence[str], name: str) -> Getter:
    """Return a function that reads one argument, which is None if the caller left it out."""
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
        if type(value) is torch.Tensor and not value.is_sparse:  # the fast path for most calls
            return ((op, value.nbytes, value.dtype),)
        return ((op, payload_bytes(value), payload_dtype(value)),)

    return payloads


def _batch_list(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["p2p_op_list"]


def _batch_group(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _batch_list(args, kwargs)[0].group


def _batch_device_index(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    index: int = _batch_list(args, kwargs)[0].tensor.get_device()
    return index


def _batch_payloads(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return [
        (
            _SEND if p2p.op.__name__ == "isend" else _RECV,
            payload_bytes(p2p.tensor),
            p2p.tensor.dtype,
        )
        for p2p in _batch_list(args, kwargs)
    ]
