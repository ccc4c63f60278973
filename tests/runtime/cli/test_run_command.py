"""Tests of `zerowatch run`: torchrun's options, the ranks, and the script's exit code."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed.run
from click.testing import CliRunner
from package_tree import ROOT
from recorded_runs import write_run
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS, TWO_RANKS, ZEROWATCH, Finished, own_lines, start
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from zerowatch.__main__ import commands, main
from zerowatch.errors import CommandLineError
from zerowatch.metrics.settings import LAUNCHED_RUN_ID, load_settings
from zerowatch.runtime.cli import launcher_notes, run_end
from zerowatch.runtime.cli.demo.launch_ranks import launch_demo
from zerowatch.runtime.cli.run_command import launch
from zerowatch.runtime.common.launcher_link import send_run_folder

RUN = (ZEROWATCH, "run")
COUNT = SCRIPTS / "cli" / "count_to_two.py"
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nofile.py",), "no script 'nofile.py' in {cwd}"),
        (("-m", "no_such.module"), "no module named 'no_such', here or installed"),
        (("--standalone",), "the following arguments are required: training_script, "),
        (("--no-such-option", "train.py"), "unrecognized arguments: --no-such-option"),
        (("--no-python", "train.py"), "--no-python cannot be monitored, "),
        (("--standalone", "--run-path", "train.py"), "--run-path cannot be monitored, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_invalid_command_prints_one_line_and_exits_with_code_2(
    tmp_path, monkeypatch, capsys, arguments, line
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zerowatch", "run", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"zerowatch: run: {line.format(cwd=tmp_path)}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nnodes abc", "--nnodes 'abc'"),
        ("--nnodes 1:2:3", "--nnodes '1:2:3'"),
        ("--nnodes 0", "min_nodes=0"),
        ("--nproc-per-node foo", "Unsupported nproc_per_node value: foo"),
        ("--nproc-per-node 0", "--nproc-per-node"),
        ("--rdzv-conf foo", "option 'foo' must have a value"),
        ("--rdzv-backend foo", "backend 'foo' is not registered"),
        ("--rdzv-backend c10d --rdzv-id a --rdzv-endpoint host:x", "'host:x' must be an integer"),
        ("--max-restarts -1", "max_restarts must be >= 0"),
        ("--redirects 9", "9 does not match"),
        ("--local-ranks-filter x", "must be a comma-separated list of integers"),
        ("--log-dir /dev/null/x", "'/dev/null/x'"),
    ],
)
def test_an_option_that_torchrun_rejects_prints_one_line_and_exits_with_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    said: str,
) -> None:
    unrecorded = inspect.unwrap(torch.distributed.run.main)  # without a handler of faults
    monkeypatch.setattr(torch.distributed.run, "main", unrecorded)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # torchrun leaves a folder there
    monkeypatch.setenv("ZEROWATCH_RUN_ID", "night")
    monkeypatch.setattr(sys, "argv", ["zerowatch", "run", *options.split(), str(COUNT)])
    run = LocalElasticAgent.run

    with pytest.raises(SystemExit) as ended:
        main()

    line = capsys.readouterr().err
    assert ended.value.code == 2
    assert line.startswith("zerowatch: run: ") and said in line
    assert line.count("\n") == 1
    assert LocalElasticAgent.run is run


def test_help_shows_both_forms_without_importing_torch(tmp_path):
    shows = (
        "import sys; from zerowatch.__main__ import commands; "
        "commands(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )

    finished = start(sys.executable, "-c", shows, cwd=tmp_path)

    assert re.search(r"run +Run a script under torchrun", finished.stdout)
    assert "python -m zerowatch SCRIPT [ARGS]..." in finished.stdout
    assert finished.stdout.endswith("False\n")


@pytest.fixture
def fake_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    monkeypatch.setattr(torch.distributed.run, "main", lambda arguments: None)
    monkeypatch.setenv("ZEROWATCH_RUN_ID", "night")
    monkeypatch.setenv(OWN_STORES, "")  # so that monkeypatch removes it afterwards
    monkeypatch.delenv(OWN_STORES)
    yield
    os.environ.pop(OWN_STORES, None)


@pytest.mark.usefixtures("fake_torchrun")
def test_with_restarts_torchrun_makes_a_new_store_for_each() -> None:
    launch(["--max-restarts", "3", __file__])

    assert os.environ[OWN_STORES] == "1"


@pytest.mark.usefixtures("fake_torchrun")
def test_without_restarts_or_with_the_users_own_value_the_variable_is_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch([__file__])
    assert OWN_STORES not in os.environ

    monkeypatch.setenv(OWN_STORES, "0")
    launch(["--max-restarts", "3", __file__])

    assert os.environ[OWN_STORES] == "0"


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    "options",
    [
        ["--master-port", "29501"],
        ["--rdzv-endpoint", "a:1"],
        ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a"],
    ],
    ids=lambda options: " ".join(options),
)
def test_restarts_with_one_store_for_all_attempts_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(torch.distributed.run, "main", lambda arguments: pytest.fail("started"))

    with pytest.raises(CommandLineError, match=r"On one node, use --standalone, .* in place of"):
        launch(["--max-restarts", "3", *options, __file__])


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    "options",
    [
        ["--master-port", "29501"],
        ["--max-restarts", "3", "--standalone"],
        ["--max-restarts", "3", "--standalone", "--master-port", "29501"],
        ["--max-restarts", "3"],
        ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1"],
    ],
    ids=lambda options: " ".join(options),
)
def test_a_port_without_restarts_and_restarts_with_new_stores_are_allowed(
    options: list[str],
) -> None:
    assert launch([*options, __file__]) == 0


def launched(*arguments: object, cwd: Path, variables: dict[str, str] | None = None) -> Finished:
    """Run `zerowatch run ARGUMENTS`, forked from a process that has imported torch."""
    return start_ranks(1, *RUN, *arguments, cwd=cwd, variables=variables)


@pytest.mark.jobs
def test_every_rank_gets_the_scripts_arguments_and_the_same_run_id(tmp_path):
    finished = launched(*TWO_RANKS, COUNT, "--help", "-m", "--nproc-per-node", "9", cwd=tmp_path)

    assert finished.returncode == 0
    lines = sorted(own_lines(finished))
    arguments = "args ['--help', '-m', '--nproc-per-node', '9']"
    assert lines[:2] == [f"out: rank {rank} of 2 {arguments}" for rank in (0, 1)]
    assert lines[2] == lines[3]
    assert re.fullmatch(r"out: run \d{8}T\d{6}-[0-9a-f]{6}", lines[2])


@pytest.mark.jobs
def test_a_module_runs_instead_of_a_script_and_the_users_run_id_is_kept(tmp_path):
    (tmp_path / "count.py").write_text(COUNT.read_text())
    variables = {"ZEROWATCH_RUN_ID": "night"}

    finished = launched("--standalone", "-m", "count", "-m", cwd=tmp_path, variables=variables)

    assert own_lines(finished) == ["out: rank 0 of 1 args ['-m']", "out: run night"]


@pytest.mark.jobs
def test_the_command_sets_no_run_id_on_several_nodes(tmp_path):
    several = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")

    finished = launched(*several, "--rdzv-conf", "last_call_timeout=1", COUNT, cwd=tmp_path)

    assert "out: run None" in own_lines(finished)


@pytest.mark.jobs
@pytest.mark.parametrize(("way", "code"), [("fail", 7), ("die", 128 + 9)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path, way, code):
    finished = launched(*TWO_RANKS, COUNT, way, cwd=tmp_path)

    assert finished.returncode == code
    assert f"{COUNT} FAILED" in finished.stderr  # torchrun's summary, in the script's name
    assert "Traceback" not in finished.stderr
    assert "before that" not in finished.stderr  # rank 0 was ended by the launcher


@pytest.mark.jobs
def test_a_rank_that_ends_before_another_one_fails_is_named(tmp_path):
    finished = launched(*TWO_RANKS, COUNT, "leave", cwd=tmp_path)

    lines = [line for line in finished.stderr.splitlines() if line.startswith("zerowatch: ")]
    assert lines == [
        "zerowatch: rank 1 was the first rank of this host to fail, with code 7; its own lines say "
        "why",
        "zerowatch: before that, rank 0 had exited with code 0. Ranks that still train then "
        "fail. Did the script end there early, or with less data?",
    ]


def started_by(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, error: Exception | None = None
) -> tuple[int, list[str]]:
    """The exit code of the launch, and torchrun's command line, if the ranks end by an error."""
    lines: list[str] = []

    def start(line: list[str]) -> None:
        lines.extend(line)
        if error is not None:
            raise error

    monkeypatch.setattr(torch.distributed.run, "main", start)
    return launch([*arguments]), lines


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--nproc-per-node", "2", __file__, "-m", "x"),
            ["-m", "--nproc-per-node", "2", "zerowatch", __file__, "-m", "x"],
        ),
        ((__file__, "--", "--foo"), ["-m", "zerowatch", __file__, "--foo"]),
        (("--nnodes=1", __file__, "--"), ["-m", "--nnodes=1", "zerowatch", __file__]),
        ((__file__, "x", "--", "y"), ["-m", "zerowatch", __file__, "x", "--", "y"]),
        (("-m", "json.tool", "--", "a"), ["-m", "zerowatch", "-m", "json.tool", "a"]),
        (("-m", "json.tool", "a"), ["-m", "zerowatch", "-m", "json.tool", "a"]),
        (
            ("--nproc-per-node=2", "-m", "json.tool"),
            ["--nproc-per-node=2", "-m", "zerowatch", "-m", "json.tool"],
        ),
    ],
)
def test_each_rank_runs_the_script_or_the_module_by_zerowatch(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], line: list[str]
) -> None:
    assert started_by(monkeypatch, *arguments) == (0, line)


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize("name", ["zerowatch/__init__.py", "zerowatch.py"])
def test_another_zerowatch_in_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    with pytest.raises(CommandLineError, match=f"from {tmp_path / name}, .* {ROOT}; "):
        started_by(monkeypatch, __file__)
    with pytest.raises(CommandLineError, match=r"demo: .* zerowatch from "):
        launch_demo(steps=1, num_processes=1, stage=0)
    done = CliRunner().invoke(commands, ["check", "--nproc", "1"])

    assert str(done.exception).startswith("check: the ranks would import zerowatch from ")


