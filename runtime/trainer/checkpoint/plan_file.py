"""`plan.json` of a run folder: what a restart must know before it trains, however the run ended.

A save is made now and then; the plan changes when memory ran out, and that is when a run may die.
So each change is written as it is made, and a process that dies of memory adds on what.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ....metrics.atomic_file import atomic_write
from ...common.host_group import HostCollectives

logger = logging.getLogger(__name__)

NAME = "plan.json"
LOCK_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Failure:
    """A micro-batch on which a process died: so many samples of that length ran out of memory."""

    length: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedPlan:
    """What a restart goes by.

    Attributes:
        steps: Windows committed when the plan was made.
        plan: How windows are cut; keys that are whole numbers come back as such.
        config: The DeepSpeed configuration in force, where an engine was rebuilt.
        failures: Since the plan was made; not worked into it.
    """

    steps: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    failures: tuple[Failure, ...] = ()


class PlanFile:
    """One per run folder, or per node where that is no shared one. Never raises for a disk's sake.

    Args:
        folder: The run's, or what returns it, as a run may get its name late; where it is None
            nothing is written.
    """

    def __init__(self, folder: Path | Callable[[], Path | None] | None) -> None:
        self._find = folder
        self._worked_in: frozenset[Failure] = frozenset()
        self._warned = False

    def read(self, host_group: HostCollectives) -> PersistedPlan | None:
        """Return the newest plan of any rank, with all failures; the same on all ranks.

        Plans that are written from now on are taken to heed those failures.

        Args:
            host_group: Of all ranks; every one must call this.
        """
        own = self._read()
        said = host_group.all_gather_text("" if own is None else _to_text(own))
        plans = [_from_text(text) for text in said if text]
        if not plans:
            return None
        failures = {failure for plan in plans for failure in plan.failures}
        self._worked_in = frozenset(failures)
        newest = max(plans, key=lambda plan: plan.steps)
        return replace(newest, failures=tuple(sorted(failures)))

    def write(
        self, plan: Mapping[str, Any], *, steps: int, config: Mapping[str, Any] | None = None
    ) -> None:
        """Write the plan in force; to be called by one rank of each node whenever it changes.

        Args:
            plan: JSON's data, but that keys may be whole numbers.
            steps: Windows committed.
            config: The DeepSpeed configuration, where an engine was rebuilt.
        """
        with self._locked() as before:
            new = tuple(each for each in before.failures if each not in self._worked_in)
            self._write(PersistedPlan(steps=steps, plan=plan, config=config, failures=new))

    def add_failure(self, *, length: int, samples: int) -> None:
        """Note that this process is about to die, as a micro-batch does not fit.

        Args:
            length: Of the batch, as agreed between the ranks.
            samples: Of the micro-batch.
        """
        with self._locked() as before:
            failures = {*before.failures, Failure(length=length, samples=samples)}
            self._write(replace(before, failures=tuple(sorted(failures))))

    @property
    def _folder(self) -> Path | None:
        return self._find() if callable(self._find) else self._find

    @contextmanager
    def _locked(self) -> Iterator[PersistedPlan]:
        """Hold other ranks off; for a moment only, as a dying process must not wait long."""
        if self._folder is None:
            yield PersistedPlan()
            return
        descriptor = None
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._folder, os.O_RDONLY)
            _lock(descriptor)
        try:
            yield self._read() or PersistedPlan()
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _read(self) -> PersistedPlan | None:
        if self._folder is None:
            return None
        try:
            return _from_text((self._folder / NAME).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s cannot be read: %s; it is ignored", self._folder / NAME, error)
            return None

    def _write(self, plan: PersistedPlan) -> None:
        if self._folder is None:
            return
        try:
            atomic_write(self._folder / NAME, _to_text(plan), durable=True)
        except (OSError, TypeError) as error:  # TypeError: a config that JSON has no words for
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot write %s: %s; a restart would not know what ran out of memory",
                    self._folder / NAME,
                    error,
                )


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)


def _to_text(plan: PersistedPlan) -> str:
    return json.dumps(asdict(plan), indent=1) + "\n"


def _from_text(text: str) -> PersistedPlan:
    values = json.loads(text)
    return PersistedPlan(
        steps=values["steps"],
        plan=_whole_numbers(values["plan"]),
        config=values["config"],
        failures=tuple(Failure(**each) for each in values["failures"]),
    )


def _whole_numbers(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            int(key) if key.lstrip("-").isdigit() else key: _whole_numbers(child)
            for key, child in node.items()
        }
    return [_whole_numbers(child) for child in node] if isinstance(node, list) else node
