"""Reads and writes `plan.json`, the micro-batch plan that a restarted run starts from.

Checkpoints are rare, and the plan changes when memory runs out, which may end the process. So each
change is written at once, and a process that ends by an out-of-memory error adds the failure.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write
from ...common.host_group import HostCollectives
from ..oom_recovery.micro_batch_planner import UNBOUND, MicroBatchLimits
from .folder import first_line

logger = logging.getLogger(__name__)

NAME = "plan.json"
LOCK_TIMEOUT_SECONDS = 1.0


Samples = Annotated[int, Field(ge=1, le=UNBOUND)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """How windows are split, and what was learned about memory.

    Attributes:
        micro_batch_samples: Maximum samples of a micro-batch, as requested.
        sizing: Sizes that fit or fail.
    """

    __pydantic_config__: ClassVar = _STRICT

    micro_batch_samples: Samples
    sizing: MicroBatchLimits = field(default_factory=MicroBatchLimits)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Failure:
    """Samples and length of a micro-batch that ran out of memory and ended a process."""

    __pydantic_config__: ClassVar = _STRICT

    length: Annotated[int, Field(ge=0, le=UNBOUND)]
    samples: Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistedPlan:
    """Contents of the plan file.

    Attributes:
        steps: Windows committed when the plan was written.
        plan: How windows are split; None if a process ended before a plan was written.
        config_changes: What rebuilds have changed in the caller's ds config, nested as in it.
        failures: Failures since the plan was written, which the plan does not account for.
        format: Version of the file's format.
    """

    __pydantic_config__: ClassVar = _STRICT

    steps: NonNegativeInt = 0
    plan: MicroBatchPlan | None = None
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    format: Literal[1] = 1


_PLAN = TypeAdapter(MicroBatchPlan)
_PERSISTED_PLAN = TypeAdapter(PersistedPlan)


def check_plan(values: Mapping[str, Any], checkpoint: Path) -> MicroBatchPlan:
    """Return the plan in a checkpoint.

    Raises:
        CheckpointError: The plan is of another version of zerowatch.
    """
    try:
        return _PLAN.validate_python(values)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint} has a micro-batch plan of another version of zerowatch "
            f"({first_line(error)}); load it with that version"
        ) from error


class RunFolderOwner(Protocol):
    """Supplies the run folder, which may be created after training started."""

    @property
    def run_folder(self) -> Path | None:
        """The folder; None while there is none."""


class PlanFile:
    """Reads and writes the plan file of a run folder, and logs errors of the disk.

    Args:
        owner: Supplies the run folder; without a folder nothing is written.
    """

    def __init__(self, owner: RunFolderOwner) -> None:
        self._owner = owner
        self._accounted_for: frozenset[Failure] = frozenset()
        self._warned = False

    def read(self, host_group: HostCollectives) -> PersistedPlan | None:
        """Return the newest plan of any rank with the failures of all ranks, the same on all ranks.

        Plans that are written after this call are assumed to take these failures into account.

        Args:
            host_group: Group of all ranks; every rank must call this.
        """
        own = self._read()
        texts = host_group.all_gather_text("" if own is None else _to_text(own))
        plans = [_PERSISTED_PLAN.validate_json(text) for text in texts if text]
        if not plans:
            return None
        failures = {failure for plan in plans for failure in plan.failures}
        self._accounted_for = frozenset(failures)
        newest = max(plans, key=lambda plan: plan.steps)
        return replace(newest, failures=tuple(sorted(failures)))

    def write(
        self,
        plan: MicroBatchPlan | None,
        *,
        steps: int,
        config_changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the plan in use; one rank of each node calls it whenever the plan changes.

        Args:
            plan: The plan.
            steps: Windows committed.
            config_changes: What rebuilds have changed in the caller's ds config.
        """
        with self._locked() as before:
            new = tuple(each for each in before.failures if each not in self._accounted_for)
            self._write(
                PersistedPlan(
                    steps=steps, plan=plan, config_changes=config_changes or {}, failures=new
                )
            )

    def add_failure(self, *, length: int, samples: int) -> None:
        """Record a micro-batch that does not fit, before its out-of-memory error ends this process.

        Args:
            length: Sequence length of the batch, as agreed on between the ranks.
            samples: Samples of the micro-batch.
        """
        with self._locked() as before:
            failures = {*before.failures, Failure(length=length, samples=samples)}
            self._write(replace(before, failures=tuple(sorted(failures))))

    @property
    def path(self) -> Path | None:
        """The file; None without a run folder."""
        return self._folder and self._folder / NAME

    @property
    def _folder(self) -> Path | None:
        return self._owner.run_folder

    @contextmanager
    def _locked(self) -> Iterator[PersistedPlan]:
        """Lock the file against other ranks; wait only briefly, so that a process can end."""
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
            fields = json.loads((self._folder / NAME).read_bytes())
            if isinstance(fields, dict) and "config" in fields:  # of an earlier version
                fields["config_changes"] = fields.pop("config") or {}
            return _PERSISTED_PLAN.validate_json(json.dumps(fields))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning(
                "%s ignored, it is damaged or of another version of zerowatch (%s); the sizes of "
                "micro-batches that ran out of memory are learned again",
                self._folder / NAME,
                first_line(error),
            )
            return None

    def _write(self, plan: PersistedPlan) -> None:
        if self._folder is None:
            return
        try:
            atomic_write(self._folder / NAME, _to_text(plan), durable=True)
        except (OSError, TypeError) as error:  # TypeError: not JSON
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot write %s: %s; a restart will not know what ran out of memory",
                    self._folder / NAME,
                    error,
                )


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)


def _to_text(plan: PersistedPlan) -> str:
    return json.dumps(asdict(plan), indent=1) + "\n"
