"""Tests of stacks that show no progress: real ones, and those of torch's compiler."""

from __future__ import annotations

import code
import pdb
import selectors
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.hangs import run_as
from fakes.scraper import eventually

from zerowatch.runtime.cross_rank.hang import thread_stacks
from zerowatch.runtime.cross_rank.hang.thread_stacks import (
    COMPILERS,
    python_location,
    runs_python,
    silent_activity,
    silent_activity_in,
)


def activity_here(thread: int = 1) -> str | None:
    return silent_activity_in({1: sys._getframe()}, thread)


STACKS = [
    ("/x/torch/_dynamo/convert_frame.py", "_compile", "compilation"),
    ("/x/torch/_inductor/compile_fx.py", "compile_fx_inner", "compilation"),
    ("/x/torch/utils/cpp_extension.py", "load", "compilation"),
    ("/x/triton/compiler/compiler.py", "compile", "compilation"),
    (threading.__file__, "_shutdown", None),  # not the outermost here
    # These stay on the stack while what was compiled, or kept from it, runs.
    ("/x/torch/_inductor/compile_fx.py", "run", None),
    ("/x/torch/_dynamo/eval_frame.py", "_fn", None),
    ("/x/my/code.py", "train", None),
]


@pytest.mark.parametrize(("file", "function", "expected"), STACKS)
def test_only_a_stack_inside_a_compiler_is_compilation(
    file: str, function: str, expected: str | None
) -> None:
    assert run_as(file, function, activity_here) == expected


def test_a_debugger_and_a_thread_without_a_stack_are_a_prompt() -> None:
    assert run_as(pdb.__file__, "interaction", activity_here) == "a prompt"
    assert activity_here(thread=2) == "a prompt"


def frame_of(file: str, function: str) -> Any:
    """Return a frame with nothing below it, as the outermost of a thread."""
    names: dict[str, Any] = {}
    exec(compile(f"def {function}():\n    yield\n", file, "exec"), names)
    return names[function]().gi_frame


def test_joining_threads_at_the_end_of_a_script_is_recognized() -> None:
    late, other = (frame_of(threading.__file__, name) for name in ("_shutdown", "run"))

    assert silent_activity_in({1: late}, 1) == "the script's end"
    assert silent_activity_in({1: other}, 1) is None


def test_a_backward_pass_compiled_on_another_thread_is_compilation() -> None:
    training = frame_of("/x/train.py", "main")
    compiler = frame_of("/x/torch/_inductor/compile_fx.py", "bw_compiler")

    assert silent_activity_in({1: training, 2: compiler}, 1) == "compilation"


def test_torch_is_recognized_while_it_compiles_and_not_while_compiled_code_runs() -> None:
    said = {}

    def backend(graph: Any, inputs: Any) -> Any:
        said["compiles"] = silent_activity(threading.get_ident())
        return graph.forward

    @torch.compiler.disable
    def kept_out(tensor: torch.Tensor) -> torch.Tensor:
        said["runs"] = silent_activity(threading.get_ident())
        return tensor

    @torch.compile(backend=backend)
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        return kept_out(tensor + 1) * 2

    compiled(torch.ones(2))

    assert said == {"compiles": "compilation", "runs": None}


def test_torch_still_compiles_in_the_listed_files() -> None:
    packages = Path(torch.__file__).parent.parent

    gone = [file for file in COMPILERS if "torch/" in file and not (packages / file).exists()]

    assert gone == []


def test_the_location_is_the_innermost_function_outside_of_the_package() -> None:
    here = python_location(threading.get_ident())  # asked from inside stacks.py

    assert here.startswith("test_the_location_is_the_innermost_function_outside_of_the_package (")
    assert python_location(0) == "no Python function"


def test_python_s_own_console_is_a_prompt() -> None:
    assert run_as(code.__file__, "interact", activity_here) == "a prompt"


def test_a_notebook_s_kernel_is_a_prompt_only_while_it_waits_for_a_cell() -> None:
    kernel = "/x/site-packages/ipykernel/kernelapp.py"

    def waits() -> str | None:
        return run_as(selectors.__file__, "select", activity_of_caller)

    assert run_as(kernel, "start", waits) == "a prompt"
    assert run_as(kernel, "start", activity_here) is None
    assert waits() is None


def activity_of_caller() -> str | None:
    """Return the activity of a stack whose innermost frame is the caller's."""
    return silent_activity_in({1: sys._getframe(1)}, 1)


def test_a_thread_runs_python_unless_it_waits_in_a_call() -> None:
    is_ended = threading.Event()

    def run() -> None:
        while not is_ended.is_set():
            pass

    threads = [threading.Thread(target=target) for target in (run, is_ended.wait)]
    for thread in threads:
        thread.start()
    running, waiting = (thread.ident or 0 for thread in threads)
    try:
        found = eventually(lambda: runs_python(running)), runs_python(waiting)
    finally:
        is_ended.set()
        for thread in threads:
            thread.join()

    assert found == (True, False)
    assert runs_python(threading.get_ident())
    assert runs_python(running)  # it has ended, so it is in no call


def test_a_thread_that_calls_one_function_from_several_places_runs_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in layers of one class: a new frame may have the address of the one before it."""
    outer = SimpleNamespace(f_lasti=0, f_back=None)
    layer = SimpleNamespace(f_lasti=8, f_back=outer)

    def frames() -> dict[int, Any]:
        outer.f_lasti += 2
        return {1: layer}

    monkeypatch.setattr(sys, "_current_frames", frames)

    assert runs_python(1)


def test_the_demo_counts_as_a_training_script_and_the_rest_of_the_package_does_not() -> None:
    runtime = Path(thread_stacks.__file__).parent.parent.parent
    locate = partial(python_location, threading.get_ident())

    in_demo = run_as(str(runtime / "cli/demo/train.py"), "train", locate)
    in_wrapper = run_as(str(runtime / "cli/main.py"), "main", locate)

    assert in_demo == "train (train.py:2)"
    assert str(in_wrapper).startswith("run_as (hangs.py:")
