"""DeepSpeed's op for asynchronous I/O, built once for all tests: a build takes minutes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

HOW_TO_BUILD = (
    "needs DeepSpeed's op for asynchronous I/O: with g++ and libaio-dev run, once, "
    "DS_ACCELERATOR=cpu python -c 'import deepspeed.ops.op_builder as b; "
    "b.AsyncIOBuilder().load()'"
)


def built_extensions() -> Path | None:
    """Return where torch keeps what it has built, if the op is there."""
    usual = Path.home() / ".cache" / "torch_extensions"
    roots = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or usual), usual
    ops = (op for root in roots for op in root.rglob("async_io/async_io.so"))
    return next((op.parent.parent for op in ops), None)


def use_built_op(extensions: Path) -> None:
    """Let DeepSpeed use the built op without checking whether to rebuild it."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    ctypes.CDLL(str(extensions / "pin_memory" / "pin_memory.so"), mode=ctypes.RTLD_GLOBAL)
    built = extensions / "async_io" / "async_io.so"
    spec = importlib.util.spec_from_file_location("async_io", built)
    op = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(op)
    AsyncIOBuilder.load = lambda self, **_: op