@pytest.mark.usefixtures("fake_torchrun")
def test_this_zerowatch_and_one_that_ranks_do_not_search_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "zerowatch").mkdir(parents=True)
    (tmp_path / "other" / "zerowatch" / "__init__.py").touch()
    (tmp_path / "zerowatch").symlink_to(ROOT)
    monkeypatch.chdir(tmp_path)
    own = started_by(monkeypatch, __file__)
    monkeypatch.chdir("other")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")

    assert own == started_by(monkeypatch, __file__) == (0, ["-m", "zerowatch", __file__])


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ChildFailedError("job", {0: ProcessFailure(0, 7, 3, "")}), 3),
        (ChildFailedError("job", {0: ProcessFailure(0, 7, -9, "")}), 137),
        (SignalException("stopped", signal.SIGTERM), 143),
    ],
)
def test_the_exit_code_of_a_launch_is_that_of_a_shell(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    assert started_by(monkeypatch, __file__, error=error)[0] == code


@pytest.mark.usefixtures("fake_torchrun")
def test_an_error_of_the_agent_itself_is_not_one_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(agent: object) -> None:
        raise RuntimeError("a fault in torch")

    monkeypatch.setattr(LocalElasticAgent, "run", fail)
    monkeypatch.setattr(torch.distributed.run, "main", lambda line: LocalElasticAgent.run(None))

    with pytest.raises(RuntimeError, match="a fault in torch"):
        launch([__file__])


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    "error",
    [None, SignalException("stopped", signal.SIGTERM), RendezvousClosedError()],
    ids=["none", "signal", "rendezvous"],
)
def test_steps_of_killed_ranks_are_recovered_on_a_node_without_rank_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None
) -> None:
    monkeypatch.setenv("ZEROWATCH_RUN_LOG_FOLDER", str(tmp_path))
    recovered: list[Path] = []
    monkeypatch.setattr(launcher_notes, "recover", recovered.append)

    with suppress(CommandLineError):
        started_by(monkeypatch, __file__, error=error)

    assert recovered == [tmp_path]


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(("status", "code"), [(0, 143), (7, 7)])
def test_a_signal_while_tables_are_made_leaves_the_lines_of_the_reports_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: int,
) -> None:
    folders = [write_run(tmp_path / name) for name in ("first", "second")]

    def train(line: list[str]) -> None:
        for folder in folders:
            send_run_folder(folder, rank=0)
        if status:
            raise ChildFailedError("job", {0: ProcessFailure(0, 7, status, "")})

    def interrupt(*arguments: object, **options: object) -> None:
        raise SignalException("stopped", signal.SIGTERM)

    monkeypatch.setattr(torch.distributed.run, "main", train)
    monkeypatch.setattr(run_end, "recover" if status else "final_report", interrupt)

    assert launch([__file__]) == code
    lines = capsys.readouterr().err
    assert [f"zerowatch report {folder}" in lines for folder in folders] == [True, True]


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(("settings", "num_tables"), [('{"console": "off"}', 0), ("{", 1)])
def test_tables_are_printed_as_the_settings_of_the_run_say(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: str,
    num_tables: int,
) -> None:
    """Those of the launcher lack what the script's call and its ds config set."""
    folder = write_run(tmp_path / "run")
    (folder / "settings.json").write_text(settings)
    monkeypatch.setattr(torch.distributed.run, "main", lambda line: send_run_folder(folder, rank=0))

    assert launch([__file__]) == 0
    printed = capsys.readouterr().err
    assert printed.count("Where the time went") == num_tables
    assert f"zerowatch report {folder}" in printed


