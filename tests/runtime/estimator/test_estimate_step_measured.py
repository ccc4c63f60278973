"""Estimates against the collectives of real engines: calls, payload and wire bytes per step."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from scripts.estimator.traffic_cases import CASES, MODELS, Case, param_groups
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

from zerowatch.__main__ import main
from zerowatch.runtime.estimator.estimate_step import estimate_step
from zerowatch.runtime.estimator.model_shape import Topology
from zerowatch.runtime.estimator.read_module import forward_order, read_model_shape
from zerowatch.runtime.estimator.step_estimate import StepEstimate

pytestmark = pytest.mark.jobs

RUNS = [(ranks, name) for name, case in CASES.items() for ranks in case.ranks]
BY_COMMAND = [(ranks, name) for ranks, name in RUNS if not CASES[name].groups]

Totals = dict[str, list[float]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[int, dict]:
    return {ranks: measure(ranks, tmp_path_factory.mktemp(f"{ranks}")) for ranks in (2, 4)}


def measure(ranks: int, folder: Path) -> dict:
    script, file = SCRIPTS / "estimator" / "measure_traffic.py", folder / "measured.json"
    finished = start_ranks(ranks, script, file, cwd=folder)
    assert file.exists(), finished.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize(("ranks", "name"), BY_COMMAND)
def test_the_command_predicts_what_is_measured(
    measured, ranks, name, tmp_path, monkeypatch, capsys
):
    case = CASES[name]
    ds_json = tmp_path / "ds.json"
    ds_json.write_text(json.dumps(case.ds_config))
    arguments = [ds_json, "--world", ranks, "--backend", "gloo", "--stage", case.zero["stage"]]
    model = f"scripts.estimator.traffic_cases:{case.model}"
    command = ["zerowatch", "estimate", *arguments, "--model", model, "--json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])

    with pytest.raises(SystemExit):
        main()

    (estimated,) = json.loads(capsys.readouterr().out)["plans"]
    assert estimated["exact"]
    assert measured[ranks][name]["steps"] == [close_to(summed(estimated["collectives"]))] * 2


def summed(collectives: list[dict]) -> Totals:
    calls, payload, wire = Counter(), Counter(), Counter()
    for collective in collectives:
        calls[collective["op"]] += collective["calls"]
        payload[collective["op"]] += collective["payload_bytes"]
        wire[collective["op"]] += collective["wire_bytes"]
    return {op: [calls[op], payload[op], wire[op]] for op in calls}


def close_to(totals: Totals) -> dict:
    """Compare wire bytes, which are no integers, as floats; the rest exactly."""
    return {
        op: [calls, payload, pytest.approx(wire, rel=1e-9)]
        for op, (calls, payload, wire) in totals.items()
    }


@pytest.mark.parametrize(("ranks", "name"), sorted(set(RUNS) - set(BY_COMMAND)))
def test_several_param_groups_are_predicted_as_measured(measured, ranks, name):
    estimated = estimate_of(CASES[name], ranks)

    assert measured[ranks][name]["steps"] == [close_to(totals_of(estimated))] * 2


@pytest.mark.parametrize(("ranks", "name"), [run for run in RUNS if run[1] != "2, run order"])
def test_a_live_engine_is_estimated_as_measured(measured, ranks, name):
    steps = measured[ranks][name]["steps"]

    assert measured[ranks][name]["engine_estimate"] == close_to(steps[-1])


def test_an_engine_without_a_module_trace_assumes_the_order_of_registration(measured):
    untraced, traced = measured[2]["2, run order"], measured[2]["3, run order"]

    assert any("in the order" in assumption for assumption in untraced["engine_assumptions"])
    assert not any("in the order" in assumption for assumption in traced["engine_assumptions"])


@pytest.mark.parametrize(("ranks", "name"), RUNS)
def test_parameters_and_optimizer_use_the_planned_memory(measured, ranks, name):
    case = CASES[name]

    memory = estimate_of(case, ranks).memory

    if "offload_optimizer" not in case.zero:
        estimated = {key: memory.device_bytes[key] for key in ("parameters", "optimizer")}
        assert measured[ranks][name]["held"] == estimated
    else:
        assert memory.host_bytes > measured[ranks][name]["held"]["optimizer"]


def estimate_of(case: Case, ranks: int) -> StepEstimate:
    with torch.device("meta"):
        model = MODELS[case.model]()
    shape = read_model_shape(model, param_groups(model, case.groups), forward_order(model))
    return estimate_step(shape, case.ds_config, Topology(world_size=ranks, backend="gloo"))


def totals_of(estimate: StepEstimate) -> Totals:
    return {op: [t.calls, t.payload_bytes, t.wire_bytes] for op, t in estimate.totals().items()}
