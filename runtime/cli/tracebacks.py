"""Takes the frames of the watch out of a traceback, so that it reads as with plain python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import TracebackType

_ATTACH = os.path.join(os.path.dirname(__file__), "attach.py")
_RUNTIME = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_RUNTIME, "cli", "demo") + os.sep  # a training script as any other


def hide_our_frames(error: BaseException) -> None:
    """Shorten the traceback of an error, and of those that led to it, in place."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_our_frames(each.__traceback__)
        waiting += (each.__cause__, each.__context__)
    sys.last_traceback = error.__traceback__  # what pdb.pm() opens


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    links = list(_links(traceback))
    attach = [place for place, link in enumerate(links) if _file(link) == _ATTACH]
    if attach:  # all up to attach.py started the script: ours, and the interpreter's for `-m`
        links = links[attach[-1] + 1 :]
    if links and not _is_ours(links[-1]):  # an error of our own making keeps its frames
        links = _dropped(links)
    first = None
    for link in reversed(links):
        link.tb_next = first
        first = link
    return first


def _dropped(links: list[TracebackType]) -> list[TracebackType]:
    kept: list[TracebackType] = []
    for link in links:
        if not _is_ours(link):
            kept.append(link)
            continue
        # Around the import hook stand frames that python drops itself where there is no hook.
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
