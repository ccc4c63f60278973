"""`python -m zerowatch script.py`: runs a script as python would, watched from its first import on.

It changes nothing that the script can see: the script gets a `__main__` module of its own, which
stays in `sys.modules` for the pickles, worker processes, late threads and exit handlers that need
it. It installs no signal handler, and imports neither torch nor deepspeed before the script does.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

from ...errors import CommandLineError, ZerowatchError
from ...metrics.settings import load_settings
from ..common.ds_config import explain_config_error
from ..common.fail_open import FailOpen
from .post_import import PostImportFinder
from .tracebacks import hide_our_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script that is ready to run in this process."""

    body: Callable[[], None]
    watched: bool

    def run(self) -> None:
        """Run the script; whatever it raises goes on to the interpreter, as with plain python."""
        fail_open = FailOpen()
        if self.watched:
            _watch_imports(fail_open)
        with _ExitHandler(fail_open, watched=self.watched):
            self.body()


def prepare(arguments: Sequence[str], launchers_arguments: Sequence[str] = ()) -> Script:
    """Check everything that can be wrong before the script's first line.

    Args:
        arguments: A script and its arguments, or `-m`, a module and its arguments.
        launchers_arguments: What a launcher adds, which stands before all the script's own.

    Raises:
        CommandLineError: The script cannot be read.
        SettingsError: A setting is wrong.
    """
    as_module = arguments[:1] == ["-m"]
    if len(arguments) <= as_module:
        raise CommandLineError("-m needs the name of a module" if as_module else "no script given")
    target = arguments[as_module]
    rest = [*launchers_arguments, *arguments[as_module + 1 :]]
    body = _module_body(target, rest) if as_module else _script_body(target, rest)
    # The ds config is not known yet, and may switch the watch on against zerowatch.toml: only
    # what is stronger than it, the environment, decides here.
    return Script(body=body, watched=load_settings(ds_block={"enabled": True}).enabled)


def _script_body(script: str, arguments: list[str]) -> Callable[[], None]:
    path = os.path.join(os.getcwd(), script)  # not normalised, as python's own `__file__`
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise CommandLineError(f"cannot open script {path!r}: {error.strerror}") from None

    def body() -> None:
        sys.argv = [script, *arguments]
        if not sys.flags.safe_path:  # under `python -P` nothing of ours stands there
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        main = _fresh_main()
        main.__dict__.update(
            __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
        )
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return body


def _module_body(name: str, arguments: list[str]) -> Callable[[], None]:
    def body() -> None:
        sys.argv = ["-m", *arguments]  # as with python, until the module is found
        _fresh_main()
        # What the interpreter itself calls for `-m`; its public kin take `__main__` away again.
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]

    return body


def _fresh_main() -> ModuleType:
    """Put a new `__main__` in place of ours, for good."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main


def _watch_imports(fail_open: FailOpen) -> None:
    """Hook the watch to the script's own imports of torch and deepspeed."""

    def tap(torch: ModuleType) -> None:
        from ..initialize import instrument_torch

        instrument_torch()

    def wrap(deepspeed: ModuleType) -> None:
        from ..initialize import wrap_deepspeed

        wrap_deepspeed(deepspeed)

    callbacks = {
        "torch": fail_open.wrap("attach", tap),
        "deepspeed": fail_open.wrap("attach", wrap),
    }
    PostImportFinder(callbacks).start()


class _ExitHandler(AbstractContextManager[None]):
    """Shows the error that ended a script as plain python would, and closes the watch after it.

    A script that ends well needs none of this: a watch closes itself in an exit handler, when the
    script's late threads are done.
    """

    def __init__(self, fail_open: FailOpen, *, watched: bool) -> None:
        self._close = fail_open.wrap("close", _close_failed)
        self._explain = fail_open.wrap("explain", _explanation)
        self._watched = watched

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            if error.code not in (None, 0):
                self._close()
        elif error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        explanation = self._explain(error) if self._watched else None
        if explanation is None:
            # The interpreter shall show it, and choose the exit code, after our frames are gone.
            sys.excepthook = partial(self._show, sys.excepthook)
            return
        sys.stderr.write(f"zerowatch: {explanation}\n")
        self._show(sys.excepthook, type(error), error, error.__traceback__)
        raise SystemExit(2) from None

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
    # The wrapped deepspeed.initialize has left a line, if it was reached.
    return getattr(error, "zerowatch_explanation", None) or explain_config_error(error, None)


def _close_failed() -> None:
    initialize = sys.modules.get("zerowatch.runtime.initialize")
    if initialize is not None:  # else the script never came to torch
        initialize.close_watch(failed=True)
