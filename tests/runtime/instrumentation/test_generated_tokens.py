"""Tests of `generated_tokens`: new tokens are counted up to each sequence's end, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.runtime.instrumentation.generated_tokens import (
    GenerationCounts,
    count_result,
    generate_options,
)

END, PAD = 9, 0
PROMPT = torch.tensor([[PAD, 5], [END, 6], [7, 8]])
# After the prompt: ended after 2 tokens, after 1 token, and not at all.
RESULT = torch.tensor([[PAD, 5, 1, END, PAD], [END, 6, END, PAD, PAD], [7, 8, 1, 1, 1]])


def module(**defaults: Any) -> SimpleNamespace:
    """A decoder whose generation configuration ends sequences at END."""
    return SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        generation_config=SimpleNamespace(**{"eos_token_id": END, **defaults}),
    )


def counted(of: Any, result: Any, *args: Any, **kwargs: Any) -> tuple[int | None, Any]:
    return count_result(result, generate_options(of, args, kwargs))


def test_new_tokens_end_with_the_first_end_token_of_each_sequence() -> None:
    assert counted(module(), RESULT, PROMPT) == (3, 2 + 1 + 3)


@pytest.mark.parametrize("name", ["inputs", "input_ids"])
def test_a_prompt_may_be_passed_by_name(name: str) -> None:
    assert counted(module(), RESULT, **{name: PROMPT}) == (3, 6)


def test_padding_with_the_end_token_is_not_counted() -> None:
    result = torch.tensor([[5, 1, END, END, END]])

    assert counted(module(), result, torch.tensor([[5]])) == (1, 2)


def test_sequences_are_read_from_an_output_with_scores() -> None:
    output = SimpleNamespace(sequences=RESULT, scores=())

    assert counted(module(), output, PROMPT) == (3, 6)


def test_each_of_several_end_tokens_ends_a_sequence() -> None:
    assert counted(module(eos_token_id=[8, END]), RESULT, PROMPT) == (3, 6)
    assert counted(module(eos_token_id=torch.tensor([1, END])), RESULT, PROMPT) == (3, 1 + 1 + 1)


def test_the_call_decides_before_its_configuration_and_the_configuration_before_the_module() -> (
    None
):
    ends_at_one = SimpleNamespace(eos_token_id=1)

    assert counted(module(), RESULT, PROMPT, ends_at_one) == (3, 1 + 3 + 1)
    assert counted(module(), RESULT, PROMPT, generation_config=ends_at_one) == (3, 1 + 3 + 1)
    assert counted(module(), RESULT, PROMPT, ends_at_one, eos_token_id=END) == (3, 6)


def test_without_an_end_token_all_new_tokens_count() -> None:
    assert counted(module(eos_token_id=None), RESULT, PROMPT) == (3, 9)
    assert counted(module(), RESULT, PROMPT, eos_token_id=None) == (3, 9)


def test_a_prompt_of_embeddings_is_not_part_of_the_result() -> None:
    result = torch.tensor([[1, 2, END]])

    assert counted(module(), result, inputs_embeds=torch.zeros(1, 4, 8)) == (1, 3)


@pytest.mark.parametrize(
    ("of", "kwargs"),
    [
        (SimpleNamespace(), {}),
        (SimpleNamespace(generation_config=None), {}),
        (
            SimpleNamespace(
                generation_config=SimpleNamespace(eos_token_id=END),
                config=SimpleNamespace(is_encoder_decoder=True),
            ),
            {},
        ),
        (module(), {"stop_strings": ["."]}),
        (module(stop_strings=["."]), {}),
        (module(), {"stopping_criteria": [lambda ids, scores: False]}),
    ],
)
def test_tokens_that_cannot_be_counted_exactly_are_unknown(of: Any, kwargs: Any) -> None:
    assert counted(of, RESULT, PROMPT, **kwargs) == (None, None)


def test_a_result_that_is_no_table_of_tokens_is_unknown() -> None:
    assert counted(module(), "some text", PROMPT) == (None, None)
    assert counted(module(), RESULT[0], PROMPT) == (None, None)
    assert counted(module(), RESULT) == (None, None)  # no prompt: the result begins with one


def test_counting_reads_no_value_of_a_device() -> None:
    # A tensor on the device "meta" has no values: reading one raises.
    on_device = RESULT.to("meta")

    assert counted(module(eos_token_id=[8, END]), on_device, PROMPT.to("meta"))[0] == 3
    with pytest.raises(RuntimeError):
        on_device.sum().item()


def test_end_tokens_on_a_device_are_not_read() -> None:
    ends = torch.tensor([END]).to("meta")

    assert counted(module(), RESULT, PROMPT, eos_token_id=ends) == (None, None)


def test_counts_of_several_calls_add_up_unless_one_is_unknown() -> None:
    counts = GenerationCounts()

    counts.add(3, 6.0)
    counts.add(1, 2.0)
    assert (counts.calls, counts.sequences, counts.total_tokens()) == (2, 4, 8)

    counts.add(None, None)
    counts.add(1, 2.0)
    assert (counts.calls, counts.sequences, counts.total_tokens()) == (4, None, None)
