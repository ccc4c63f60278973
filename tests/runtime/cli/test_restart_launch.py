"""The store of restarted ranks in `zerowatch run --max-restarts`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed.run

from zerowatch.runtime.cli.run_command import launch

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture(autouse=True)
def torchrun_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    monkeypatch.setattr(torch.distributed.run, "main", lambda arguments: None)
    monkeypatch.setenv("ZEROWATCH_RUN_ID", "night")
    monkeypatch.setenv(OWN_STORES, "")  # so that monkeypatch removes it afterwards
    monkeypatch.delenv(OWN_STORES)
    yield
    os.environ.pop(OWN_STORES, None)


def test_each_restart_gets_a_new_store() -> None:
    launch(["--max-restarts", "3", __file__])

    assert os.environ[OWN_STORES] == "1"


def test_without_restarts_or_with_the_users_own_value_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch([__file__])
    assert OWN_STORES not in os.environ

    monkeypatch.setenv(OWN_STORES, "0")
    launch(["--max-restarts", "3", __file__])

    assert os.environ[OWN_STORES] == "0"


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        (["--max-restarts", "3", "--master-port", "29501"], True),
        (["--master-port", "29501"], False),
        (["--max-restarts", "3", "--standalone"], False),
        (["--max-restarts", "3"], False),
        (["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fixed_port_shares_one_store_and_warns(
    options: list[str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    launch([*options, __file__])

    assert ("restarted ranks share a store" in capsys.readouterr().err) is is_warned
