"""Tests of what is read from the arguments of a collective: group, payload, dtype and device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.call_reader import (
    ON_CPU,
    CallReader,
    backend_readers,
    functional_readers,
    payload_bytes,
    payload_dtype,
    torch_readers,
)

GROUP = object()
THREE, FIVE = torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16)
SPARSE = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (7,), check_invariants=True)
PARAMETERS = {
    "all_reduce": ["tensor", "op", "group", "async_op"],
    "all_gather": ["tensor_list", "tensor", "group", "async_op"],
    "gather": ["tensor", "gather_list", "dst", "group"],
    "barrier": ["group", "async_op", "device_ids"],
    "isend": ["tensor", "dst", "group"],
    "send": ["tensor", "dst", "group"],
    "batch_isend_irecv": ["p2p_op_list"],
}


def reader(name: str) -> CallReader:
    return dict(torch_readers(PARAMETERS.get))[name]


def test_functions_that_torch_lacks_or_that_must_not_be_wrapped_have_no_reader() -> None:
    assert set(dict(torch_readers(PARAMETERS.get))) == set(PARAMETERS) - {"isend"}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((THREE, None, GROUP), {}),
        ((THREE,), {"group": GROUP}),
        ((), {"tensor": THREE, "group": GROUP}),
    ],
)
def test_arguments_are_read_by_place_or_by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    read = reader("all_reduce")

    assert read.group(args, kwargs) is GROUP
    assert read.payloads(args, kwargs) == ((OPS.index("all_reduce"), 12, torch.float32),)
    assert read.device_index(args, kwargs) == ON_CPU


def test_the_payload_of_a_list_is_all_its_tensors() -> None:
    read = reader("all_gather")
    args = ([FIVE, FIVE, FIVE], FIVE)

    assert read.payloads(args, {}) == ((OPS.index("all_gather"), 30, torch.bfloat16),)
    assert read.group(args, {}) is None
    assert read.device_index(args, {}) == ON_CPU


def test_a_barrier_has_no_payload_and_the_device_that_it_names() -> None:
    read = reader("barrier")

    assert read.payloads((), {"group": GROUP}) == ((OPS.index("barrier"), 0, None),)
    assert read.device_index((), {}) is None
    assert read.device_index((GROUP, False, [3]), {}) == 3
    assert read.device_index((), {"device_ids": []}) is None
    assert read.group((), {"group": GROUP}) is GROUP


def test_a_batch_of_messages_has_an_operation_for_each() -> None:
    def isend() -> None: ...

    def irecv() -> None: ...

    batch = [
        SimpleNamespace(op=isend, tensor=THREE, group=GROUP),
        SimpleNamespace(op=irecv, tensor=FIVE, group=GROUP),
    ]
    read = reader("batch_isend_irecv")

    for args, kwargs in (((batch,), {}), ((), {"p2p_op_list": batch})):
        assert read.payloads(args, kwargs) == [
            (OPS.index("send"), 12, torch.float32),
            (OPS.index("recv"), 10, torch.bfloat16),
        ]
        assert read.group(args, kwargs) is GROUP
        assert read.device_index(args, kwargs) == ON_CPU


@pytest.mark.parametrize(
    ("name", "times_size", "has_future", "point_to_point"),
    [
        ("all_reduce", False, True, False),
        ("gather", True, True, False),
        ("send", False, True, True),
        ("batch_isend_irecv", False, False, True),
    ],
)
def test_a_reader_has_the_properties_of_its_row(
    name: str, times_size: bool, has_future: bool, point_to_point: bool
) -> None:
    read = reader(name)

    assert read.payload_times_group_size is times_size
    assert (read.has_future, read.point_to_point) == (has_future, point_to_point)


def test_methods_of_deepspeeds_backend_are_read_by_their_own_parameters() -> None:
    readers = dict(backend_readers())

    assert sorted(readers) == [
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "inference_all_reduce",
        "irecv",
        "isend",
        "reduce_scatter_tensor",
    ]
    scatter = readers["reduce_scatter_tensor"]
    args = (THREE, FIVE, None, GROUP)
    assert scatter.group(args, {}) is GROUP
    assert scatter.payloads(args, {}) == ((OPS.index("reduce_scatter"), 10, torch.bfloat16),)


def test_a_functional_collective_is_read_by_its_first_parameter() -> None:
    parameters = {
        "all_gather_tensor": ["self", "gather_dim", "group"],
        "all_reduce": ["self", "reduceOp", "group"],
    }
    readers = dict(functional_readers(parameters.get, lambda given: f"group of {given}"))

    assert sorted(readers) == sorted(parameters)
    gather = readers["all_gather_tensor"]
    assert gather.payloads((THREE, 0, "mesh"), {}) == ((OPS.index("all_gather"), 12, THREE.dtype),)
    assert gather.group((THREE, 0, "mesh"), {}) == "group of mesh"
    assert gather.device_index((THREE,), {}) == ON_CPU
    assert (gather.payload_times_group_size, gather.has_future) == (True, False)
    assert readers["all_reduce"].payload_times_group_size is False


def test_a_version_that_spells_the_payload_otherwise_is_named() -> None:
    parameters = {"broadcast": ["values", "src", "group"]}

    with pytest.raises(ValueError, match=r"none of \('tensor',\) is among \('values', 'src'"):
        list(torch_readers(parameters.get))


@pytest.mark.parametrize(
    ("value", "size", "dtype"),
    [
        (THREE, 12, torch.float32),
        ([[FIVE], (FIVE, THREE)], 32, torch.bfloat16),
        (SPARSE, 28, torch.float32),
        ([], 0, None),
        (None, 0, None),
    ],
)
def test_the_bytes_of_a_payload_are_those_of_its_tensors(
    value: Any, size: int, dtype: torch.dtype | None
) -> None:
    assert (payload_bytes(value), payload_dtype(value)) == (size, dtype)


def test_a_sparse_payload_of_a_call_has_its_dense_bytes() -> None:
    assert reader("all_reduce").payloads((SPARSE,), {}) == ((0, 28, torch.float32),)
