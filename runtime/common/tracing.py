"""Keeps wrappers out of what torch traces: they must do nothing then.

A wrapper that runs in each collective or pass asks `is_traced() or flags._is_compiling_flag`, first
of all: otherwise `torch.compile(fullgraph=True)` fails. This is what `torch.compiler.is_compiling`
asks, but with cold CPU caches it takes 2 us instead of 7, as it calls one function instead of two.

Attributes:
    is_traced: Returns True only in code that torch.compile traces, which knows this function.
    flags: Has the flag that torch.export sets without torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

is_traced = torch.compiler.is_dynamo_compiling
flags: Any = torch.compiler
if not hasattr(torch.compiler, "_is_compiling_flag"):  # another version of torch
    flags = SimpleNamespace(_is_compiling_flag=False)
_F = TypeVar("_F", bound=Callable[..., Any])


def run_untraced(wrapper: _F) -> _F:
    """Let torch.compile run a wrapper, and what it calls, as it is. Return the wrapper.

    A call that breaks a graph is run, but torch.compile traces the functions that it enters, except
    torch's own. A traced wrapper would record nothing. Code that torch.compile traces still inlines
    the wrapper. This is `torch._dynamo.disable` without the import of torch._dynamo.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):  # torch before 2.7 has none for nested calls
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(wrapper.__code__, strategy)
    return wrapper
