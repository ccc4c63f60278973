"""Tests of atomic writes: permissions, leftovers, and files that others put in the way."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from zerowatch.metrics import atomic_file
from zerowatch.metrics.atomic_file import atomic_write, mend_last_line, open_to_append


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "settings.json"

    atomic_write(path, "old", mode=0o600)
    atomic_write(path, "new", mode=0o600, durable=True)

    assert [each.name for each in path.parent.iterdir()] == ["settings.json"]
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_at_a_name_that_can_be_predicted_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / f".settings.json.{os.getpid()}").symlink_to(precious)

    atomic_write(tmp_path / "settings.json", "new")

    assert precious.read_text() == "keep"
    assert not (tmp_path / "settings.json").is_symlink()


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda _: "0")
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / ".settings.json.0").symlink_to(precious)

    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "settings.json", "new")

    assert precious.read_text() == "keep"
    assert (tmp_path / ".settings.json.0").is_symlink()


def test_bytes_of_a_path_that_are_no_utf_8_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "paths"

    atomic_write(path, os.fsdecode(b"/data/\xff"))

    assert path.read_bytes() == b"/data/\xff"


@pytest.mark.parametrize(("options", "flushes"), [({}, 0), ({"durable": True}, 2)])
def test_a_durable_file_and_its_folder_are_flushed_and_others_are_not(
    options: dict[str, bool], flushes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(atomic_file.os, "fsync", flushed.append)

    atomic_write(tmp_path / "settings.json", "new", **options)

    assert len(flushed) == flushes


@pytest.mark.parametrize("num_bytes", [1, 14, 65535, 65536, 200_000])
@pytest.mark.parametrize("before", [b"", b'{"step":1}\n'], ids=["first line", "second line"])
def test_each_line_can_be_parsed_after_a_partial_one(
    tmp_path: Path, num_bytes: int, before: bytes
) -> None:
    path, partial = tmp_path / "log.jsonl", b'{"step":2,"text":"' + b"x" * 200_000
    path.write_bytes(before + partial[:num_bytes])

    descriptor = open_to_append(path)
    for _ in range(2):
        mend_last_line(descriptor)
    other = open_to_append(path)  # such as of the process that goes on
    mend_last_line(other)
    os.write(other, b'{"step":2}\n')
    os.write(descriptor, b'{"step":3}\n')

    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2, 3][not before :]


@pytest.mark.parametrize("content", [b"", b'{"step":1}\n', b'{"step":1}'])
def test_a_line_that_lacks_its_end_only_is_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)

    descriptor = open_to_append(path)
    mend_last_line(descriptor)
    os.write(descriptor, b'{"step":2}\n')

    lines = path.read_bytes().splitlines()
    assert lines == [*([b'{"step":1}'] if content else []), b'{"step":2}']
