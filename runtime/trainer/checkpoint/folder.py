"""Manages the folder of a run's checkpoints; each checkpoint is complete or absent.

    FOLDER/latest                    name of the checkpoint to load; DeepSpeed's tools read it too
    FOLDER/step-00000012/            a complete checkpoint, described by zerowatch.json in it
    FOLDER/.partial-step-00000013/   an incomplete checkpoint: being written, or left by a kill

A checkpoint becomes complete by one rename, and `latest` is updated after that.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write, sync

logger = logging.getLogger(__name__)

LATEST = "latest"
MANIFEST = "zerowatch.json"
FORMAT = 3  # version of the manifest's format
_FORMAT_BEFORE = 2  # with `rebuilt` instead of `config_changes`
_COMPLETE = re.compile(r"step-(\d{8,})(-\d+)?")
_CHUNK_BYTES = 2**20
_MAX_SAVE_NUMBER = 2**53  # the ranks exchange them as float64
_PARTIAL_PREFIX = ".partial-"
_PARTIAL = re.compile(re.escape(_PARTIAL_PREFIX) + _COMPLETE.pattern)
_TEMPORARY_LATEST = re.compile(rf"\.{LATEST}\.[0-9a-f]+")


class CheckpointFolder:
    """Lists, commits and deletes the checkpoints in a folder, which the first write creates."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_other_paths(self) -> None:
        """Check that the path, if it exists, can be a folder of checkpoints.

        Raises:
            CheckpointError: It is a file, or itself a checkpoint.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder; pass the folder given to `save`")
        if (self.path / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.path} is itself a checkpoint; pass its parent folder {self.path.parent}, "
                f"whose file `{LATEST}` names the checkpoint to load"
            )

    def prepare(self) -> None:
        """Create the folder, and remove incomplete checkpoints that killed processes left.

        A folder that cannot be removed is logged and stays. On NFS a deleted file that a process
        still has open becomes `.nfs...`, which cannot be deleted (EBUSY), nor can its folder.

        Raises:
            OSError: The folder cannot be created or read.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir():
            try:
                if _PARTIAL.fullmatch(entry.name):
                    shutil.rmtree(entry)
                elif _TEMPORARY_LATEST.fullmatch(entry.name):
                    entry.unlink()
            except OSError as error:
                shutil.rmtree(entry, ignore_errors=True)  # removes as much as possible
                logger.warning(
                    "the unfinished %s cannot be deleted: %s; the next save tries again",
                    entry,
                    error,
                )

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, in no order."""
        if not self.path.is_dir():
            return []
        return [entry.name for entry in self.path.iterdir() if self.is_complete(entry.name)]

    def is_complete(self, name: str) -> bool:
        """Return whether there is a complete checkpoint of that name."""
        return _COMPLETE.fullmatch(name) is not None and self.manifest(name).is_file()

    def save_numbers(self) -> dict[str, int]:
        """Return the save number of each complete checkpoint whose manifest can be read."""
        save_numbers = {}
        for name in self.names():
            with suppress(CheckpointError):
                save_numbers[name] = read_manifest(self.manifest(name)).serial
        return save_numbers

    def latest(self) -> str | None:
        """Return the name in the file `latest`; None if there is no such file.

        Raises:
            OSError: It cannot be read.
        """
        try:
            return (self.path / LATEST).read_bytes().decode(errors="backslashreplace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def newest(self, before: str | None = None) -> Candidate | None:
        """Return the checkpoint with the highest save number; None if there is none.

        Args:
            before: Name of a checkpoint. If it is given, only earlier checkpoints with at most as
                many steps count. If its manifest cannot be read, its save number is unknown.
        """
        save_numbers = self.save_numbers()
        limit = save_numbers.get(before or "", _MAX_SAVE_NUMBER)
        candidates = [
            Candidate(save_number, name)
            for name, save_number in save_numbers.items()
            if name != before and save_number < limit and _steps(name) <= _steps(before)
        ]
        return max(candidates, default=None)

    def manifest(self, name: str) -> Path:
        """Return the path of a checkpoint's manifest."""
        return self.path / name / MANIFEST

    def next_repeat(self, steps: int) -> int:
        """Return the next free repeat number of a step; lower numbers may be free too.

        The number of existing checkpoints of the step may not be free, because older checkpoints
        are deleted first. A folder that `prepare` could not remove takes a number too, because a
        new checkpoint must not contain the files of that folder.
        """
        first = checkpoint_name(steps, 0)
        entries = [entry.name.removeprefix(_PARTIAL_PREFIX) for entry in self.path.iterdir()]
        names = [name for name in entries if _COMPLETE.fullmatch(name)]
        later = [
            int(name.removeprefix(f"{first}-")) for name in names if name.startswith(f"{first}-")
        ]
        return max([first in names, *later])

    def commit(self, name: str) -> None:
        """Make a partial checkpoint complete and the latest; its files must be on the disk.

        Raises:
            OSError: The disk fails; the latest checkpoint stays the latest.
        """
        (self.path / partial_name(name)).rename(self.path / name)
        sync(self.path)
        atomic_write(self.path / LATEST, name, durable=True)

    def remove(self, name: str) -> None:
        """Delete a checkpoint; after an interrupted deletion the checkpoint does not look complete.

        Raises:
            OSError: The disk fails, or a file is in use on NFS; `prepare` deletes the rest.
        """
        partial = self.path / partial_name(name)
        (self.path / name).rename(partial)
        shutil.rmtree(partial)


