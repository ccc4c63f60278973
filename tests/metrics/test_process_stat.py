"""Tests of reading a process's state and start, also of one whose name has brackets or bytes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from zerowatch.metrics.process_stat import state_and_start


def test_the_start_of_this_process_is_that_of_psutil() -> None:
    state, start_ticks = state_and_start(os.getpid())

    started = psutil.boot_time() + int(start_ticks) / os.sysconf("SC_CLK_TCK")
    assert state in "RS"
    assert started == pytest.approx(psutil.Process().create_time(), abs=2)


def test_a_name_may_have_any_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    fields = " ".join(str(number) for number in range(4, 53))
    (folder / "stat").write_bytes(b"7 (a) \xff (b) Z " + fields.encode())

    assert state_and_start("7", tmp_path) == ("Z", "22")


def test_a_process_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        state_and_start(7, tmp_path)
