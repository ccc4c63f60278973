"""A script run by `python -m zerowatch` behaves as with plain python."""

from __future__ import annotations

import importlib
import inspect
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader

import pytest
from scripts.launching import SCRIPTS, monitored, plain

from zerowatch.runtime.cli.post_import import PostImportFinder


def result_of(finished):
    """Return exit code and output of a finished process."""
    return finished.returncode, finished.stdout, finished.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("show_globals.py", "--help", "-m", "run"),
        ("fail_deep.py",),
        ("leave.py", "0"),
        ("leave.py", "7"),
        ("leave.py", "no more data"),
        ("pickle_own_class.py",),
        ("spawn_workers.py",),
        ("end_late.py",),
        ("interrupt_itself.py",),
        ("hook_exceptions.py",),
        ("list_modules.py",),
        ("fork_and_leave.py",),
        ("../cli/./leave.py", "3"),
    ],
    ids=" ".join,
)
def test_a_script_runs_as_with_plain_python(arguments):
    expected = plain(*arguments, cwd=SCRIPTS / "cli")

    assert result_of(monitored(*arguments, cwd=SCRIPTS / "cli")) == result_of(expected)


def test_a_script_that_does_not_compile_shows_what_python_shows(tmp_path):
    (tmp_path / "broken.py").write_text("import os\nif True\n    pass\n")

    expected = plain("broken.py", cwd=tmp_path)

    assert "SyntaxError" in expected.stderr
    assert result_of(monitored("broken.py", cwd=tmp_path)) == result_of(expected)


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_a_failing_import_of_torch_shows_what_python_shows(tmp_path, error):
    (tmp_path / "torch.py").write_text(f"raise {error}('no libcudart')\n")
    (tmp_path / "train.py").write_text("import torch\n")

    expected = plain("train.py", cwd=tmp_path)

    assert "no libcudart" in expected.stderr
    assert result_of(monitored("train.py", cwd=tmp_path)) == result_of(expected)


STAND_IN = """\
import sys
import types


def close_watch(failed):
    print("closed as failed" if failed else "closed")


sys.modules["zerowatch.runtime.entry_points"] = types.SimpleNamespace(close_watch=close_watch)
"""


@pytest.mark.parametrize(
    ("ending", "failed"), [("sys.exit(0)", False), ("sys.exit('no more data')", True)]
)
def test_only_a_script_that_ends_by_an_error_is_closed_as_failed(tmp_path, ending, failed):
    (tmp_path / "train.py").write_text(STAND_IN + ending + "\n")

    finished = monitored("train.py", cwd=tmp_path)

    assert bool(finished.returncode) is failed
    assert finished.stdout == ("closed as failed\n" if failed else "")


def test_a_script_that_lightning_ends_after_sigterm_is_closed_as_failed(tmp_path):
    ending = "class SIGTERMException(SystemExit): ...\nraise SIGTERMException\n"
    (tmp_path / "train.py").write_text(STAND_IN + ending)

    finished = monitored("train.py", cwd=tmp_path)

    assert (finished.returncode, finished.stdout) == (0, "closed as failed\n")


