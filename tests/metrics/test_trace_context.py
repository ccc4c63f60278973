"""The trace of the user's own code, from opentelemetry if that is imported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from zerowatch.metrics.exporters.trace_context import current_trace_labels


def imported(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)


def spans(*, is_valid=True, sampled=True):
    flags = SimpleNamespace(sampled=sampled)
    context = SimpleNamespace(is_valid=is_valid, trace_flags=flags, trace_id=0xBEEF)
    span = SimpleNamespace(get_span_context=lambda: context)
    return SimpleNamespace(get_current_span=lambda: span)


def test_a_sampled_span_gives_its_trace_id_in_32_hexadecimal_digits(monkeypatch):
    imported(monkeypatch, spans())

    assert current_trace_labels() == {"trace_id": "0" * 28 + "beef"}


@pytest.mark.parametrize("span", [{"is_valid": False}, {"sampled": False}])
def test_a_span_that_cannot_be_looked_up_gives_no_labels(span, monkeypatch):
    imported(monkeypatch, spans(**span))

    assert current_trace_labels() is None


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["absent", "half imported"])
def test_without_opentelemetry_there_are_no_labels(module, monkeypatch):
    imported(monkeypatch, module)

    assert current_trace_labels() is None
