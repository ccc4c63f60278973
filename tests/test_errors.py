"""Tests of the texts of errors."""

from __future__ import annotations

import pickle

import pytest

from zerowatch.errors import PeerFailedError, cut, shortened


@pytest.mark.parametrize(
    ("length", "shown"), [(200, "x" * 200), (201, f"{'x' * 200}... (201 characters)")]
)
def test_a_text_of_more_than_200_characters_is_cut(length: int, shown: str) -> None:
    assert cut("x" * length) == shown


def test_a_value_is_shown_as_python_writes_it() -> None:
    assert shortened("a\n") == "'a\\n'"
    assert shortened("x" * 2000) == f"'{'x' * 199}... (2,002 characters)"


def test_a_value_that_is_nested_too_deeply_is_named_by_its_type() -> None:
    class Nested(list[object]):
        def __repr__(self) -> str:
            raise RecursionError

    assert shortened(Nested()) == "a deeply nested Nested"


@pytest.mark.parametrize(
    ("ranks", "text", "can_continue", "message"),
    [
        ((3,), "no such key", True, "train_batch failed on rank 3 with KeyError: no such key. Cor"),
        ((3, 5, 7), "", True, "train_batch failed on rank 3 (and 2 more) with KeyError. Correct"),
        ((3, 5), "x", False, "train_batch failed on rank 3 (and 1 more) with KeyError: x. The oth"),
    ],
)
def test_the_failure_of_another_rank_names_it_the_call_and_the_error(
    ranks: tuple[int, ...], text: str, can_continue: bool, message: str
) -> None:
    error = PeerFailedError(3, "KeyError", text, "train_batch", ranks, can_continue)

    copied = pickle.loads(pickle.dumps(error))

    assert str(error).startswith(message)
    assert str(copied) == str(error)
    assert (error.rank, error.error_type, error.error_text) == (3, "KeyError", text)
    assert (error.place, error.failed_ranks) == ("train_batch", ranks)
    assert error.can_continue is can_continue


def test_a_run_can_continue_unless_stated_otherwise() -> None:
    assert PeerFailedError(0, "KeyError", "", "train_batch", (0,)).can_continue
