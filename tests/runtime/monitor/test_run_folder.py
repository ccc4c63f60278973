"""The targets file of a run: emptied after a normal end, and bound to the run's id."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.common.rank_store import RankStore, TargetDiscovery
from zerowatch.runtime.monitor.run_folder import RunFolder

ADDRESS = "127.0.0.1:9464"


def run_folder(runs: Path, address: str = ADDRESS) -> RunFolder:
    """Return the folder of rank 0 of one, with its targets file."""
    process = ProcessInfo(rank=0, local_rank=0, world_size=1, host="here", attempt=0)
    store = RankStore(process, 0, dist.HashStore())
    targets = TargetDiscovery(store, process)
    settings = Settings(run_id="night-7", run_log={"folder": runs})
    folder = RunFolder(settings, process, store, targets)
    targets.announce(address)
    folder.poll()
    return folder


def listed(runs: Path) -> list[str]:
    targets = json.loads((runs / "night-7" / "targets.json").read_text())
    return [address for target in targets for address in target["targets"]]


def test_prometheus_asks_an_address_for_the_run_that_it_belongs_to(tmp_path: Path) -> None:
    run_folder(tmp_path)

    (target,) = json.loads((tmp_path / "night-7" / "targets.json").read_text())

    assert target["labels"] == {
        "run": "night-7",
        "node": "here",
        "rank": "0",
        "__param_run": "night-7",
    }


def test_after_a_normal_end_the_run_has_no_targets(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    during = listed(tmp_path)

    folder.withdraw_targets()
    folder.withdraw_targets()

    assert (during, listed(tmp_path)) == ([ADDRESS], [])


def test_the_targets_of_a_later_watch_of_the_same_run_are_kept(tmp_path: Path) -> None:
    first = run_folder(tmp_path)
    run_folder(tmp_path, "127.0.0.1:9564")

    first.withdraw_targets()

    assert listed(tmp_path) == ["127.0.0.1:9564"]


def test_a_removed_run_folder_is_not_made_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (tmp_path / "night-7" / "targets.json").unlink()

    folder.withdraw_targets()

    assert not (tmp_path / "night-7" / "targets.json").exists()