@pytest.mark.jobs
def test_the_exits_of_ranks_are_noted_in_the_folder_that_the_ds_config_names(
    tmp_path: Path,
) -> None:
    finished = launched(*TWO_RANKS, SCRIPTS / "cli" / "kill_rank_1.py", cwd=tmp_path)

    (line,) = [line for line in finished.stderr.splitlines() if "was the first rank" in line]
    assert re.search(r"rank 1 .*, by SIGKILL, after step \d+", line)
    notes = list((tmp_path / "shared").glob("*/exits/rank-*-launcher.note.json"))
    assert sorted(note.name.split("-")[1] for note in notes) == ["0", "1"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("fake_torchrun")
def test_an_error_of_the_rendezvous_is_one_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-id=job")

    with pytest.raises(CommandLineError, match=r"'job' \(--rdzv-id\) has ended.*a:1"):
        started_by(monkeypatch, *options, __file__, error=RendezvousClosedError())


@pytest.mark.usefixtures("fake_torchrun")
@pytest.mark.parametrize(
    ("nnodes", "is_set"), [("1", True), ("1:1", True), ("1:2", False), ("2", False)]
)
def test_the_launcher_of_a_single_node_chooses_the_run_id(
    monkeypatch: pytest.MonkeyPatch, nnodes: str, is_set: bool
) -> None:
    monkeypatch.delenv("ZEROWATCH_RUN_ID")
    monkeypatch.setenv(LAUNCHED_RUN_ID, "")

    started_by(monkeypatch, "--nnodes", nnodes, "--rdzv-backend=c10d", __file__)

    assert (load_settings().run_id is not None) is is_set
