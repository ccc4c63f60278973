"""Tests of out-of-memory reports, also when they are written while no memory is left.

Covers `report_files.py`.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import stat
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.ooms import (
    CATEGORIES,
    GIB,
    MIB,
    ON_CPU,
    ON_CUDA,
    FakeOomContext,
    evidence,
    parse_oom_error,
    point,
)

from zerowatch.runtime.common.hot_path import HookedCall, HookState
from zerowatch.runtime.devices.cuda_allocator import dump_snapshot
from zerowatch.runtime.memory.forecast.peak_readings import PeakPrediction, Shape
from zerowatch.runtime.memory.oom.error_report import (
    RESERVE_BYTES,
    OomReporter,
    advice,
    headline,
    report_text,
    write_report,
)
from zerowatch.runtime.memory.oom.evidence import Limit, OomContext, collect_evidence
from zerowatch.runtime.memory.oom.predicted_savings import Fits, PredictedSaving
from zerowatch.runtime.memory.oom.predicted_savings import Kind as SavingKind

ON_GPU = {
    "allocated": 70.0 * GIB,
    "reserved": 75.0 * GIB,
    "peak_allocated": 74.0 * GIB,
    "peak_reserved": 75.0 * GIB,
    "limit": 78.0 * GIB,
    "alloc_retries": 3.0,
}


def parsed(text: str) -> Any:
    return parse_oom_error(RuntimeError(text))


HEADLINES = {
    "on the host": (
        {},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB requested, "
        "124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
    "freed as the error passed": (
        {"readings": {"allocated": 200.0 * MIB}},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB requested, "
        "824 MiB free after the error of 1.00 GiB (RLIMIT_AS)",
    ),
    "with no limit known": (
        {"limit": None},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB requested",
    ),
    "without a figure": (
        {"error": parse_oom_error(MemoryError()), "phase": "data", "micro_batch": None},
        "out of memory on cpu in data of step 61: request size unknown, "
        "124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
    "on a GPU, by sizes in the text": (
        {
            "error": parsed(ON_CUDA),
            "device": "cuda:1",
            "readings": ON_GPU,
            "limit": Limit(num_bytes=75.23 * GIB, name="set_per_process_memory_fraction"),
            "phase": "backward",
        },
        "out of memory on cuda:1 in backward of step 61, micro-batch 2: 2.00 GiB requested, "
        "80.5 MiB free of 75.2 GiB (set_per_process_memory_fraction)",
    ),
    "in a worker": (
        {
            "error": parsed(
                f"Caught RuntimeError in DataLoader worker process 3.\nTraceback\n{ON_CPU}"
            ),
            "phase": "data",
        },
        "out of memory on cpu in data of step 61, micro-batch 2 (in DataLoader worker process 3): "
        "512 MiB requested, 124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_the_headline_has_device_phase_step_request_free_bytes_and_limit(case: str) -> None:
    changes, expected = HEADLINES[case]

    assert headline(evidence(**changes)) == expected


def test_a_report_lists_the_request_sizes_categories_batch_limit_and_run() -> None:
    lines = report_text(evidence()).splitlines()

    assert lines[0] == headline(evidence())
    assert "rank 0 on node-0, 2001-09-09 01:46:40 UTC" in lines
    assert "last completed step: 60; phase: forward" in lines
    assert "current micro-batch 2 of 2: 8 x 2048" in lines
    assert any(line.startswith("run: ZeRO stage 1; 4 rank(s); bf16;") for line in lines)
    assert lines.index(f"  {ON_CPU}") == 1 + lines.index(
        "The failing request: 536870912 bytes, refused by torch's allocator of host memory:"
    )
    assert "  in use as the error passed: 812 MiB (851443712 bytes)" in lines
    assert "  peak since the last reading: 900 MiB (943718400 bytes)" in lines
    assert "  limit: 1.00 GiB (1073741824 bytes), set by RLIMIT_AS" in lines
    words = {line.split()[0] for line in lines if line.split()}
    assert words >= CATEGORIES.keys()
    assert "  activations    47 %  400 MiB (419430400 bytes)" in lines


def test_a_report_lists_the_last_20_peaks_with_their_predictions() -> None:
    lines = report_text(evidence()).splitlines()

    start = next(n for n, line in enumerate(lines) if line.startswith("Last peaks"))
    table = [line.split() for line in lines[start + 2 : start + 22]]
    assert [int(row[0]) for row in table] == list(range(41, 61))
    assert " ".join(table[-1]) == "60 860 MiB 84 % 850 MiB 12 % 8 x 512"
    assert lines[start + 22] == ""


PREDICTED = {
    "by the steps before": (
        {"alarm_step": 38},
        "Predicted: yes, the risk exceeded 50 % after step 38, 22 steps before",
    ),
    "by the batch alone": (
        {"batch_risk_ratio": 0.97},
        "Predicted: yes, by the risk of this micro-batch as it began",
    ),
    "not at all": (
        {"batch_risk_ratio": 0.2},
        "Predicted: no, the risk did not exceed 50 %",
    ),
}


@pytest.mark.parametrize("case", PREDICTED)
def test_a_report_states_whether_the_error_was_predicted(case: str) -> None:
    changes, expected = PREDICTED[case]

    assert expected in report_text(evidence(**changes)).splitlines()


def test_on_a_gpu_fragmentation_and_retries_are_reported() -> None:
    facts = evidence(error=parsed(ON_CUDA), device="cuda:1", readings=ON_GPU)

    lines = report_text(facts).splitlines()

    assert any(line.endswith("(fragmentation): 944 MiB (989373399 bytes)") for line in lines)
    assert any("retries" in line and line.endswith(": 3") for line in lines)


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "a leak": ({"growth_bytes_per_step": 5e6}, "1. Find the leak of 4.77 MiB per step first"),
    "a worker": (
        {
            "error": parsed(
                f"Caught RuntimeError in DataLoader worker process 3.\nTraceback\n{ON_CPU}"
            )
        },
        "1. A data loader worker ran out",
    ),
    "others on the device": (
        {
            "error": parsed(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "80.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process "
                "has 30.00 GiB memory in use."
            ),
            "device": "cuda:0",
        },
        "1. Other processes hold 49.0 GiB of this device",
    ),
    "the first step": (
        {"step": 0},
        "1. It failed in the first step: compare with `zerowatch estimate`",
    ),
    "nothing known": (
        {"limit": None},
        "1. Use a smaller micro-batch with more accumulation, or more sharding or offload.",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_report_ends_with_what_to_do_next(case: str) -> None:
    changes, expected = ADVICE[case]

    text = report_text(evidence(**changes)).partition("What to do next:\n")[2]

    assert text.strip().startswith(expected)


def test_memory_savings_are_predicted_from_the_context() -> None:
    facts = collect_evidence(0, "node-0", evidence().error, FakeOomContext(None))

    text = report_text(facts)

    assert "  fits                723 MiB  a quarter the micro-batch, 2 of 8 samples" in text
    assert "  fits barely         997 MiB  half the micro-batch, 4 of 8 samples" in text
    assert re.search(r"  does not fit +1\.4\d GiB  ZeRO stage 2", text)
    assert "1. Try a quarter the micro-batch, 2 of 8 samples, and 8 micro-batches a step" in text


def test_a_report_can_be_written_without_any_known_fact() -> None:
    text = report_text(collect_evidence(0, "node-0", evidence().error, OomContext()))

    assert text.startswith("out of memory on cpu in other of step 1: 512 MiB requested\n")
    assert "By category: unknown" in text
    assert "Last peaks: none was read yet." in text
    assert "What would have fitted: unknown" in text


def test_a_device_without_an_index_is_that_of_this_rank() -> None:
    failed = parsed("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    gpu = FakeOomContext(
        None, readings=lambda: {"cpu": {}, "cuda:2": ON_GPU}, limit=lambda device: None
    )

    facts = collect_evidence(0, "node-0", failed, gpu)
    counted = OomReporter(0, gpu).on_error(RuntimeError(failed.message))

    assert counted is not None
    assert counted.device == "cuda:2"
    assert facts.device == "cuda:2"
    assert facts.limit == Limit(num_bytes=78.0 * GIB, name="the device, minus other processes")


@pytest.mark.parametrize("own", ["cpu", "cuda:2"])
def test_of_an_error_that_names_no_device_the_device_is_unknown(own: str) -> None:
    readings = {"cpu": ON_GPU, own: ON_GPU}
    rank = FakeOomContext(None, readings=lambda: readings, limit=lambda device: None)

    counted = OomReporter(0, rank).on_error(RuntimeError("out of memory"))
    text = report_text(collect_evidence(0, "node-0", parsed("out of memory"), rank))

    assert counted is not None
    assert counted.device == "unknown"
    assert text.startswith("out of memory on an unknown device in ")
    assert text.partition("\n")[0].endswith(": request size unknown")
    assert "refused by something that the error does not name:\n  out of memory\n" in text
    assert f"Memory of {own}, on which this rank trains:\n  in use as the error passed: " in text
    assert "raise the limit" not in text


def test_a_report_and_its_snapshot_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    def dump_snapshot(device: str, path: Path) -> bool:
        path.touch(0o600)
        return True

    context = FakeOomContext(None, dump_snapshot=dump_snapshot)
    path = write_report(tmp_path / "runs" / "one", evidence(), context)

    assert path == tmp_path / "runs" / "one" / "oom" / "rank-0-1.txt"
    text = path.read_text()
    assert text.startswith(report_text(evidence()))
    assert text.endswith("drop rank-0-1.pickle on https://pytorch.org/memory_viz\n")
    assert [stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()] == [0o600] * 2


def test_a_run_keeps_at_most_five_reports_of_a_rank(tmp_path: Path) -> None:
    written = [write_report(tmp_path, evidence()) for _ in range(6)]

    names = [f"rank-0-{number}.txt" for number in range(1, 6)]
    assert [path and path.name for path in written] == [*names, None]
    assert sorted(file.name for file in (tmp_path / "oom").iterdir()) == names


def test_a_failed_snapshot_leaves_no_file(tmp_path: Path) -> None:
    assert dump_snapshot("cpu", tmp_path / "one.pickle") is False
    assert dump_snapshot("cuda:0", tmp_path / "missing" / "one.pickle") is False
    assert list(tmp_path.iterdir()) == []


def raise_through(levels: list[Callable[[BaseException], object]], text: str) -> BaseException:
    """Raise an error and pass it to each level on its way up, as nested hooks do."""

    def level(rest: list[Callable[[BaseException], object]]) -> None:
        if not rest:
            raise RuntimeError(text)
        try:
            level(rest[1:])
        except RuntimeError as error:
            rest[0](error)
            raise

    with pytest.raises(RuntimeError) as raised:
        level(levels)
    return raised.value


@pytest.mark.parametrize("is_raised_in_c", [True, False])
def test_an_error_that_passes_nested_hooks_and_ends_the_run_is_reported_once(
    is_raised_in_c: bool, tmp_path: Path
) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))
    results: list[object] = []
    state = HookState()
    state.is_open = True

    def raise_it() -> None:
        raise RuntimeError(ON_CPU)

    def between_hooks(original: Callable[..., Any]) -> Callable[[], Any]:
        def nothing(*args: Any) -> None:
            """Do nothing."""

        def see(error: BaseException) -> None:
            results.append(reporter.on_error(error))

        call = HookedCall(state, original, nothing, nothing, see, False)
        return lambda: call((), {})

    set_error = ctypes.pythonapi.PyErr_SetString  # an error without a frame of Python
    arguments = ctypes.py_object(RuntimeError), ON_CPU.encode()
    inner = between_hooks(partial(set_error, *arguments) if is_raised_in_c else raise_it)
    with pytest.raises(RuntimeError) as raised:
        between_hooks(inner)()
    results.append(reporter.on_error(raised.value, is_end=True))

    assert [each is not None for each in results] == [True, False, False]


def test_an_error_is_reported_once_on_its_way_up_and_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))
    results: list[object] = []

    def see(error: BaseException) -> None:
        results.append(reporter.on_error(error))

    with caplog.at_level(logging.ERROR):
        error = raise_through([see, see, see], ON_CPU)

    assert [each is not None for each in results] == [True, False, False]
    assert sorted(file.name for file in (tmp_path / "oom").iterdir()) == ["rank-0-1.txt"]
    assert str(error) == ON_CPU
    assert error.__cause__ is error.__context__ is None
    assert not hasattr(error, "__notes__")
    (line,) = caplog.messages
    assert line.startswith("out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB")
    assert line.endswith(f"(report: {tmp_path / 'oom' / 'rank-0-1.txt'})")


def test_the_error_that_ends_the_run_is_known_with_a_shortened_traceback(tmp_path: Path) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))
    error = raise_through([reporter.on_error], ON_CPU)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next

    assert reporter.on_error(error, is_end=True) is None
    assert reporter.on_error(MemoryError(), is_end=True) is not None


def test_an_error_caused_by_a_reported_one_is_not_reported_again(tmp_path: Path) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))

    try:
        try:
            raise RuntimeError(ON_CPU)
        except RuntimeError as error:
            first = reporter.on_error(error)
            raise ValueError("the layer failed") from error
    except ValueError as error:
        second = reporter.on_error(error)

    assert first is not None
    assert second is None


def test_each_of_several_errors_is_reported(tmp_path: Path) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))
    results = []

    for _ in range(3):  # each is gone before the next, and may have lain at the same address
        raise_through([lambda error: results.append(reporter.on_error(error))], ON_CPU)

    assert [each is not None for each in results] == [True, True, True]


def test_other_errors_are_not_reported(tmp_path: Path) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path))

    assert reporter.on_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("makes_no_folder", [True, False])
def test_without_a_writable_folder_the_headline_is_logged(
    makes_no_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    reporter = OomReporter(0, FakeOomContext(None if makes_no_folder else tmp_path / "file"))

    assert reporter.on_error(RuntimeError(ON_CPU)) is not None

    (line,) = caplog.messages
    assert "512 MiB requested" in line
    assert "no report: " in line


def no_memory_left(*_: object) -> None:
    raise MemoryError


def test_facts_that_need_too_much_memory_are_left_out(tmp_path: Path) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path, estimated_layouts=no_memory_left))

    assert reporter.on_error(RuntimeError(ON_CPU)) is not None

    text = (tmp_path / "oom" / "rank-0-1.txt").read_text()
    assert text.startswith("out of memory on cpu in forward of step 61: 512 MiB requested\n")
    assert ON_CPU in text


def test_with_too_little_memory_for_a_report_the_error_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = OomReporter(0, FakeOomContext(tmp_path, step=no_memory_left))

    assert reporter.on_error(RuntimeError(ON_CPU)) is not None

    (line,) = caplog.messages
    assert line.startswith("out of memory: [enforce fail at alloc_cpu.cpp:127]")


def test_the_reserve_is_several_times_the_size_of_a_report(tmp_path: Path) -> None:
    def report() -> None:
        write_report(
            tmp_path, collect_evidence(0, "node-0", evidence().error, FakeOomContext(None))
        )

    report()  # what is made once is made

    tracemalloc.start()
    try:
        report()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert taken < RESERVE_BYTES / 8


def test_an_error_in_generation_names_no_micro_batch_and_says_what_to_reduce() -> None:
    context = FakeOomContext(None, phase=lambda: "generate", batch_risk=lambda device: 0.9)

    found = collect_evidence(0, "node-0", parsed(ON_CPU), context)

    assert headline(found).startswith("out of memory on cpu in generate of step 61:")
    text = report_text(found)
    assert "current micro-batch" not in text
    assert "1. Memory ran out in generation: generate for fewer prompts at once" in text
    assert "The batch had a predicted risk" not in text


def saving(description: str, need_mib: float, fits: Fits, kind: SavingKind) -> PredictedSaving:
    return PredictedSaving(description=description, need_bytes=need_mib * MIB, fits=fits, kind=kind)


WHOLE_REPORT = f"""\
out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB requested, \
124 MiB free of 1.00 GiB (RLIMIT_AS)