class Candidate(NamedTuple):
    """A checkpoint that may be loaded: its save number and its name."""

    save_number: int
    name: str


class DamagedCheckpointError(CheckpointError):
    """A checkpoint has lost or changed bytes; an earlier checkpoint may be whole."""


def checkpoint_name(steps: int, repeat: int) -> str:
    """Return the name of a checkpoint; `repeat` distinguishes checkpoints of the same step."""
    return f"step-{steps:08d}" + (f"-{repeat + 1}" if repeat else "")


def partial_name(name: str) -> str:
    """Return the name of a checkpoint while it is being written."""
    return f"{_PARTIAL_PREFIX}{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """Size of a file in bytes, and the CRC-32 of its content."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    size: NonNegativeInt
    crc32: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties in which an engine must equal the engine that the checkpoint was written from.

    Attributes:
        zero_stage: 0 to 3.
        world_size: Number of ranks.
        data_parallel_size: Ranks over which the optimizer's state is sharded.
        optimizer: Types of DeepSpeed's optimizer and of the optimizer that it wraps.
        dtypes: Dtypes of the model and of accumulated gradients.
        parameters: Full shape of each parameter, by its name.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    zero_stage: int
    world_size: int
    data_parallel_size: int
    optimizer: str
    dtypes: str
    parameters: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest of a checkpoint: the contents of its file `zerowatch.json`.

    Attributes:
        serial: The save number. It increases with each checkpoint, even after an older checkpoint
            was loaded.
        steps: Windows committed.
        samples: Samples committed, of all ranks together.
        micro_steps: DeepSpeed's own count of micro-batches.
        engine: Properties of the engine.
        config: The engine's ds config.
        config_changes: What rebuilds have changed in the caller's ds config, nested as in it.
        files: All other files of the checkpoint, by name.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    serial: Annotated[int, Field(gt=0, lt=_MAX_SAVE_NUMBER)]
    steps: NonNegativeInt
    samples: NonNegativeInt
    micro_steps: NonNegativeInt
    engine: EngineInfo
    config: Mapping[str, Any]
    config_changes: Mapping[str, Any]
    files: Mapping[str, FileInfo]

    def to_json(self) -> str:
        """Return the manifest as JSON text.

        Raises:
            CheckpointError: The ds config holds something that JSON cannot represent.
        """
        try:
            return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        except TypeError as error:
            raise CheckpointError(
                f"the ds config cannot be saved: {error}; use numbers and text in it"
            ) from error


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        DamagedCheckpointError: The manifest is missing or damaged.
        CheckpointError: The manifest has an unsupported format.
    """
    try:
        fields = json.loads(path.read_bytes())
        written = fields.pop("format")
        if written == _FORMAT_BEFORE:
            fields["config_changes"] = fields["config"] if fields.pop("rebuilt") else {}
        if written in (_FORMAT_BEFORE, FORMAT):
            return _MANIFEST.validate_json(json.dumps(fields))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read ({first_line(error)}): {path.parent} is no complete checkpoint "
            f"of a TrainingRun. {recovery_hint(path.parent.parent)}"
        ) from error
    raise CheckpointError(
        f"{path} is of format {written!r:.20}; this version of zerowatch reads formats "
        f"{_FORMAT_BEFORE} and {FORMAT}; load it with the version that wrote it"
    )


_MANIFEST = TypeAdapter(Manifest)


def first_line(error: Exception) -> str:
    """Return an error as one line; for a pydantic error, the first wrong field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return str(error).partition("\n")[0] or type(error).__name__


