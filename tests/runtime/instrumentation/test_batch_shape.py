"""Tests of the sizes that are read from a batch: samples, tokens, sequence length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerowatch.runtime.instrumentation.batch_shape import UNKNOWN, BatchShape, batch_shape


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


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_samples_of_different_lengths_have_tokens_and_no_length(layout: torch.layout) -> None:
    lines = [integers(2), integers(3), integers(7)]
    tokens = torch.nested.nested_tensor(lines, layout=layout)
    vectors = torch.nested.nested_tensor([torch.ones(2, 5), torch.ones(3, 5)], layout=layout)

    assert batch_shape((tokens,), {}) == BatchShape(3, 12, 12, None)
    assert batch_shape((), {"x": vectors}) == BatchShape(2, 25, None, None)
    assert batch_shape((), {"inputs_embeds": vectors}) == BatchShape(2, 25, None, None)


def test_a_batch_without_tensors_is_unknown() -> None:
    assert batch_shape(("text", 3), {"scale": torch.tensor(1.0)}) == UNKNOWN


def integers(*size: int) -> torch.Tensor:
    return torch.zeros(*size, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        # The first tensor has the samples; tokens are read from the first of whole numbers.
        ([torch.zeros(5, 3), integers(4, 7)], (4, 15, 28, 7)),
        ([integers(3, 7), integers(2, 9)], (3, 21, 21, 7)),
        ([integers(3, 7, 2), torch.ones(3, 5, dtype=torch.bool)], (3, 42, None, None)),
        ([torch.tensor(1), torch.zeros(5)], (5, 5, None, None)),
        # A name overrides any guess, also within a mapping, and ends the search.
        (
            {"labels": integers(4, 9), "input_ids": integers(2, 5), "x": integers(7, 7)},
            (2, 36, 10, 5),
        ),
        ({"inner": {"tokens": torch.zeros(3, 5)}}, (3, 15, 15, 5)),
        ({"x": integers(2, 3), "input_ids": integers(7)}, (2, 6, 6, 3)),
        # Masks and labels come last.
        ({"attention_mask": integers(2, 9), "x": integers(3, 5)}, (3, 18, 15, 5)),
        ({"attention_mask": integers(2, 9), "labels": integers(3, 5)}, (2, 18, 18, 9)),
        ({"inputs_embeds": torch.zeros(2, 9, 4), "labels": integers(2, 9)}, (2, 72, 18, 9)),
        # Vectors of tokens come before all but a name of tokens.
        (
            {
                "attention_mask": integers(2, 8),
                "image_grid_thw": integers(1, 3),
                "inputs_embeds": torch.zeros(2, 8, 4),
                "labels": integers(2, 8),
            },
            (2, 16, 16, 8),
        ),
        (
            {
                "inputs_embeds": torch.zeros(2, 8, 4),
                "attention_mask": integers(2, 8),
                "task_id": integers(2, 1),
            },
            (2, 64, 16, 8),
        ),
        (
            {"inputs_embeds": torch.zeros(2, 8, 4), "decoder_input_ids": integers(2, 5)},
            (2, 64, 10, 5),
        ),
        ({"inputs_embeds": torch.zeros(2, 9), "labels": integers(2, 9)}, (2, 18, 18, 9)),
        # Masks and labels of floats are no features.
        (
            {
                "inputs_embeds": torch.zeros(2, 8, 4),
                "attention_mask": torch.zeros(2, 1, 8, 8),
                "labels": integers(2, 8),
            },
            (2, 64, 16, 8),
        ),
        (
            {
                "inputs_embeds": torch.zeros(2, 8, 4),
                "attention_mask": torch.zeros(2, 8),
                "labels": integers(2, 8),
            },
            (2, 64, 16, 8),
        ),
        ({"labels": integers(2, 8), "loss_mask": torch.zeros(2, 8)}, (2, 16, 16, 8)),
        (
            {
                "labels": integers(2, 8),
                "masked_input_ids": integers(2, 8),
                "loss_mask": torch.zeros(2, 8),
            },
            (2, 16, 16, 8),
        ),
        ({"pixel_values": torch.zeros(2, 90), "masked_input_ids": integers(2, 8)}, (2, 180, 16, 8)),
        # Beside features, such as sound, they are no tokens.
        (
            {"input_values": torch.zeros(2, 90), "attention_mask": integers(2, 90)},
            (2, 180, None, None),
        ),
        ({"labels": integers(2, 5), "input_features": torch.zeros(2, 8, 30)}, (2, 10, None, None)),
        (
            {"x": torch.zeros(2, 90), "label_ids": integers(2, 5), "input_ids": integers(2, 7)},
            (2, 180, 14, 7),
        ),
        # The tensors of a list of tensors are not samples.
        ([torch.zeros(4, 9, 2), torch.zeros(4, 3, 2)], (4, 72, None, None)),
    ],
)
def test_the_size_of_a_batch_is_read_from_these_tensors(
    batch: Any, expected: tuple[int | None, ...]
) -> None:
    assert batch_shape((batch,), {}) == BatchShape(*expected)


def test_a_mask_by_name_beside_features_is_no_tokens() -> None:
    shape = batch_shape((torch.zeros(2, 90),), {"attention_mask": integers(2, 90)})

    assert (shape.samples, shape.tokens, shape.sequence_length) == (2, None, None)


@pytest.mark.parametrize("kind", [list, tuple])
def test_each_image_of_a_detector_is_a_sample(kind: type) -> None:
    images = [torch.zeros(3, 8 + number, 10) for number in range(4)]
    targets = [{"boxes": torch.zeros(2, 4), "labels": integers(2)} for _ in images]

    assert batch_shape((kind(images), kind(targets)), {}) == BatchShape(4, 3 * 38 * 10, None, None)
    assert batch_shape((images, targets[:3]), {}).samples == 3  # of another kind


def test_later_arguments_are_not_searched_once_the_tokens_are_known() -> None:
    shape = batch_shape((integers(2, 3), {"input_ids": integers(5, 7)}), {})

    assert shape == BatchShape(samples=2, elements=6, tokens=6, sequence_length=3)


def test_arguments_by_name_come_first() -> None:
    shape = batch_shape((integers(5, 7),), {"input_ids": integers(2, 3)})

    assert shape == BatchShape(samples=2, elements=6, tokens=6, sequence_length=3)