rank 0 on node-0, 2001-09-09 01:46:40 UTC
last completed step: 60; phase: forward
current micro-batch 2 of 2: 8 x 2048
run: ZeRO stage 1; 4 rank(s); bf16; optimizer offload none, parameter offload none; \
2 micro-batch(es) of 8 samples a step; activation checkpointing off

The failing request: 536870912 bytes, refused by torch's allocator of host memory:
  {ON_CPU}

Memory of cpu:
  in use as the error passed: 812 MiB (851443712 bytes)
  peak since the last reading: 900 MiB (943718400 bytes)
  virtual size: 4.00 GiB (4294967296 bytes)
  limit: 1.00 GiB (1073741824 bytes), set by RLIMIT_AS
  growth not explained by batch sizes (a leak): 4.77 MiB per step

By category, at the peak of the last detailed sample (850 MiB):
  activations    47 %  400 MiB (419430400 bytes)
  optimizer      24 %  200 MiB (209715200 bytes)
  parameters     12 %  100 MiB (104857600 bytes)
  gradients      12 %  100 MiB (104857600 bytes)
  comm_buffers    5 %  40 MiB (41943040 bytes)
  other           1 %  10 MiB (10485760 bytes)

Predicted: yes, the risk exceeded 50 % after step 38, 22 steps before
  risk of this micro-batch as it began: 62 %

