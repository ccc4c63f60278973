"""Tests of tracing: whether torch traces code, as `is_compiling` says, and what it leaves out."""

from __future__ import annotations

import pytest
import torch

from zerowatch.runtime.common.tracing import flags, is_traced, run_untraced


def traces() -> bool:
    return bool(is_traced() or flags._is_compiling_flag)


def test_code_that_is_run_is_not_traced() -> None:
    assert not traces()
    assert not torch.compiler.is_compiling()


def test_code_in_torch_compile_is_traced() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def doubled_if_traced(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if is_traced() or flags._is_compiling_flag else x

    assert doubled_if_traced(torch.ones(1)) == 2


def test_code_in_torch_export_is_traced() -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert traces() == torch.compiler.is_compiling()
            return 2 * x if traces() else x

    exported = torch.export.export(Asks(), (torch.ones(1),), strict=False)

    assert exported.module()(torch.ones(1)) == 2


def test_the_flag_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)

    assert traces()


def test_a_wrapper_that_breaks_the_graph_is_run_untraced() -> None:
    found: list[bool] = []

    @run_untraced
    def wrapper() -> None:
        if is_traced():
            torch._dynamo.graph_break()
        found.append(is_traced())

    @torch.compile(backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        wrapper()
        return 2 * x

    assert doubled(torch.ones(1)) == 2
    assert found == [False]


def test_a_wrapper_that_is_run_untraced_is_inlined_in_a_whole_graph() -> None:
    @run_untraced
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if is_traced() else x

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return wrapper(x)

    assert doubled(torch.ones(1)) == 2
