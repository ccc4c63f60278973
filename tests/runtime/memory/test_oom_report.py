"""What a report of an out-of-memory error says, and that it can be written while memory is out."""

from __future__ import annotations

import logging
import re
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.ooms import CATEGORIES, GIB, MIB, ON_CPU, ON_CUDA, evidence, sources

from zerowatch.runtime.memory.allocator_snapshot import dump_snapshot
from zerowatch.runtime.memory.oom.collect_evidence import collect_evidence
from zerowatch.runtime.memory.oom.evidence import Limit
from zerowatch.runtime.memory.oom.parse_error import out_of_memory
from zerowatch.runtime.memory.oom.post_mortem import RESERVE_BYTES, PostMortem
from zerowatch.runtime.memory.oom.report import headline, report_text, write_report

ON_GPU = {
    "allocated": 70.0 * GIB,
    "reserved": 75.0 * GIB,
    "peak_allocated": 74.0 * GIB,
    "peak_reserved": 75.0 * GIB,
    "limit": 78.0 * GIB,
    "alloc_retries": 3.0,
}


def said(text: str) -> Any:
    return out_of_memory(RuntimeError(text))


HEADLINES = {
    "on the host": (
        {},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB asked for, "
        "124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
    "free again as it passed": (
        {"readings": {"allocated": 200.0 * MIB}},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB asked for, "
        "824 MiB free once the error had passed of 1.00 GiB (RLIMIT_AS)",
    ),
    "with no limit known": (
        {"limit": None},
        "out of memory on cpu in forward of step 61, micro-batch 2: 512 MiB asked for",
    ),
    "without a figure": (
        {"out_of_memory": out_of_memory(MemoryError()), "phase": "data", "micro_batch": None},
        "out of memory on cpu in data of step 61: how much was asked for is not known, "
        "124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
    "on a GPU, by its own words": (
        {
            "out_of_memory": said(ON_CUDA),
            "device": "cuda:1",
            "readings": ON_GPU,
            "limit": Limit(num_bytes=75.23 * GIB, name="set_per_process_memory_fraction"),
            "phase": "backward",
        },
        "out of memory on cuda:1 in backward of step 61, micro-batch 2: 2.00 GiB asked for, "
        "80.5 MiB free of 75.2 GiB (set_per_process_memory_fraction)",
    ),
    "in a worker": (
        {
            "out_of_memory": said(
                f"Caught RuntimeError in DataLoader worker process 3.\nTraceback\n{ON_CPU}"
            ),
            "phase": "data",
        },
        "out of memory on cpu in data of step 61, micro-batch 2 (in DataLoader worker process 3): "
        "512 MiB asked for, 124 MiB free of 1.00 GiB (RLIMIT_AS)",
    ),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_the_headline_says_what_ran_out_where_and_how_much_was_free(case: str) -> None:
    changes, expected = HEADLINES[case]

    assert headline(evidence(**changes)) == expected


def test_a_report_lists_the_request_sizes_categories_batch_limit_and_run() -> None:
    lines = report_text(evidence()).splitlines()

    assert lines[0] == headline(evidence())
    assert "rank 0 on node-0, 2001-09-09 01:46:40 UTC" in lines
    assert "last step that ended: 60; phase: forward" in lines
    assert "micro-batch under way 2 of 2: 8 x 2048" in lines
    assert any(line.startswith("run: ZeRO stage 1; 4 rank(s); bf16;") for line in lines)
    assert lines.index(f"  {ON_CPU}") == 1 + lines.index(
        "The failing request: 536870912 bytes, refused by torch's allocator of host memory:"
    )
    assert "  in use as the error passed: 812 MiB (851443712 bytes)" in lines
    assert "  most in use since the last reading: 900 MiB (943718400 bytes)" in lines
    assert "  limit: 1.00 GiB (1073741824 bytes), set by RLIMIT_AS" in lines
    told = {line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in CATEGORIES}
    assert told == CATEGORIES.keys()
    assert "  activations    47 %  400 MiB (419430400 bytes)" in lines


def test_a_report_lists_the_last_20_peaks_with_what_was_thought_before_each() -> None:
    lines = report_text(evidence()).splitlines()

    start = next(n for n, line in enumerate(lines) if line.startswith("Last peaks"))
    table = [line.split() for line in lines[start + 2 : start + 22]]
    assert [int(row[0]) for row in table] == list(range(41, 61))
    assert " ".join(table[-1]) == "60 860 MiB 84 % 850 MiB 12 % 8 x 512"
    assert lines[start + 22] == ""


FORESEEN = {
    "by the steps before": (
        {"alarm_step": 38},
        "Foreseen: yes, the risk passed 50 % after step 38, 22 steps before this end",
    ),
    "by the batch alone": (
        {"batch_risk_ratio": 0.97},
        "Foreseen: yes, by this micro-batch's own risk as it began",
    ),
    "not at all": (
        {"batch_risk_ratio": 0.2},
        "Foreseen: no, the risk was not over 50 % before",
    ),
}


@pytest.mark.parametrize("case", FORESEEN)
def test_a_report_says_whether_the_end_was_foreseen(case: str) -> None:
    changes, expected = FORESEEN[case]

    assert expected in report_text(evidence(**changes)).splitlines()


def test_on_a_gpu_fragmentation_and_retries_are_told() -> None:
    facts = evidence(out_of_memory=said(ON_CUDA), device="cuda:1", readings=ON_GPU)

    lines = report_text(facts).splitlines()

    held = "held, but in pieces not of use to this request (fragmentation)"
    assert f"  {held}: 944 MiB (989373399 bytes)" in lines
    assert "  times that all cached memory was freed to try again: 3" in lines


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "a leak": ({"growth_bytes_per_step": 5e6}, "1. Find the leak of 4.77 MiB a step first"),
    "a worker": (
        {
            "out_of_memory": said(
                f"Caught RuntimeError in DataLoader worker process 3.\nTraceback\n{ON_CPU}"
            )
        },
        "1. A data loader's worker ran out",
    ),
    "others on the device": (
        {
            "out_of_memory": said(
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
        "1. It ended in the first step: compare with `zerowatch estimate`",
    ),
    "nothing known": (
        {"limit": None},
        "1. Use a smaller micro-batch with more accumulation, or more sharding or offload.",
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_report_ends_with_what_to_do_next(case: str) -> None:
    changes, expected = ADVICE[case]

    advice = report_text(evidence(**changes)).partition("What to do next:\n")[2]

    assert advice.strip().startswith(expected)


def test_what_would_have_fitted_is_worked_out_from_the_sources() -> None:
    facts = collect_evidence(0, "node-0", evidence().out_of_memory, sources(None))

    text = report_text(facts)

    assert "  fits                723 MiB  a quarter the micro-batch, 2 of 8 samples" in text
    assert "  fits barely         997 MiB  half the micro-batch, 4 of 8 samples" in text
    assert re.search(r"  does not fit +1\.4\d GiB  ZeRO stage 2", text)
    assert "1. Try a quarter the micro-batch, 2 of 8 samples, and 8 micro-batches a step" in text


def test_a_report_can_be_made_where_no_source_knows_anything() -> None:
    nothing = sources(
        None,
        **{
            name: lambda *_: None
            for name in (
                "step",
                "phase",
                "readings",
                "micro_batch",
                "shape",
                "categories",
                "peaks",
                "foresights",
                "limit",
                "facts",
                "predicted",
                "planned",
            )
        },
    )

    text = report_text(collect_evidence(0, "node-0", evidence().out_of_memory, nothing))

    assert text.startswith("out of memory on cpu in other of step 1: 512 MiB asked for\n")
    assert "By category: not known" in text
    assert "Last peaks: none was read yet." in text
    assert "What would have fitted: cannot be told" in text


def test_a_device_that_the_error_does_not_name_is_this_rank_s() -> None:
    failed = said("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
    gpu = sources(None, readings=lambda: {"cpu": {}, "cuda:2": ON_GPU}, limit=lambda device: None)

    facts = collect_evidence(0, "node-0", failed, gpu)
    counted = PostMortem(0, gpu).on_error(RuntimeError(failed.message))

    assert counted is not None
    assert counted.device == "cuda:2"
    assert facts.device == "cuda:2"
    assert facts.limit == Limit(num_bytes=78.0 * GIB, name="the device, less what others use")


def test_a_written_report_and_its_snapshot_are_for_their_owner_only(tmp_path: Path) -> None:
    def snapshot(path: Path) -> bool:
        path.touch(0o600)
        return True

    path = write_report(tmp_path / "runs" / "one", evidence(), snapshot)

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


def test_a_snapshot_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    assert dump_snapshot("cpu", tmp_path / "one.pickle") is False
    assert dump_snapshot("cuda:0", tmp_path / "missing" / "one.pickle") is False
    assert list(tmp_path.iterdir()) == []


def raise_through(levels: list[Callable[[BaseException], object]], text: str) -> BaseException:
    """Raise an error and let each level see it on its way up, as nested hooks do."""

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


def test_an_error_is_reported_once_on_its_way_up_and_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = PostMortem(0, sources(tmp_path))
    results: list[object] = []

    def see(error: BaseException) -> None:
        results.append(watch.on_error(error))

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
    watch = PostMortem(0, sources(tmp_path))
    error = raise_through([watch.on_error], ON_CPU)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next

    assert watch.on_error(error, is_end=True) is None
    assert watch.on_error(MemoryError(), is_end=True) is not None


def test_an_error_that_answers_a_known_one_is_not_reported_again(tmp_path: Path) -> None:
    watch = PostMortem(0, sources(tmp_path))

    try:
        try:
            raise RuntimeError(ON_CPU)
        except RuntimeError as error:
            first = watch.on_error(error)
            raise ValueError("the layer failed") from error
    except ValueError as error:
        second = watch.on_error(error)

    assert first is not None
    assert second is None


def test_each_of_several_errors_is_reported(tmp_path: Path) -> None:
    watch = PostMortem(0, sources(tmp_path))
    results = []

    for _ in range(3):  # each is gone before the next, and may have lain at the same address
        raise_through([lambda error: results.append(watch.on_error(error))], ON_CPU)

    assert [each is not None for each in results] == [True, True, True]


def test_other_errors_pass_without_a_word(tmp_path: Path) -> None:
    watch = PostMortem(0, sources(tmp_path))

    assert watch.on_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("makes_no_folder", [True, False])
def test_without_a_folder_to_write_to_the_line_is_logged_all_the_same(
    makes_no_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    watch = PostMortem(0, sources(None if makes_no_folder else tmp_path / "file"))

    assert watch.on_error(RuntimeError(ON_CPU)) is not None

    (line,) = caplog.messages
    assert "512 MiB asked for" in line
    assert "no report, as " in line


def no_memory_left(*_: object) -> None:
    raise MemoryError


def test_what_takes_too_much_memory_to_find_out_is_left_out(tmp_path: Path) -> None:
    watch = PostMortem(0, sources(tmp_path, planned=no_memory_left))

    assert watch.on_error(RuntimeError(ON_CPU)) is not None

    text = (tmp_path / "oom" / "rank-0-1.txt").read_text()
    assert text.startswith("out of memory on cpu in forward of step 61: 512 MiB asked for\n")
    assert ON_CPU in text


def test_where_not_even_a_page_can_be_made_the_line_is_logged_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = PostMortem(0, sources(tmp_path, step=no_memory_left))

    assert watch.on_error(RuntimeError(ON_CPU)) is not None

    (line,) = caplog.messages
    assert line.startswith("out of memory: [enforce fail at alloc_cpu.cpp:127]")


def test_the_reserve_is_several_times_what_a_report_takes(tmp_path: Path) -> None:
    def report() -> None:
        write_report(
            tmp_path, collect_evidence(0, "node-0", evidence().out_of_memory, sources(None))
        )

    report()  # what is made once is made

    tracemalloc.start()
    try:
        report()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert taken < RESERVE_BYTES / 8
