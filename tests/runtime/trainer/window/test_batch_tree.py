"""Tests of batches as trees: samples, rows, and the errors of unusable batches."""

from __future__ import annotations

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from zerowatch.errors import BatchError
from zerowatch.runtime.trainer.window.batch_tree import (
    max_length,
    num_samples,
    on_device,
    slice_batch,
)

Pair = namedtuple("Pair", "left right")


def test_the_number_of_samples_is_that_of_rows_in_all_leaves():
    batch = {"ids": torch.zeros(6, 3), "more": [torch.zeros(6), np.zeros((6, 2))]}

    assert num_samples(batch) == 6


def test_leaves_without_rows_belong_to_the_whole_batch():
    batch = UserDict(ids=torch.arange(4), scale=torch.tensor(2.0), name="train", none=None)

    part = slice_batch(batch, 1, 3)

    assert num_samples(batch) == 4
    assert part["ids"].tolist() == [1, 2]
    assert part["scale"].item() == 2.0
    assert part["name"] == "train"
    assert part["none"] is None


def test_rows_keep_the_tree_and_share_its_memory():
    batch = Pair(torch.arange(4), (torch.arange(8).reshape(4, 2),))

    part = slice_batch(batch, 2, 4)

    assert isinstance(part, Pair)
    assert part.left.tolist() == [2, 3]
    assert part.right[0].tolist() == [[4, 5], [6, 7]]
    assert part.left.data_ptr() == batch.left[2:].data_ptr()


def test_arrays_become_tensors_on_the_device():
    moved = on_device({"ids": np.arange(3), "scale": torch.tensor(1.5)}, torch.device("cpu"))

    assert torch.equal(moved["ids"], torch.arange(3))
    assert moved["scale"].item() == 1.5


def test_the_padded_length_is_the_largest_second_dimension():
    assert max_length({"ids": torch.zeros(2, 7), "pixels": torch.zeros(2, 3, 9)}) == 7
    assert max_length({"labels": torch.zeros(2)}) == 1


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ids": torch.zeros(8, 2), "labels": torch.zeros(7)}, "ids has 8, labels has 7"),
        ([torch.zeros(2), {"x": torch.zeros(3)}], "[0] has 2, [1].x has 3"),
        ({"ids": torch.zeros(0, 5)}, "local batch is empty"),
        ({"text": "words"}, "got dict without any"),
        (None, "got NoneType without any"),
    ],
)
def test_an_unusable_batch_is_rejected_with_the_reason(batch, message):
    with pytest.raises(BatchError) as raised:
        num_samples(batch)

    assert message in str(raised.value)


def test_all_tensors_move_to_the_device_and_other_leaves_stay():
    batch = {"pair": (torch.zeros(2), torch.tensor(2.0)), "raw": b"ab", "names": ["a", "b"]}

    moved = on_device(batch, torch.device("meta"))

    assert [leaf.device.type for leaf in moved["pair"]] == ["meta", "meta"]
    assert (moved["raw"], moved["names"]) == (b"ab", ["a", "b"])


def test_the_error_of_differing_rows_names_a_batch_that_is_one_leaf_in_a_list():
    with pytest.raises(BatchError) as raised:
        num_samples({"a": [torch.zeros(2), (torch.zeros(3),)], 5: torch.zeros(2)})

    assert "but a[0] has 2, a[1][0] has 3, 5 has 2" in str(raised.value)
