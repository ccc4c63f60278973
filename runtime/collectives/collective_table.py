"""Lists the collectives: the functions, payload and wire bytes of each operation.

Each row is one operation, as metrics label it. The row lists the functions of torch and DeepSpeed
that issue the operation. All other lists of collectives in the package are read from this table. To
add a function, extend the row of its operation. To add an operation, add a row here, a label to
`metrics/catalog/labels.py`, and the bytes that the operation sends to `docs/concepts.md`. The table
is plain data and does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Flag, auto
from typing import Protocol

from ...metrics.catalog.labels import OPS


class WireFormula(Protocol):
    """Returns the bytes that a rank sends per payload byte, for at least two ranks."""

    def __call__(self, backend: str, group_size: int, payload_bytes: float) -> float:
        """Return bytes sent per payload byte. With a root, return the mean of all ranks."""


class Guard(Flag):
    """Lists the situations in which all ranks vote before they call a function."""

    NONE = 0
    OOM = auto()  # in a window that may run out of memory: trainer/oom_recovery
    REBUILD = auto()  # while DeepSpeed makes another engine: engine/rebuild
    ALWAYS = OOM | REBUILD


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function that issues a collective.

    Attributes:
        name: Its name in torch.distributed, and as a method of DeepSpeed's backend object.
        in_torch: Whether torch's function is wrapped.
        backend_parameters: The parameters of the method of DeepSpeed's backend object. They are
            listed here because DeepSpeed hides them behind (*args, **kwargs). None if the method is
            not wrapped.
        guard: Situations in which all ranks vote before they enter the method.
        use_group_sequence: Whether the process group may count a call as more than one, depending
            on backend and size. The group's own sequence number is then read.
        has_future: Whether the handle has a future that shows when the operation ended. Backends
            may lack it, as gloo does for reduce_scatter.
        is_p2p_batch: Whether the function takes a list of `P2POp`.
    """

    name: str
    in_torch: bool = True
    backend_parameters: tuple[str, ...] | None = None
    guard: Guard = Guard.ALWAYS
    use_group_sequence: bool = False
    has_future: bool = True
    is_p2p_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of the table: an operation, as the metrics label it.

    Payload bytes follow the convention of nccl-tests (see its PERFORMANCE.md). The payload of
    all_gather is its whole output, and the payload of reduce_scatter is its whole input. The
    payload of any other operation is the tensor that the caller passes.

    Attributes:
        label: The value of the label `op`.
        functions: The functions that issue it.
        wire_formula: Bytes sent per payload byte.
        wire_by_payload: Whether the formula depends on the payload.
        payload: Names of the parameters that may hold the payload. The first parameter that a
            function has is read. Empty if the operation does not have a payload.
        payload_times_group_size: Whether the payload is the tensor of this parameter times the
            group size.
        symmetric: Whether all members send and receive the same amount. The shortest duration over
            the ranks is then the time of the transfer.
        point_to_point: Whether only two ranks take part. These calls do not have a sequence number
            that is common to the group.
        functional: Functions of torch.distributed._functional_collectives that issue it; their
            first parameter is the input. DTensor calls these.
    """

    label: str
    functions: tuple[Function, ...]
    wire_formula: WireFormula
    wire_by_payload: bool = False
    payload: tuple[str, ...] = ()
    payload_times_group_size: bool = False
    symmetric: bool = False
    point_to_point: bool = False
    functional: tuple[str, ...] = ()


_GLOO_SEGMENT_BYTES = 1 << 20  # gloo's kMaxSegmentSize


def _ring_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n, because a rank sends all parts except its own."""
    return (group_size - 1) / group_size


def _all_reduce_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 2(n-1)/n, because a ring all_reduce is a reduce_scatter and an all_gather."""
    return 2 * (group_size - 1) / group_size


def _reduce_scatter_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n, or 2(n-1)/n on gloo, which runs an all_reduce instead."""
    return (2 if backend == "gloo" else 1) * (group_size - 1) / group_size


def _reduce_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n, or on gloo the factor that follows from gloo/reduce.cc.

    gloo sends all segments but two round the ring. Each rank then sends its part to the root. A
    segment has at most 1 MiB. All ranks have the same number of segments, at least two.
    """
    if backend != "gloo":
        return _ring_factor(backend, group_size, payload_bytes)
    needed = max(math.ceil(payload_bytes / _GLOO_SEGMENT_BYTES), 2 * group_size)
    num_segments = math.ceil(needed / group_size) * group_size
    return 1 - 2 / num_segments + (group_size - 1) / group_size**2


def _root_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n^2, because all parts except the root's are sent once by n ranks in total."""
    return (group_size - 1) / group_size / group_size


