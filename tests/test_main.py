"""Tests of the program `zerowatch` and of the names that the package exports."""

from __future__ import annotations

import importlib
import sys

import click
import pytest

import zerowatch
from zerowatch import __main__
from zerowatch.errors import CommandLineError


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of the program."""
    monkeypatch.setattr(sys, "argv", ["zerowatch", *arguments])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("train.py",),
            "zerowatch: No such command 'train.py'; to train a script, write `zerowatch run` "
            "before it; see `zerowatch --help`\n",
        ),
        (("trian",), "zerowatch: No such command 'trian'; see `zerowatch --help`\n"),
        (
            ("demo", "--steps", "0"),
            "zerowatch: Invalid value for '--steps': 0 is not in the range x>=1; see `zerowatch "
            "demo --help`\n",
        ),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_help(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("result", "code", "said"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (CommandLineError("no such run"), 2, "zerowatch: no such run\n"),
        (click.Abort(), 130, ""),
        *(
            (
                ModuleNotFoundError(f"No module named {name!r}", name=name),
                2,
                f"zerowatch: {name} is missing, which this command needs; pip install {package}\n",
            )
            for name, package in (
                ("torch", "torch"),
                ("deepspeed", "deepspeed"),
                ("hjson", "deepspeed"),
            )
        ),
    ],
)
def test_the_exit_code_is_that_of_the_command_or_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: int | Exception | None,
    code: int,
    said: str,
) -> None:
    def command(**options: object) -> int | None:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(__main__, "commands", command)

    assert ended(monkeypatch) == code
    assert capsys.readouterr().err == said


def test_a_missing_module_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(**options: object) -> None:
        raise ModuleNotFoundError("No module named 'torchx'", name="torchx")

    monkeypatch.setattr(__main__, "commands", command)

    with pytest.raises(ModuleNotFoundError):
        __main__.main()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train.py", "--help"), True),
        (("-m", "package"), True),
        (("--local_rank=1", "train.py"), True),
        (("--local-rank=1", "train.py"), True),
        (("--help",), False),
        (("-h",), False),
        ((), False),
    ],
)
def test_a_script_or_a_module_is_told_from_an_option(
    arguments: tuple[str, ...], expected: bool
) -> None:
    assert __main__._names_script(arguments) is expected


def test_each_command_is_listed_and_has_its_own_name() -> None:
    context = click.Context(__main__.commands)
    names = __main__.commands.list_commands(context)

    commands = [__main__.commands.get_command(context, name) for name in names]

    assert [command.name for command in commands if command] == [
        *("run", "demo", "estimate", "check", "report", "compare", "top"),
        *("stack", "targets", "dashboards", "export"),
    ]


@pytest.mark.parametrize("name", ["SettingsError", "StepRecord", "Settings", "SinkRun"])
def test_an_exported_name_is_that_of_its_module(name: str) -> None:
    assert getattr(zerowatch, name).__name__ == name
    assert name in dir(zerowatch) and "__version__" in dir(zerowatch)


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'zerowatch' has no attribute 'nothing'"):
        zerowatch.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("AccelerateTracker", "hf"),
        ("TransformersCallback", "hf"),
        ("LightningCallback", "lightning"),
    ],
)
def test_a_name_that_needs_an_extra_stands_for_a_class_that_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    def missing(module: str, package: str | None = None) -> object:
        raise ModuleNotFoundError("No module named 'library'", name="library")

    monkeypatch.setattr(zerowatch, "import_module", missing)

    stands_for = getattr(zerowatch, name)

    needs = f"zerowatch.{name} needs library: pip install 'zerowatch[{extra}]'"
    assert (stands_for.__name__, stands_for.__doc__) == (name, needs)
    with pytest.raises(ModuleNotFoundError, match="needs library") as raised:
        stands_for()
    assert raised.value.name == "library"
    with pytest.raises(ModuleNotFoundError, match="No module named 'library'"):
        zerowatch.MlflowSink  # noqa: B018
    assert importlib.import_module("zerowatch") is zerowatch