@pytest.fixture
def package(tmp_path):
    """A folder with the package `job`, which prints its globals."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "__init__.py").write_text("import sys\nprint('package', sys.argv)\n")
    shows = "import sys\nprint(__name__, __file__, __package__, __spec__.name, sys.argv)\n"
    (folder / "__main__.py").write_text(shows)
    (folder / "train.py").write_text(shows + "from . import nothing_there\n")
    return tmp_path


@pytest.mark.parametrize("module", ["job", "job.train", "job.missing", "missing"])
def test_a_module_runs_as_with_plain_python(package, module):
    expected = plain("-m", module, "--flag", cwd=package)

    assert result_of(monitored("-m", module, "--flag", cwd=package)) == result_of(expected)


@pytest.mark.parametrize("target", [("show_globals.py",), ("-m", "show_globals")], ids=" ".join)
def test_the_local_rank_of_the_deepspeed_launcher_reaches_the_script(target):
    expected = plain(*target, "--local_rank=1", "--lr=2", cwd=SCRIPTS / "cli")

    assert result_of(
        monitored("--local_rank=1", *target, "--lr=2", cwd=SCRIPTS / "cli")
    ) == result_of(expected)


def test_a_link_to_a_script_imports_from_the_scripts_own_folder(tmp_path):
    (tmp_path / "linked.py").symlink_to(SCRIPTS / "cli" / "show_globals.py")

    expected = plain("linked.py", cwd=tmp_path)

    assert result_of(monitored("linked.py", cwd=tmp_path)) == result_of(expected)


def test_a_missing_script_prints_one_line_and_exits_with_code_2(tmp_path):
    finished = monitored("nofile.py", cwd=tmp_path)

    path = tmp_path / "nofile.py"
    line = f"zerowatch: cannot open script '{path}': No such file or directory\n"
    assert result_of(finished) == (2, "", line)


def test_a_module_without_a_name_prints_one_line_and_exits_with_code_2():
    assert result_of(monitored("-m")) == (2, "", "zerowatch: -m needs the name of a module\n")


def test_a_command_instead_of_a_script_names_the_right_program(tmp_path):
    finished = monitored("run", "train.py", cwd=tmp_path)

    assert finished.returncode == 2
    assert finished.stderr.endswith("; the command is `zerowatch run`\n")


def test_an_invalid_setting_prints_one_line_before_the_script_starts(tmp_path):
    finished = monitored(
        SCRIPTS / "cli" / "list_modules.py", cwd=tmp_path, ZEROWATCH_SERVE_PROT="1"
    )

    line = "environment variable ZEROWATCH_SERVE_PROT is no setting; did you mean "
    assert result_of(finished) == (2, "", f"zerowatch: {line}'ZEROWATCH_SERVE_PORT'?\n")


@pytest.fixture
def waiting_for():
    """Return a function that registers callbacks and returns the list of imported modules."""
    imported = []
    finders = []

    def wait(*names):
        finder = PostImportFinder(dict.fromkeys(names, imported.append))
        finders.append(finder)
        finder.start()
        return imported

    yield wait
    for finder in finders:
        finder.close()


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    """A module `lately_written` on the path, not imported yet; its last line sets a value."""
    file = tmp_path / "lately_written.py"
    file.write_text("def double(x):\n    return 2 * x\n\n\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("lately_written", None)


def test_a_callback_is_called_once_after_the_modules_last_line(waiting_for, module_file):
    imported = waiting_for("lately_written")

    module = importlib.import_module("lately_written")
    importlib.import_module("lately_written")

    assert imported == [module]
    assert imported[0].whole


def test_a_callback_is_called_at_once_for_an_imported_module(waiting_for):
    assert waiting_for("json.decoder") == [sys.modules["json.decoder"]]


def test_a_finder_is_removed_after_its_last_callback(waiting_for, module_file):
    before = list(sys.meta_path)
    waiting_for("lately_written")
    assert sys.meta_path != before

    importlib.import_module("lately_written")

    assert sys.meta_path == before


def test_a_module_with_a_callback_has_its_usual_loader_and_source(waiting_for, module_file):
    waiting_for("lately_written")

    module = importlib.import_module("lately_written")

    loader = module.__spec__.loader
    assert type(loader) is SourceFileLoader and loader is module.__loader__
    assert "exec_module" not in vars(loader)
    assert inspect.getsource(module.double).startswith("def double")
    assert loader.get_source("lately_written") == module_file.read_text()


def test_finding_a_spec_is_not_an_import(waiting_for, module_file):
    imported = waiting_for("lately_written")

    spec = importlib.util.find_spec("lately_written")

    assert spec.origin == str(module_file)
    assert imported == []


def test_a_failed_import_keeps_its_callback(waiting_for, module_file):
    imported = waiting_for("lately_written")
    good = module_file.read_text()
    module_file.write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("lately_written")
    assert imported == []

    module_file.write_text(good)
    importlib.invalidate_caches()

    assert imported == [importlib.import_module("lately_written")]


def test_concurrent_imports_call_back_once(waiting_for, module_file):
    module_file.write_text("import time\ntime.sleep(0.05)\n")
    imported = waiting_for("lately_written")

    with ThreadPoolExecutor(4) as threads:
        modules = set(threads.map(importlib.import_module, ["lately_written"] * 4))

    assert modules == set(imported)
    assert len(imported) == 1


def test_importing_a_module_from_a_zip_file_calls_back(waiting_for, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped_one.py", "import zipped_two\n")
        archive.writestr("zipped_two.py", "")
    monkeypatch.syspath_prepend(tmp_path / "lib.zip")
    imported = waiting_for("zipped_one")

    module = importlib.import_module("zipped_one")

    assert imported == [module]
    assert "exec_module" not in vars(module.__loader__)
