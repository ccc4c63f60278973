"""Tests of the sizes that are read from a batch: samples, tokens, sequence length."""

from __future__ import annotations

import torch

from zerowatch.runtime.instrumentation.batch_shape import UNKNOWN, batch_shape


def test_token_ids_give_samples_tokens_and_length() -> None:
    batch = {"input_ids": torch.zeros(3, 7, dtype=torch.long), "labels": torch.zeros(3, 7)}

    shape = batch_shape((), batch)

    assert (shape.samples, shape.tokens, shape.sequence_length) == (3, 21, 7)


def test_token_ids_are_distinguished_from_a_mask_by_name() -> None:
    batch = {"attention_mask": torch.zeros(2, 9, dtype=torch.long), "input_ids": torch.zeros(2, 5)}

    assert batch_shape((batch,), {}).tokens == 10


def test_unnamed_integers_of_two_dimensions_are_tokens() -> None:
    assert batch_shape((torch.zeros(4, 6, dtype=torch.int32),), {}).tokens == 24


def test_features_and_class_labels_are_samples_without_tokens() -> None:
    shape = batch_shape((torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)), {})

    assert (shape.samples, shape.tokens) == (5, None)


def test_tensors_in_a_list_are_found() -> None:
    assert batch_shape(([torch.zeros(6, 2), "name"],), {}).samples == 6


def test_a_batch_without_tensors_is_unknown() -> None:
    assert batch_shape(("text", 3), {"scale": torch.tensor(1.0)}) == UNKNOWN
