"""Sets each live setting at window 3, undoes it at window 5, and reports what changed.

`live_settings_job.py FOLDER`; rank r writes FOLDER/rank-r.json, one entry per case.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from live_settings_cases import CASES, Case
from live_settings_engines import (
    APPLY_BEFORE,
    UNDO_BEFORE,
    WINDOWS,
    Counts,
    give_up,
    join,
    make_engine,
    train,
    weights,
)

from zerowatch.runtime.engine.live_settings.all_settings import LIVE_SETTINGS

SETTINGS_BY_NAME = {setting.name: setting for setting in LIVE_SETTINGS}


def turned(case: Case, expected: torch.Tensor, counts: Counts) -> dict:
    engine = make_engine(case.stage, case.zero)
    counts.watch(engine)
    setting = SETTINGS_BY_NAME[case.setting]
    found = {"was": setting.get(engine), "memory_bytes": setting.memory_bytes(engine, case.value)}
    windows, undos = [], []

    def before_window(window: int) -> None:
        if window == APPLY_BEFORE:
            undos.append(setting.apply(engine, case.value))
            found["holds_after_apply"] = setting.is_applied(engine, case.value)
        if window == UNDO_BEFORE:
            undos[0]()
            undos[0]()
            found["holds_after_undo"] = setting.is_applied(engine, found["was"])
        counts.window.clear()

    train(engine, dist.get_rank(), before_window, lambda: windows.append(counts.close(engine)))
    actual = weights(engine)
    give_up(engine)
    return found | {
        "bitwise": torch.equal(actual, expected),
        "difference": float((actual - expected).abs().max() / expected.abs().max()),
        "untouched": windows[APPLY_BEFORE - 1],
        "turned": windows[UNDO_BEFORE - 1],
        "undone": windows[WINDOWS - 1],
    }


def untouched(stage: int, zero: dict) -> torch.Tensor:
    engine = make_engine(stage, zero)
    train(engine, dist.get_rank(), lambda _: None, lambda: None)
    result = weights(engine)
    give_up(engine)
    return result


def reasons() -> dict[str, dict[str, str | None]]:
    """Return for each stage why an engine does not support a setting."""
    reasons_by_stage = {}
    for stage in range(4):
        engine = make_engine(stage, {})
        of_settings = {
            setting.name: setting.unsupported_reason(engine) for setting in LIVE_SETTINGS
        }
        reasons_by_stage[f"stage {stage}"] = of_settings
        give_up(engine)
    return reasons_by_stage


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join()
    counting = Counts()
    plain: dict[str, torch.Tensor] = {}
    results: dict[str, dict] = {}
    for each in CASES:
        if each.name not in sys.argv[2:]:
            continue
        key = f"{each.stage} {each.zero}"
        if key not in plain:
            plain[key] = untouched(each.stage, each.zero)
        results[each.name] = turned(each, plain[key], counting)
    results["reasons"] = reasons()
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
