"""Lists the collectives: the functions, payload and wire bytes of each operation.

One row is one operation, as metrics label it; it lists the functions of torch and DeepSpeed that
issue it. All other lists of collectives in the package are read from here. To add a function,
extend its row; for a new operation, add a row and its label to `metrics/catalog/labels.py`, and the
bytes that it sends to `docs/concepts.md`. Plain data: no torch.
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
        """Return bytes sent per payload byte; for operations with a root, the mean over ranks."""


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
        backend_parameters: Its parameters as a method of DeepSpeed's backend object, if that is
            wrapped too: DeepSpeed hides them behind (*args, **kwargs).
        guard: Situations in which all ranks vote before they enter the method.
        use_group_sequence: Whether the process group counts more than one per call, by backend and
            size, so that its own sequence number must be read.
        has_future: Whether the handle has a future that shows when the operation ended.
        is_p2p_batch: Whether it takes a list of `P2POp`.
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

    Payload bytes follow nccl-tests' convention (PERFORMANCE.md there): all_gather counts its whole
    output, reduce_scatter its whole input, the others the tensor that they are given.

    Attributes:
        label: The value of the label `op`.
        functions: The functions that issue it.
        wire_formula: Bytes sent per payload byte.
        wire_by_payload: Whether the formula depends on the payload.
        payload: Parameters that may hold the payload, by spelling; the first that a function has
            is read. Empty: no payload.
        payload_times_group_size: Whether that tensor is one of group-size equal parts.
        symmetric: Whether all members send and receive alike, so that the shortest duration over
            the ranks is the time of the transfer.
        point_to_point: Whether only two ranks take part. Such calls have no sequence number that is
            common to the group.
    """

    label: str
    functions: tuple[Function, ...]
    wire_formula: WireFormula
    wire_by_payload: bool = False
    payload: tuple[str, ...] = ()
    payload_times_group_size: bool = False
    symmetric: bool = False
    point_to_point: bool = False


_GLOO_SEGMENT_BYTES = 1 << 20  # gloo's kMaxSegmentSize


def _ring_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n: a rank sends all parts but its own."""
    return (group_size - 1) / group_size


def _all_reduce_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 2(n-1)/n: a ring all_reduce is a reduce_scatter and an all_gather."""
    return 2 * (group_size - 1) / group_size


def _reduce_scatter_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n; on gloo the factor of all_reduce, which gloo runs instead."""
    return (2 if backend == "gloo" else 1) * (group_size - 1) / group_size


def _reduce_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Follow gloo/reduce.cc: all but two segments go round the ring, then each part to the root.

    Segments are of 1 MiB at most, two or more for each rank, and as many for each.
    """
    if backend != "gloo":
        return _ring_factor(backend, group_size, payload_bytes)
    needed = max(math.ceil(payload_bytes / _GLOO_SEGMENT_BYTES), 2 * group_size)
    num_segments = math.ceil(needed / group_size) * group_size
    return 1 - 2 / num_segments + (group_size - 1) / group_size**2


def _root_factor(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return (n-1)/n^2: all parts but the root's are sent once, in the mean over n ranks."""
    return (group_size - 1) / group_size / group_size


def _whole_payload(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 1: a sender sends its payload once."""
    return 1.0


def _no_bytes(backend: str, group_size: int, payload_bytes: float) -> float:
    """Return 0: a receiver sends nothing, and a barrier has no payload."""
    return 0.0


_ALL_GATHER_PARAMETERS = ("output_tensor", "input_tensor", "group", "async_op")

# Ring algorithms send 2(n-1)/n of the payload for all_reduce and (n-1)/n for its halves
# (nccl-tests, PERFORMANCE.md).
#
# A method of DeepSpeed's backend object is wrapped only where torch's function does not show the
# call. The backend captures all_gather_into_tensor and reduce_scatter_tensor when it is made. isend
# and irecv cannot be wrapped in torch: its P2POp compares them by identity.
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        label="all_reduce",
        payload=("tensor", "tensors"),
        wire_formula=_all_reduce_factor,
        symmetric=True,
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
        functions=(Function(name="broadcast"),),
    ),
    Operation(
        label="all_to_all",
        payload=("input", "input_tensor_list"),
        wire_formula=_ring_factor,
        symmetric=True,
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
    # gloo counts messages in a group's sequence number, and NCCL need not: the group is asked.
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
            # One call, many sends and receives; torch issues them by its own isend and irecv.
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

# All ranks enter these too. They issue the collectives above, which are recorded.
COMPOSED: tuple[Function, ...] = (
    Function(name="all_gather_object"),
    Function(name="broadcast_object_list"),
    Function(name="new_group", guard=Guard.REBUILD),
)

SYMMETRIC = frozenset(row.label for row in OPERATIONS if row.symmetric)
POINT_TO_POINT = frozenset(row.label for row in OPERATIONS if row.point_to_point)

_BY_LABEL = {row.label: row for row in OPERATIONS}
# By place in OPS, as a call holds its operation.
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
        group_size: Ranks in the process group; one rank sends nothing.
        payload_bytes: Needed for gloo's reduce only.
    """
    if group_size < 2:
        return 0.0
    return _BY_LABEL[op].wire_formula(backend, group_size, payload_bytes)
