"""Calls back once, right after a named top-level module has been imported for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from itertools import dropwhile, islice
from types import ModuleType
from typing import Any

from ..common.patching import AttributePatch

ImportCallback = Callable[[ModuleType], object]


class PostImportFinder:
    """Stands first among the import system's finders until every callback has fired.

    It finds nothing by itself: the finders behind it do, and the module gets their spec and their
    loader. Only that loader's `exec_module` is wrapped, on the instance, and is itself again
    before the module's first line runs; so nothing can tell that we were there.
    """

    def __init__(self, callbacks: Mapping[str, ImportCallback]) -> None:
        """Prepare.

        Args:
            callbacks: By name of a top-level module. A callback must not raise: it would look like
                a failure of the module's own import.
        """
        self._waiting = dict(callbacks)

    def start(self) -> None:
        """Call back for what is imported already, and wait for the rest."""
        sys.meta_path.insert(0, self)
        for name in tuple(self._waiting):
            if module := sys.modules.get(name):
                self._fire(name, module)

    def close(self) -> None:
        """Stop waiting."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the finders behind this one do, and watch its execution."""
        if fullname not in self._waiting:
            return None
        spec = _find_behind(self, fullname, path, target)
        loader = spec and spec.loader
        if spec and hasattr(loader, "exec_module") and hasattr(loader, "__dict__"):
            self._watch_execution(spec.name, loader)
        return spec

    def _watch_execution(self, name: str, loader: Any) -> None:
        def make(execute: ImportCallback) -> ImportCallback:
            def exec_module(module: ModuleType) -> None:
                if module.__name__ != name:  # a loader may serve several modules, as zipimport's
                    execute(module)
                    return
                wrap.restore()
                execute(module)
                self._fire(name, module)

            return exec_module

        wrap = AttributePatch(loader, "exec_module", make)

    def _fire(self, name: str, module: ModuleType) -> None:
        callback = self._waiting.pop(name, None)  # atomic: of two threads, one gets it
        if not self._waiting:
            self.close()
        if callback is not None:
            callback(module)


def _find_behind(
    asking: PostImportFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    from_asking = dropwhile(lambda finder: finder is not asking, list(sys.meta_path))
    for finder in islice(from_asking, 1, None):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find else None
        if spec is not None:
            return spec
    return None
