"""Reads the stacks of all threads, to find where training is and whether it compiles or waits.

The code reads the names of files and functions in frames, never local variables.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from threading import get_ident
from types import FrameType

# Files that are on a stack only during a compilation. The list does not contain all files of
# torch/_dynamo and torch/_inductor. Their wrappers stay on the stack while compiled code runs, and
# while code runs that is excluded from compilation. A hang in such code must be detected.
COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/utils/cpp_extension.py",
    "triton/compiler/compiler.py",
)
# Functions of these files that run compiled code.
_RUNNERS = {("torch/_inductor/compile_fx.py", "run")}
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_DEMO = os.path.join(_OURS, "cli", "demo") + os.sep  # the demo counts as a training script
# An open prompt, and the end of the script, which joins its threads. Python's own files are
# compared by their whole path: a training script may be called code.py.
_PYTHON = os.path.dirname(os.__file__)
_DEBUGGERS = tuple(os.path.join(_PYTHON, file) for file in ("pdb.py", "code.py"))
_EVENT_LOOP = os.path.join(_PYTHON, "selectors.py")
_NOTEBOOK = f"{os.sep}ipykernel{os.sep}"
_SHUTDOWN = (os.path.join(_PYTHON, "threading.py"), "_shutdown")
# Number of times, and seconds between them, that a thread is looked at to see whether it gets on.
_LOOKS, _LOOK_SECONDS = 10, 0.01
# Activities that show no progress, with the names that are announced to the peers.
COMPILATION = "compilation"
PROMPT = "a prompt"
END = "the script's end"


def silent_activity(training_thread: int) -> str | None:
    """Return the activity of the process that explains a lack of progress, or None."""
    return silent_activity_in(sys._current_frames(), training_thread)


def python_location(training_thread: int) -> str:
    """Return the function in which the training thread is, such as "load (data.py:12)".

    The wrappers of this package around it are skipped.
    """
    frame = sys._current_frames().get(training_thread)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "no Python function"
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def runs_python(thread: int) -> bool:
    """Return whether a thread runs Python code: whether it gets on within a tenth of a second.

    Else it is in a call, which may hold other locks than the interpreter's. A thread without any
    frame is in no call: it has ended, or is at Python's own prompt.
    """
    if thread == get_ident():
        return True
    before = _place(thread)
    if not before:
        return True
    for _ in range(_LOOKS):
        time.sleep(_LOOK_SECONDS)
        if _place(thread) != before:
            return True
    return False


def silent_activity_in(frames: Mapping[int, FrameType], training_thread: int) -> str | None:
    """Return `silent_activity`, given the frames by thread. Autograd's threads may compile, too."""
    if any(_compiles(frame) for frame in frames.values()):
        return COMPILATION
    frame = frames.get(training_thread)
    if frame is None:  # Python's own prompt, or the thread has ended
        return PROMPT
    stack = list(_functions(frame))
    if any(file in _DEBUGGERS for file, _ in stack):
        return PROMPT
    if stack[0][0] == _EVENT_LOOP and any(_NOTEBOOK in file for file, _ in stack):
        return PROMPT
    return END if stack[-1] == _SHUTDOWN else None


def _place(thread: int) -> list[tuple[int, int]]:
    """Return where a thread is. References to its frames would keep tensors alive.

    The innermost frame alone does not tell: layers of one class are at the same line, and a new
    frame may have the address of the one before it.
    """
    place, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        place.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return place


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_DEMO)


def _compiles(frame: FrameType) -> bool:
    return any(
        file.endswith(compiler) and (compiler, function) not in _RUNNERS
        for file, function in _functions(frame)
        for compiler in COMPILERS
    )


def _functions(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield file and function of each frame, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back