Last peaks, each since the previous reading, with the prediction made before it \
(risk: of the next 50 steps):
     step       peak  of limit  predicted    risk  micro-batches
       59    859 MiB      84 %          -       -  8 x 512
       60    860 MiB         -          -    12 %  8 x 512, 4 x 256, 2 x 64 and 1 more

What would have fitted, each on its own, cheapest first:
  fits                700 MiB  a
  fits barely   about 800 MiB  b
  may fit          >= 900 MiB  c
  may fit             unknown  d
  does not fit       1.17 GiB  e
  each only for some steps, as the leak continues

What to do next:
  1. Find the leak of 4.77 MiB per step first: all else only delays the error. Losses, outputs \
or batches kept in a list hold whole graphs; keep loss.item(). memory.trace_leaks=true traces \
where the memory is allocated.
  2. Try a.
  3. Or raise the limit, if the machine has more: it is set by RLIMIT_AS.
"""


def test_the_whole_text_of_a_report_with_every_section() -> None:
    shapes = (Shape(1, 10), Shape(8, 512), Shape(2, 64), Shape(4, 256))
    facts = evidence(
        peaks=[point(59, 859.0 * MIB), point(60, 860.0 * MIB, limit_bytes=math.inf, shapes=shapes)],
        predictions={60: PeakPrediction(step=60, predicted_bytes=None, risk_ratio=0.12)},
        alarm_step=38,
        batch_risk_ratio=0.625,
        growth_bytes_per_step=5e6,
        predicted_savings=[
            saving("a", 700, "yes", "forecast"),
            saving("b", 800, "barely", "guess"),
            saving("c", 900, "perhaps", "bound"),
            saving("d", 0, "perhaps", "unknown"),
            saving("e", 1200, "no", "forecast"),
        ],
    )

    assert report_text(facts) == WHOLE_REPORT


def section(text: str, first: str) -> list[str]:
    """Return the lines below a line, up to the next empty line."""
    lines = text.splitlines()
    start = lines.index(first) + 1
    return lines[start : lines.index("", start)]


def test_the_memory_of_a_gpu_has_the_allocator_s_figures() -> None:
    readings = {**ON_GPU, "unusable": 2.0 * GIB}
    facts = evidence(device="cuda:1", readings=readings, limit=None, growth_bytes_per_step=None)

    assert section(report_text(facts), "Memory of cuda:1:") == [
        "  in use as the error passed: 70.0 GiB (75161927680 bytes)",
        "  peak since the last reading: 74.0 GiB (79456894976 bytes)",
        "  reserved for this process: 75.0 GiB (80530636800 bytes)",
        "  peak reserved since the last reading: 75.0 GiB (80530636800 bytes)",
        "  limit: unknown",
        "  reserved in blocks too small for this request (fragmentation): "
        "2.00 GiB (2147483648 bytes)",
        "  allocator retries after freeing its cache: 3",
    ]


ONLY_BOUND = saving("c", 900, "perhaps", "bound")
UNKNOWN = saving("d", 0, "perhaps", "unknown")
BARELY = saving("b", 800, "barely", "forecast")
GUESS = saving("g", 700, "perhaps", "guess")
TOO_MUCH = saving("e", 1200, "no", "forecast")


@pytest.mark.parametrize(
    ("savings", "expected"),
    [
        ([BARELY, saving("a", 950, "yes", "forecast"), GUESS], "Try a."),
        ([ONLY_BOUND, BARELY, GUESS], "Try g."),
        ([TOO_MUCH, UNKNOWN, ONLY_BOUND], "Try d."),
        ([saving("e", 10, "no", "guess"), BARELY], "Try b."),
    ],
)
def test_the_advice_is_the_cheapest_certain_saving_or_the_most_likely_one(
    savings: list[PredictedSaving], expected: str
) -> None:
    assert advice(evidence(predicted_savings=savings, limit=None)) == [expected]


@pytest.mark.parametrize(
    ("savings", "last_line"),
    [
        (None, "What would have fitted: unknown, as the limit or the memory in use is unknown."),
        ([], "  no estimate: batch shape, memory categories and plan are unknown"),
        ([TOO_MUCH], "  nothing here fits; combine several, or use more ranks"),
        ([TOO_MUCH, UNKNOWN], "  may fit             unknown  d"),
    ],
)
def test_what_would_have_fitted_says_if_nothing_does(
    savings: list[PredictedSaving] | None, last_line: str
) -> None:
    text = report_text(evidence(predicted_savings=savings))

    assert f"{last_line}\n\nWhat to do next:\n" in text


@pytest.mark.parametrize(
    ("free_gib", "in_use", "others"),
    [(1, "30.00", "49.0 GiB"), (10, "61.90", "8.10 GiB"), (10, "62.00", None)],
)
def test_other_processes_are_named_if_they_hold_more_than_a_tenth_of_the_device(
    free_gib: int, in_use: str, others: str | None
) -> None:
    error = parsed(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB "
        f"of which {free_gib}.00 GiB is free. Including non-PyTorch memory, this process has "
        f"{in_use} GiB memory in use."
    )

    lines = [line for line in advice(evidence(error=error)) if line.startswith("Other processes")]

    said = f"Other processes hold {others} of this device: see nvidia-smi, and end or move them."
    assert lines == ([] if others is None else [said])


@pytest.mark.parametrize(
    ("device", "requested_gib", "is_expandable", "is_advised"),
    [
        ("cuda:0", "2.00", False, True),
        ("cuda:0", "2.00", True, False),
        ("cuda:0", "2.01", False, False),
        ("cpu", "2.00", False, False),
    ],
)
def test_fragmentation_is_named_if_the_request_would_have_fitted_without_it(
    device: str, requested_gib: str, is_expandable: bool, is_advised: bool
) -> None:
    facts = evidence(
        error=parsed(f"CUDA out of memory. Tried to allocate {requested_gib} GiB."),
        device=device,
        readings={"unusable": 2.0 * GIB},
        limit=None,
        has_expandable_segments=is_expandable,
    )

    assert any("2.00 GiB were reserved and unusable" in line for line in advice(facts)) == (
        is_advised
    )


GRAPHS = (
    "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory in "
    "use. Of the allocated memory 74.00 GiB is allocated by PyTorch, with 36.00 GiB allocated in "
    "private pools (e.g., CUDA Graphs), and 1.50 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "is_advised"),
    [
        (GRAPHS.format("2.00"), True),
        (GRAPHS.format("36.01"), False),
        ("CUDA error: out of memory. Tried to allocate 2.00 GiB.", True),
    ],
)
def test_memory_that_only_captured_graphs_can_use_is_not_fragmentation(
    text: str, is_advised: bool
) -> None:
    facts = evidence(
        error=parsed(text),
        device="cuda:0",
        readings={"unusable": 37.5 * GIB, "inactive_split": 1.5 * GIB},
        limit=None,
    )

    report = report_text(facts)
    assert f"too small for this request (fragmentation): 1.50 GiB ({1.5 * GIB:.0f} bytes)" in report
    assert f"such as those of captured graphs: 36.0 GiB ({36 * GIB:.0f} bytes)" in report
    assert any("36.0 GiB are free in private pools" in line for line in advice(facts)) == (
        is_advised
    )
    assert not any("expandable_segments" in line for line in advice(facts))


@pytest.mark.parametrize(
    ("risk", "alarm_step", "is_named"), [(0.5, None, False), (0.75, None, True), (0.75, 38, False)]
)
def test_a_batch_that_was_predicted_by_itself_is_named(
    risk: float, alarm_step: int | None, is_named: bool
) -> None:
    facts = evidence(batch_risk_ratio=risk, alarm_step=alarm_step)

    lines = [line for line in advice(facts) if "drop or split batches" in line]

    assert [line[:43] for line in lines] == is_named * [
        "The batch had a predicted risk of 75 %: dro"
    ]
    assert ("Predicted: yes" in report_text(facts)) == (is_named or alarm_step is not None)


def test_after_five_reports_errors_are_still_counted_with_their_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = FakeOomContext(tmp_path, readings=lambda: {"cpu": {}, "cuda:2": ON_GPU})
    reporter = OomReporter(0, context)

    devices = []
    for _ in range(7):
        found = reporter.on_error(RuntimeError("CUDA out of memory."))
        devices.append(found and found.device)

    assert devices == ["cuda:2"] * 7
    assert len(caplog.records) == 5
