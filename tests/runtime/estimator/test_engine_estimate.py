"""Tests of the model shape that `engine_estimate.py` reads from ZeRO-3's trace of an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from zerowatch.runtime.estimator.engine_estimate import engine_shape

ROOT, FIRST, SECOND = "", "0", "1"
BACKWARD = [ROOT, SECOND, FIRST]


def engine_with(visits: list[str]) -> SimpleNamespace:
    """Return an engine whose coordinator has traced these visits, forward and backward."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    modules = dict(module.named_modules())
    coordinator = SimpleNamespace(
        is_complete_trace=lambda: True,
        _PartitionedParameterCoordinator__submodule_order=[modules[name] for name in visits],
    )
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    optimizer = SimpleNamespace(parameter_offload=offload, param_groups=[])
    return SimpleNamespace(module=module, optimizer=optimizer)


@pytest.mark.parametrize(
    ("visits", "recomputes", "runs_again"),
    [
        ([ROOT, FIRST, SECOND, *BACKWARD], False, False),
        # The second is recomputed before its backward.
        ([ROOT, FIRST, SECOND, ROOT, SECOND, SECOND, FIRST], True, False),
        ([ROOT, FIRST, SECOND, SECOND, ROOT, SECOND, SECOND, FIRST], False, True),
        ([ROOT, FIRST, SECOND, SECOND, ROOT, *[SECOND] * 4, FIRST], True, True),
        # Without a backward of the root, what runs again looks like what is recomputed.
        ([ROOT, FIRST, SECOND, SECOND, FIRST], False, False),
        ([ROOT, FIRST, SECOND, SECOND, SECOND, FIRST], True, False),
    ],
)
def test_a_trace_tells_recomputation_from_a_module_that_runs_again(
    visits: list[str], recomputes: bool, runs_again: bool
) -> None:
    shape = engine_shape(engine_with(visits))

    assert shape.recomputes is recomputes
    assert bool(shape.unmodeled_in_stage_3) is runs_again
    assert [child.name for child in shape.root.children] == [FIRST, SECOND]
