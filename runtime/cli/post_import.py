"""Calls back once, right after the first import of a named top-level module.

wrapt's import hooks are not used: they stay in `sys.meta_path` and wrap the loader for good.
"""

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
    """Finds modules at the front of `sys.meta_path`, until every callback was called.

    It returns the spec and the loader that the other finders return. Only `exec_module` of that
    loader instance is wrapped, and it is restored before the module's first line runs.
    """

    def __init__(self, callbacks: Mapping[str, ImportCallback]) -> None:
        """Prepare; `start` installs the finder.

        Args:
            callbacks: Callbacks by name of a top-level module. A callback must not raise, because
                its error would appear as an error of the import.
        """
        self._waiting = dict(callbacks)

    def start(self) -> None:
        """Call back for modules that are imported already, and install the finder for the rest."""
        sys.meta_path.insert(0, self)
        for name in tuple(self._waiting):
            if module := sys.modules.get(name):
                self._call_back(name, module)

    def close(self) -> None:
        """Remove the finder."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the finders behind this one, with its loader wrapped."""
        if fullname not in self._waiting:
            return None
        spec = _find_after(self, fullname, path, target)
        loader = spec and spec.loader
        if spec and hasattr(loader, "exec_module") and hasattr(loader, "__dict__"):
            self._wrap_loader(spec.name, loader)
        return spec

    def _wrap_loader(self, name: str, loader: Any) -> None:
        def make(execute: ImportCallback) -> ImportCallback:
            def exec_module(module: ModuleType) -> None:
                if module.__name__ != name:  # zipimport's loader serves several modules
                    execute(module)
                    return
                patch.restore()
                execute(module)
                self._call_back(name, module)

            return exec_module

        patch = AttributePatch(loader, "exec_module", make)

    def _call_back(self, name: str, module: ModuleType) -> None:
        callback = self._waiting.pop(name, None)  # atomic: one of two threads gets it
        if not self._waiting:
            self.close()
        if callback is not None:
            callback(module)


def _find_after(
    finder: PostImportFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    following = dropwhile(lambda each: each is not finder, list(sys.meta_path))
    for later_finder in islice(following, 1, None):
        find = getattr(later_finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find else None
        if spec is not None:
            return spec
    return None