def file_info(path: Path) -> FileInfo:
    """Read a file, and return its size and checksum; takes about 0.8 s per GiB on one core.

    CRC-32 detects damage, but does not protect against forgery.

    Raises:
        OSError: It cannot be read.
    """
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileInfo(size=size, crc32=crc)


def check_files(folder: Path, files: Mapping[str, FileInfo]) -> None:
    """Check that files of a checkpoint have the size and the checksum in the manifest.

    All files are read once: about 0.8 s per GiB on one core, or as fast as the disk.

    Raises:
        DamagedCheckpointError: A file is missing or has another content.
        OSError: A file cannot be read.
    """
    wrong = "; ".join(_wrong_files(folder, files))
    if wrong:
        raise DamagedCheckpointError(
            f"the checkpoint {folder} is damaged: {wrong}. {recovery_hint(folder.parent)}"
        )


def check_engine(folder: Path, saved: EngineInfo, now: EngineInfo) -> None:
    """Check that a checkpoint can be loaded into an engine.

    Raises:
        CheckpointError: The checkpoint does not match the engine; the message says what to do.
    """
    model_ranks = saved.world_size // saved.data_parallel_size
    model_ranks_now = now.world_size // now.data_parallel_size
    differences = [
        (model_ranks, model_ranks_now, "rank(s) for each copy of the model", _SAME_RANKS),
        (saved.zero_stage, now.zero_stage, "as ZeRO stage", _SAME_CONFIG),
        (saved.dtypes, now.dtypes, "as data types", _SAME_CONFIG),
        (saved.optimizer, now.optimizer, "as optimizer", _SAME_CONFIG),
    ]
    for before, after, what, advice in differences:
        if before != after:
            raise CheckpointError(
                f"the checkpoint {folder} was written with {before} {what}, this run has {after}: "
                f"{advice}"
            )
    wrong = next(_wrong_parameters(saved.parameters, now.parameters), None)
    if wrong is not None:
        raise CheckpointError(
            f"the checkpoint {folder} is of another model: {wrong}. Use the same model, or another "
            "folder for this run"
        )


_SAME_RANKS = (
    "only the number of copies of the model may change. Start as many ranks as then; DeepSpeed's "
    "ds_to_universal converts its files for any number of ranks"
)
_SAME_CONFIG = (
    "the layout of the files depends on it. Load with the ds config that zerowatch.json there "
    "holds under `config`, and rebuild the engine afterwards"
)


def recovery_hint(folder: Path) -> str:
    """Return the part of an error message that says what to do if a checkpoint cannot be used.

    Args:
        folder: The folder of all checkpoints.
    """
    return (
        "To load the last undamaged one before it, call `load` with fallback=True; to load a "
        f"certain one, write its name into {folder / LATEST}; to start from scratch, use another "
        "folder"
    )


def _steps(name: str | None) -> int:
    """Return the steps in a checkpoint's name; no limit for another name."""
    match = _COMPLETE.fullmatch(name or "")
    return int(match[1]) if match else _MAX_SAVE_NUMBER


def _wrong_files(folder: Path, files: Mapping[str, FileInfo]) -> Iterator[str]:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != expected.size:
            yield f"{name} has {path.stat().st_size} bytes instead of {expected.size}"
        elif file_info(path) != expected:
            yield f"{name} has changed since it was written (checksum)"


def _wrong_parameters(
    saved: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    for name in saved.keys() | now.keys():
        if name not in now:
            yield f"it has a parameter {name}, which this model lacks"
        elif name not in saved:
            yield f"it lacks the parameter {name}"
        elif list(saved[name]) != list(now[name]):
            yield f"its {name} has shape {list(saved[name])}, this model's {list(now[name])}"