def _whole_payload(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 1, because a sender sends its payload once."""
    return 1.0


def _no_bytes(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 0, because a receiver does not send anything, and a barrier has no payload."""
    return 0.0


_ALL_GATHER_PARAMETERS = ("output_tensor", "input_tensor", "group", "async_op")

# Ring algorithms send 2(n-1)/n of the payload for all_reduce and (n-1)/n for its halves
# (nccl-tests, PERFORMANCE.md).
#
# A method of DeepSpeed's backend object is wrapped only if a wrapper of torch's function would not
# see the call. The backend captures all_gather_into_tensor and reduce_scatter_tensor when it is
# made. isend and irecv cannot be wrapped in torch, because its P2POp compares them by identity.
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        label="all_reduce",
        payload=("tensor", "tensors"),
        wire_formula=_all_reduce_factor,
        symmetric=True,
        functional=("all_reduce",),
        functions=(
            Function(name="all_reduce"),
            Function(name="all_reduce_coalesced"),
            Function(
                name="inference_all_reduce",
                in_torch=False,
                backend_parameters=("tensor", "op", "group"),
                guard=Guard.OOM,
            ),
        ),
    ),
    Operation(
        label="all_gather",
        payload=(
            "output_tensor",
            "output_tensors",
            "tensor_list",
            "output_tensor_lists",
            "output_tensor_list",
        ),
        wire_formula=_ring_factor,
        symmetric=True,
        # The second is an older name, which calls the first in newer versions.
        functional=("all_gather_single", "all_gather_tensor"),
        functions=(
            Function(name="all_gather"),
            Function(name="all_gather_into_tensor", backend_parameters=_ALL_GATHER_PARAMETERS),
            Function(name="all_gather_single", guard=Guard.NONE),
            Function(name="_all_gather_base", guard=Guard.NONE),
            Function(name="all_gather_base", guard=Guard.OOM),
            Function(
                name="all_gather_coalesced",
                backend_parameters=("output_tensors", "input_tensors", "group", "async_op"),
            ),
        ),
    ),
    Operation(
        label="reduce_scatter",
        payload=("input", "input_tensor", "input_list"),
        wire_formula=_reduce_scatter_factor,
        symmetric=True,
        functional=("reduce_scatter_single", "reduce_scatter_tensor"),
        functions=(
            Function(name="reduce_scatter", use_group_sequence=True),
            Function(
                name="reduce_scatter_tensor",
                backend_parameters=("output_tensor", "input_tensor", "op", "group", "async_op"),
            ),
            Function(name="reduce_scatter_single", guard=Guard.NONE),
            Function(name="_reduce_scatter_base", guard=Guard.NONE),
        ),
    ),
    Operation(
        label="reduce",
        payload=("tensor",),
        wire_formula=_reduce_factor,
        wire_by_payload=True,
        functions=(Function(name="reduce"),),
    ),
    Operation(
        label="broadcast",
        payload=("tensor",),
        wire_formula=_ring_factor,
        functional=("broadcast",),
        functions=(Function(name="broadcast"),),
    ),
    Operation(
        label="all_to_all",
        payload=("input", "input_tensor_list"),
        wire_formula=_ring_factor,
        symmetric=True,
        functional=("all_to_all_single",),
        functions=(Function(name="all_to_all"), Function(name="all_to_all_single")),
    ),
    Operation(
        label="gather",
        payload=("tensor",),
        payload_times_group_size=True,
        wire_formula=_root_factor,
        functions=(Function(name="gather"),),
    ),
    Operation(
        label="scatter",
        payload=("tensor",),
        payload_times_group_size=True,
        wire_formula=_root_factor,
        functions=(Function(name="scatter"),),
    ),
    # gloo counts messages in a group's sequence number. NCCL may not, so the number is read from
    # the group.
    Operation(
        label="send",
        payload=("tensor",),
        wire_formula=_whole_payload,
        point_to_point=True,
        functions=(
            Function(name="send", guard=Guard.NONE, use_group_sequence=True),
            Function(
                name="isend",
                in_torch=False,
                backend_parameters=("tensor", "dst", "group", "tag"),
                guard=Guard.NONE,
                use_group_sequence=True,
                has_future=False,
            ),
            # One call has many sends and receives, which torch issues by its own isend and irecv.
            Function(
                name="batch_isend_irecv",
                guard=Guard.NONE,
                use_group_sequence=True,
                has_future=False,
                is_p2p_batch=True,
            ),
        ),
    ),
    Operation(
        label="recv",
        payload=("tensor",),
        wire_formula=_no_bytes,
        point_to_point=True,
        functions=(
            Function(name="recv", guard=Guard.NONE, use_group_sequence=True),
            Function(
                name="irecv",
                in_torch=False,
                backend_parameters=("tensor", "src", "group", "tag"),
                guard=Guard.NONE,
                use_group_sequence=True,
                has_future=False,
            ),
        ),
    ),
    Operation(
        label="barrier",
        wire_formula=_no_bytes,
        symmetric=True,
        functions=(
            Function(name="barrier"),
            Function(name="monitored_barrier", use_group_sequence=True),
        ),
    ),
)

# All ranks enter these functions too. They issue the collectives above, which are recorded.
COMPOSED: tuple[Function, ...] = (
    Function(name="all_gather_object"),
    Function(name="broadcast_object_list"),
    Function(name="new_group", guard=Guard.REBUILD),
)

SYMMETRIC = frozenset(row.label for row in OPERATIONS if row.symmetric)
POINT_TO_POINT = frozenset(row.label for row in OPERATIONS if row.point_to_point)

_BY_LABEL = {row.label: row for row in OPERATIONS}
# Indices in OPS, because a call holds its operation as an index.
WIRE_BY_PAYLOAD = frozenset(OPS.index(row.label) for row in OPERATIONS if row.wire_by_payload)


def guarded_methods(guard: Guard) -> tuple[str, ...]:
    """Return the methods of DeepSpeed's backend object before which all ranks vote."""
    functions = [function for row in OPERATIONS for function in row.functions] + [*COMPOSED]
    return tuple(function.name for function in functions if guard in function.guard)


def wire_factor(op: str, backend: str, group_size: int, payload_bytes: float = 0) -> float:
    """Return the bytes that one rank sends per payload byte.

    Args:
        op: The operation's label.
        backend: The process group's backend, such as "nccl".
        group_size: Ranks in the process group. A group of one rank does not send anything.
        payload_bytes: Bytes of the payload. Only the factor of gloo's reduce depends on them.
    """
    if group_size < 2:
        return 0.0
    return _BY_LABEL[op].wire_formula(backend, group_size, payload_bytes)
