"""Reading metrics logs: the order of files, the values of each moment, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerowatch.metrics.exporters.series_table import Family, Series
from zerowatch.metrics.metrics_line import MetricsHead, MetricsLine, encode
from zerowatch.metrics.metrics_log_reader import log_files, read_snapshots

HEAD = MetricsHead(
    run_id="night-7",
    rank=3,
    local_rank=1,
    world_size=8,
    host="host",
    node="node",
    instance=None,
    attempt=0,
    interval_seconds=15.0,
    detail="full",
)
FAMILY = Family(name="f", kind="gauge", help="Help.")
A, B = (Series(family=0, name="f", labels={"part": part}) for part in ("a", "b"))


def line(number, values, *series, session=100.0, head=False):
    return encode(
        MetricsLine(
            session=session,
            number=number,
            unix_seconds=session + 15 * number,
            head=HEAD if head else None,
            families=[FAMILY] if head else [],
            series=series,
            values=values,
            cost_seconds=None,
        )
    )


def read(*paths):
    """Return the time and the values by the label `part` of each snapshot, and the problems."""
    problems: list[str] = []
    found = [
        (each.unix_seconds, {dict(key.labels)["part"]: value for key, value in each.values.items()})
        for each in read_snapshots(list(paths), problems)
    ]
    return found, problems


def written(folder: Path, *lines: bytes, name: str = "metrics-3.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def test_segments_are_in_the_order_of_their_age_by_rank(tmp_path):
    names = ["metrics-2.jsonl", "metrics-10.2.jsonl", "metrics-10.jsonl", "metrics-10.11.jsonl"]
    for name in [*names, "rank-2.jsonl", "metrics-x.jsonl", "metrics-2.jsonl.gz"]:
        (tmp_path / name).touch()

    found = log_files(tmp_path)

    assert list(found) == [2, 10]
    assert [path.name for path in found[10]] == [
        "metrics-10.11.jsonl",
        "metrics-10.2.jsonl",
        "metrics-10.jsonl",
    ]


def test_a_line_changes_some_values_adds_series_and_ends_others(tmp_path):
    path = written(
        tmp_path,
        line(0, {0: 3.0}, A, head=True),
        b"\n",
        line(1, {1: 5.0}, B),
        line(2, {0: None, 1: 7.0}),
    )

    found, problems = read(path)

    assert problems == []
    assert found == [(100, {"a": 3.0}), (115, {"a": 3.0, "b": 5.0}), (130, {"b": 7.0})]


def test_lines_of_two_processes_are_apart(tmp_path):
    path = written(
        tmp_path,
        line(0, {0: 3.0}, A, head=True),
        line(0, {0: 4.0}, B, head=True, session=200.0),
        line(1, {0: 6.0}),
        line(1, {0: 8.0}, session=200.0),
    )

    found, problems = read(path)

    assert problems == []
    assert found[-2:] == [(115, {"a": 6.0}), (215, {"b": 8.0})]


@pytest.mark.parametrize(("number", "missing"), [(1, None), (2, 1), (5, 4)])
def test_missing_numbers_of_lines_are_counted(number, missing, tmp_path):
    path = written(tmp_path, line(0, {0: 3.0}, A, head=True), line(number, {0: 4.0}))

    _, problems = read(path)

    assert problems == (
        []
        if missing is None
        else [
            f"metrics-3: {missing} records are missing: older segments were deleted "
            "(run_log.max_segments), or they could not be written"
        ]
    )


def test_a_later_segment_lists_its_series_anew_and_continues_the_numbers(tmp_path):
    older = written(tmp_path, line(0, {0: 3.0}, A, head=True), name="metrics-3.1.jsonl")
    newer = written(tmp_path, line(1, {0: 4.0}, A, head=True), line(2, {0: 6.0}))

    found, problems = read(older, newer)

    assert found == [(100, {"a": 3.0}), (115, {"a": 4.0}), (130, {"a": 6.0})]
    assert problems == []


def test_lines_before_the_first_list_of_series_are_left_out_and_counted(tmp_path):
    path = written(tmp_path, line(1, {0: 3.0}), line(2, {0: 3.0}), line(3, {0: 9.0}, A, head=True))

    found, problems = read(path)

    assert found == [(145, {"a": 9.0})]
    assert problems[0] == (
        f"{path}: 2 lines are left out, because no line before them lists their series; the file "
        "was truncated or damaged"
    )


@pytest.mark.parametrize("values", [{1: 5.0}, {-1: 5.0}])
def test_a_line_about_an_unknown_series_is_left_out(values, tmp_path):
    path = written(tmp_path, line(0, {0: 3.0}, A, head=True), line(1, values), line(2, {0: 4.0}))

    found, problems = read(path)

    assert [moment for moment, _ in found] == [100, 130]
    assert problems[0] == (
        f"{path}:2: it refers to a series that no line before it has listed; the line is left out"
    )


@pytest.mark.parametrize(("damaged", "more"), [(5, None), (6, 1), (8, 3)])
def test_five_damaged_lines_are_listed_and_the_others_counted(damaged, more, tmp_path):
    path = written(tmp_path, line(0, {0: 3.0}, A, head=True), *[b"{\n"] * damaged)

    _, problems = read(path)

    assert problems == [
        *(
            f"{path}:{number}: not a whole line of JSON; the line is left out"
            for number in range(2, 7)
        ),
        *([] if more is None else [f"{path}: {more} more lines are damaged"]),
    ]


def test_a_half_written_last_line_is_that_of_an_active_or_killed_run(tmp_path):
    path = written(tmp_path, line(0, {0: 3.0}, A, head=True), line(1, {0: 4.0})[:-3])

    found, problems = read(path)

    assert len(found) == 1
    assert problems == [
        f"{path}:2: the last line is only half written; the run was killed, or is active"
    ]


def test_an_empty_and_an_absent_segment_are_named(tmp_path):
    empty = written(tmp_path)
    absent = tmp_path / "metrics-3.1.jsonl"

    assert read(absent, empty) == (
        [],
        [f"{absent}: cannot be read: No such file or directory", f"{empty}: is empty"],
    )
