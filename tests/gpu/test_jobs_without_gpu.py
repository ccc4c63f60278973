"""Jobs of the GPU checks that also run on a CPU: there they show that the checks themselves work.

Names that only a GPU would run are at least imported.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.rank_jobs import JOBS, rank_variables, run_job
from scripts.engine.live_settings_cases import CASES
from scripts.launching import SCRIPTS

HERE = Path(__file__).parent


@pytest.mark.slow
def test_an_engine_is_rebuilt_through_all_stages_with_its_state(tmp_path: Path) -> None:
    (found,) = run_job("rebuild_chain_job.py", tmp_path, "AdamW", kind="cpu")

    assert [each["kept"] for each in found["rebuilds"]] == [True] * 5
    assert [each["stage"] for each in found["rebuilds"]] == [1, 2, 3, 2, 0]
    assert found["difference"] < 1e-5
    assert found["optimizer"] == "AdamW"


@pytest.mark.slow
def test_synchronizations_are_counted_in_plain_and_in_monitored_steps(tmp_path: Path) -> None:
    (found,) = run_job("synchronizations_job.py", tmp_path, kind="cpu")

    assert set(found["stages"]) == {"stage 1", "stage 3"}
    assert found["training run"] == {"warned": 0, "own": []}


@pytest.mark.slow
def test_blocks_with_and_without_monitoring_are_timed(tmp_path: Path) -> None:
    (found,) = run_job("cost_job.py", tmp_path, "tiny", "2", kind="cpu")

    assert (len(found["plain"]), len(found["monitored"])) == (3, 2)
    assert all({"threads ms/s", "hooks ms/s"} <= each.keys() for each in found["monitored"])
    assert min(found["hooks"]["memory: MemoryHooks.on_step_end"]) > 0
    assert set(found["exact"]) == {"0", "1"}
    assert found["failures"] == {}


@pytest.mark.slow
def test_calls_are_timed_on_the_thread_that_issues_them(tmp_path: Path) -> None:
    (found,) = run_job("hot_path_job.py", tmp_path, kind="cpu")

    assert found["failures"] == {}
    assert all(each["plain"] > 0 for each in found["microseconds"].values())


@pytest.mark.slow
def test_what_the_script_logs_while_contexts_are_looked_for_is_written(tmp_path: Path) -> None:
    (found,) = run_job("contexts_job.py", tmp_path, kind="cpu")

    assert found["logged"] == 60
    assert found["during"] == found["pids on GPU 0"] == []
    assert found["failures"] == {}


@pytest.mark.slow
def test_steps_between_captures_train_although_what_is_captured_has_no_gradient(
    tmp_path: Path,
) -> None:
    (found,) = run_job("graphs_job.py", tmp_path, "captured", kind="cpu")

    assert found["captured"] == {"equal": True, "captures": 20, "failures": {}}


@pytest.mark.slow
def test_live_settings_leave_training_on_one_rank_the_same(tmp_path: Path) -> None:
    script, cases = str(SCRIPTS / "engine" / "live_settings_job.py"), CASES[::5]

    (found,) = run_job(script, tmp_path, *(case.name for case in cases), kind="cpu")

    for case in cases:
        assert found[case.name]["holds_after_apply"], case.name
        assert found[case.name]["holds_after_undo"], case.name
        assert found[case.name]["bitwise"], case.name


@pytest.mark.slow
def test_memory_savings_leave_training_on_one_rank_the_same(tmp_path: Path) -> None:
    script, names = str(SCRIPTS / "engine" / "memory_savings_job.py"), ("0", "2", "3")

    (found,) = run_job(
        script, tmp_path, *(f"checkpointing, stage {stage}" for stage in names), kind="cpu"
    )

    for name, each in found.items():
        assert each["bitwise"], name
        applied, undone = (slice(*each["spans"][span]) for span in ("applied", "undone"))
        assert max(each["saved"][applied]) < min(each["saved"][undone]), name


@pytest.mark.slow
def test_calls_on_one_rank_equal_the_flight_recorders(tmp_path: Path) -> None:
    script = str(SCRIPTS / "monitor" / "compare_monitored.py")
    names = ("stage 1", "stage 3, optimizer on cpu")

    (found,) = run_job(
        script, tmp_path, *names, kind="cpu", variables={"TORCH_FR_BUFFER_SIZE": "100000"}
    )

    for name in names:
        assert found[name]["bitwise_equal"], name
        assert found[name]["our_calls"] == found[name]["flight_calls"], name
        assert found[name]["our_bytes"] == found[name]["flight_bytes"], name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hybrid", "plain"])
def test_generation_on_one_rank_is_unchanged_and_counted(engine: str, tmp_path: Path) -> None:
    script = str(SCRIPTS / "monitor" / "generate_job.py")

    (found,) = run_job(
        script, tmp_path, engine, "2", "3", kind="cpu", variables={"TORCH_FR_BUFFER_SIZE": "100000"}
    )

    for stage in ("stage 2", "stage 3"):
        assert ("Hybrid" in found[stage]["engine"]) == (engine == "hybrid")
        assert found[stage]["weights_are_equal"], stage
        generated = [record["generation"] for record in found[stage]["records"]]
        assert [e["tokens"] for e in generated] == [e["tokens"] for e in found[stage]["rounds"]]
        assert sum(each["gathers"] for each in generated) == found[stage]["gathers"], stage


@pytest.mark.slow
@pytest.mark.jobs
def test_training_with_compressed_gradients_stays_close(tmp_path: Path) -> None:
    ranks = run_job("compression_job.py", tmp_path, "gloo", kind="cpu", world_size=2)

    for found in ranks[0]["training"].values():
        assert found["fp32"]["difference"] < 1e-5
        assert found["int8"]["difference"] < 3e-2
        assert all(each["same on all ranks"] for each in found.values())


@pytest.mark.slow
def test_each_job_can_be_imported() -> None:
    names = ", ".join(f"gpu.jobs.{file.stem}" for file in sorted(JOBS.glob("*.py")))

    done = subprocess.run(
        [sys.executable, "-c", f"import {names}"],
        capture_output=True,
        text=True,
        env=rank_variables("cpu"),
    )

    assert done.returncode == 0, done.stderr


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from zerowatch, also in strings of code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerowatch"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and "import " in str(node.value):
            try:
                yield from imports(str(node.value))
            except SyntaxError:
                continue


FILES = sorted([*HERE.glob("*.py"), *JOBS.glob("*.py")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_name_that_a_check_imports_exists(file: Path) -> None:
    missing = [
        f"{module}.{name}"
        for module, name in imports(file.read_text())
        if not hasattr(importlib.import_module(module), name)
    ]

    assert missing == []
