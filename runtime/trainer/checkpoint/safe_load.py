"""Reads torch's files without running code from them.

To build a pickled object, Python calls the functions that the file names, so a file could run any
code. With `weights_only`, torch reads tensors and plain data, and refuses every other global.
DeepSpeed reads its files without `weights_only`, so `torch.load` is wrapped while DeepSpeed loads.
"""

from __future__ import annotations

import importlib
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from ....errors import CheckpointError
from ...common.deepspeed_internals import CHECKPOINT_CLASSES
from ...common.patching import AttributePatch
from .folder import DamagedCheckpointError, first_line, recovery_hint

_FORBIDDEN = re.compile(r"GLOBAL (\S+)")  # in torch's error
_NUMPY_NUMBERS = "?bhilqBHILQefdg"  # codes of numpy's dtypes


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Let `torch.load` on this thread build plain data only, whatever its caller requests.

    Numpy's numbers and arrays, the classes that DeepSpeed's own files need, and the classes that
    the script has allowed by `torch.serialization.add_safe_globals` are allowed too. The list of
    allowed classes is restored at the end of the `with` block.
    """
    own_thread = threading.get_ident()

    def restrict(original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == own_thread:
                kwargs |= {"weights_only": True, "pickle_module": None}
            return original(*args, **kwargs)

        return load

    allowed = set(torch.serialization.get_safe_globals())
    patch = AttributePatch(torch, "load", restrict)
    try:
        with torch.serialization.safe_globals([each for each in _safe() if each not in allowed]):
            yield
    finally:
        patch.restore()


def load_plain(path: Path) -> Any:
    """Read a file of torch into host memory; tensors are mapped and read when they are used.

    Raises:
        DamagedCheckpointError: It cannot be read.
        CheckpointError: It holds objects.
    """
    try:
        with plain_data_only():
            # Only torch's zip files can be mapped, not files of its older format.
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> CheckpointError:
    name = _FORBIDDEN.search(str(error))
    if name is None and not isinstance(error, UnpicklingError):
        return DamagedCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {first_line(error)}): it is damaged, "
            f"or of another program. {recovery_hint(path.parent.parent)}"
        )
    what = name[1] if name else "more than plain data"
    return CheckpointError(
        f"{path} holds {what}. It is refused, because to read it may run code from the file. Save "
        "plain data only (numbers, text, tensors). If you trust this class, allow it by "
        "torch.serialization.add_safe_globals before `save` and `load`"
    )


def _safe() -> Iterator[Any]:
    """Yield the classes and functions that build plain data only."""
    for module, names in CHECKPOINT_CLASSES.items():
        for name in names:
            value = getattr(importlib.import_module(module), name, None)
            if value is not None:
                yield value
    yield from (np.dtype, np.ndarray, np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])
    yield from {type(np.dtype(code)) for code in _NUMPY_NUMBERS}
