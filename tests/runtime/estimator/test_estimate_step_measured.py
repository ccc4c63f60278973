"""Tests of estimated calls, payload and wire bytes against the collectives of real engines."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from chosen_cases import chosen, tiers
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
WITHOUT_TRACE, WITH_TRACE = "2, run order", "3, run order"
QUICK = [
    (2, "0"),
    (2, "1, bf16 over fp32"),
    (2, "2, reduce per owner"),
    (2, "2, on cpu"),
    (2, "2, two groups"),
    (2, WITHOUT_TRACE),
    (2, "3, tied"),
    (2, "3, frozen"),
    (2, WITH_TRACE),
    (2, "3, all on cpu"),
]

Runs = list[tuple[int, str]]
Totals = dict[str, list[float]]


def each_of(runs: Runs) -> pytest.MarkDecorator:
    quick = [run for run in QUICK if run in runs]
    return pytest.mark.parametrize(("ranks", "name"), tiers(runs, quick))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, request) -> dict[int, dict]:
    runs = {*chosen(request, "ranks", "name"), (2, WITHOUT_TRACE), (2, WITH_TRACE)}
    names = {ranks: [name for num, name in sorted(runs) if num == ranks] for ranks in (2, 4)}
    return {
        ranks: measure(ranks, tmp_path_factory.mktemp(f"{ranks}"), cases)
        for ranks, cases in names.items()
        if cases
    }


def measure(ranks: int, folder: Path, names: list[str]) -> dict:
    script, file = SCRIPTS / "estimator" / "measure_traffic.py", folder / "measured.json"
    finished = start_ranks(ranks, script, file, *names, cwd=folder)
    assert file.exists(), finished.stderr[-3000:]
    return json.loads(file.read_text())


@each_of(BY_COMMAND)
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

    (estimated,) = json.loads(capsys.readouterr().out)["estimates"]
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


@each_of(sorted(set(RUNS) - set(BY_COMMAND)))
def test_several_param_groups_are_predicted_as_measured(measured, ranks, name):
    estimated = estimate_of(CASES[name], ranks)

    assert measured[ranks][name]["steps"] == [close_to(totals_of(estimated))] * 2


@each_of([run for run in RUNS if run[1] != WITHOUT_TRACE])
def test_a_live_engine_is_estimated_as_measured(measured, ranks, name):
    steps = measured[ranks][name]["steps"]

    assert measured[ranks][name]["engine_estimate"] == close_to(steps[-1])


def test_an_engine_without_a_module_trace_assumes_the_order_of_registration(measured):
    untraced, traced = measured[2][WITHOUT_TRACE], measured[2][WITH_TRACE]

    assert any("in the order" in assumption for assumption in untraced["engine_assumptions"])
    assert not any("in the order" in assumption for assumption in traced["engine_assumptions"])


@each_of(RUNS)
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
