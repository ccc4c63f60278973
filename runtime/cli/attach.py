"""Runs a script as python does, with monitoring attached: `python -m zerowatch script.py`.

The script runs as under plain python, in a `__main__` module of its own. That module stays in
`sys.modules` after the script has ended, because pickles, worker processes, threads and exit
handlers may need it. No signal handler is installed. torch and deepspeed are not imported before
the script imports them.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from ...errors import CommandLineError, ZerowatchError
from ...metrics.settings import load_settings
from ..common.ds_config_errors import explain_config_error
from ..common.fail_open import FailOpen
from ..common.interrupts import is_error_exit
from .post_import import PostImportFinder

_ATTACH = __file__
_RUNTIME = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_RUNTIME, "cli", "demo") + os.sep  # a training script like any other


def prepare(arguments: Sequence[str], launcher_arguments: Sequence[str] = ()) -> Script:
    """Check the script and the settings, before the script's first line runs.

    Args:
        arguments: A script and its arguments, or `-m`, a module and its arguments.
        launcher_arguments: Arguments that a launcher adds; they precede the script's own.

    Raises:
        CommandLineError: The script cannot be read.
        SettingsError: A setting is invalid.
    """
    as_module = arguments[:1] == ["-m"]
    if len(arguments) <= as_module:
        raise CommandLineError("-m needs the name of a module" if as_module else "no script given")
    target = arguments[as_module]
    own_arguments = [*launcher_arguments, *arguments[as_module + 1 :]]
    program = (
        _Module(name=target, arguments=own_arguments)
        if as_module
        else _ScriptFile.read(target, own_arguments)
    )
    # The ds config is not known yet, and may enable monitoring against zerowatch.toml. Only what
    # takes precedence over it, the environment, decides here.
    return Script(program=program, monitored=load_settings(ds_block={"enabled": True}).enabled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Script or module that is ready to run in this process."""

    program: _ScriptFile | _Module
    monitored: bool

    def run(self) -> None:
        """Run the program; its exceptions reach the interpreter, as with plain python."""
        fail_open = FailOpen()
        if self.monitored:
            _attach_on_import(fail_open)
        with _ExitHandler(fail_open, monitored=self.monitored):
            self.program.execute()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptFile:
    """A script given by path, as `python script.py` runs it."""

    name: str
    path: str
    source: bytes
    arguments: list[str]

    @classmethod
    def read(cls, name: str, arguments: list[str]) -> _ScriptFile:
        path = os.path.join(os.getcwd(), name)  # not normalized, like python's own `__file__`
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            raise CommandLineError(f"cannot open script {path!r}: {error.strerror}") from None
        return cls(name=name, path=path, source=source, arguments=arguments)

    def execute(self) -> None:
        sys.argv = [self.name, *self.arguments]
        if not sys.flags.safe_path:  # `python -P` adds no folder to sys.path
            sys.path[0] = os.path.dirname(os.path.realpath(self.path))
        main = _new_main_module()
        loader = SourceFileLoader("__main__", self.path)
        main.__dict__.update(__file__=self.path, __cached__=None, __loader__=loader)
        exec(compile(self.source, self.path, "exec", dont_inherit=True), main.__dict__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module given by name, as `python -m module` runs it."""

    name: str
    arguments: list[str]

    def execute(self) -> None:
        sys.argv = ["-m", *self.arguments]  # as in python, until the module is found
        _new_main_module()
        # The interpreter's own function for `-m`; the public ones remove `__main__` afterwards.
        runpy._run_module_as_main(self.name)  # type: ignore[attr-defined]


def _new_main_module() -> ModuleType:
    """Replace `__main__` by a new module, permanently."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main


def _attach_on_import(fail_open: FailOpen) -> None:
    """Attach monitoring when the script imports torch and deepspeed."""

    def on_torch(torch: ModuleType) -> None:
        from ..entry_points import instrument_torch

        instrument_torch()

    def on_deepspeed(deepspeed: ModuleType) -> None:
        from ..entry_points import wrap_deepspeed

        wrap_deepspeed(deepspeed)

    callbacks = {
        "torch": fail_open.wrap("attach", on_torch),
        "deepspeed": fail_open.wrap("attach", on_deepspeed),
    }
    PostImportFinder(callbacks).start()


class _ExitHandler(AbstractContextManager[None]):
    """Prints the error that ended a script as plain python does, then closes monitoring.

    After a script without an error nothing is done here: monitoring closes itself in an exit
    handler, after the script's remaining threads have ended.
    """

    def __init__(self, fail_open: FailOpen, *, monitored: bool) -> None:
        self._close = fail_open.wrap("close", _close_failed)
        self._explain = fail_open.wrap("explain", _explanation)
        self._monitored = monitored

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            if is_error_exit(error):
                self._close()
        elif error is not None:
            self._on_error(error)

    def _on_error(self, error: BaseException) -> None:
        explanation = self._explain(error) if self._monitored else None
        if explanation is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"zerowatch: {explanation}\n")
        # The interpreter shows the error and chooses the exit code, without our frames.
        sys.excepthook = partial(self._show, sys.excepthook)

    def _show(
        self,
        excepthook: Callable[..., object],
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        sys.excepthook = excepthook
        hide_our_frames(error)
        try:
            excepthook(kind, error, error.__traceback__)
        finally:
            self._close()


def _explanation(error: BaseException) -> str | None:
    """Return one line if the error is the caller's mistake in a configuration or a setting."""
    if isinstance(error, ZerowatchError):
        return str(error)
    # Set by the wrapped deepspeed.initialize, if the script reached it.
    return getattr(error, "zerowatch_explanation", None) or explain_config_error(error, None)


def _close_failed() -> None:
    entry_points = sys.modules.get("zerowatch.runtime.entry_points")
    if entry_points is not None:  # None if the script never imported torch
        entry_points.close_watch(failed=True)


def hide_our_frames(error: BaseException) -> None:
    """Remove our frames from the traceback of an error and of its causes, in place."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = _without_our_frames(link.__traceback__)
        pending += (link.__cause__, link.__context__)
    sys.last_traceback = error.__traceback__  # pdb.pm() opens it


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    links = list(_links(traceback))
    attach = [position for position, link in enumerate(links) if _file(link) == _ATTACH]
    if attach:  # all frames up to this file started the script
        links = links[attach[-1] + 1 :]
    if links and not _is_ours(links[-1]):  # an error that we raise keeps its frames
        links = _without_wrappers(links)
    first = None
    for link in reversed(links):
        link.tb_next = first
        first = link
    return first


def _without_wrappers(links: list[TracebackType]) -> list[TracebackType]:
    kept: list[TracebackType] = []
    for link in links:
        if not _is_ours(link):
            kept.append(link)
            continue
        # Python itself drops these frames, unless an import hook is between them.
        while kept and _file(kept[-1]).startswith("<frozen importlib"):
            kept.pop()
    return kept


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename


def _is_ours(link: TracebackType) -> bool:
    return _file(link).startswith(_RUNTIME) and not _file(link).startswith(_DEMO)
