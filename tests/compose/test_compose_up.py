"""Starts the whole stack in real containers."""

from __future__ import annotations

import pytest
from compose import compose_up
from compose.engine import why_no_engine

pytestmark = [pytest.mark.compose, pytest.mark.slow]


def test_the_stack_finds_the_demo_and_distinguishes_a_crash_from_an_end() -> None:
    reason = why_no_engine()
    if reason:
        pytest.skip(reason)

    compose_up.main()
