"""What a save holds, said before any of it is loaded: JSON, and the checks on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ....errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What decides whether an engine can take a save up.

    Attributes:
        zero_stage: 0 to 3.
        world_size: Ranks.
        data_parallel_size: Ranks over which the optimizer's state is sharded.
        optimizer: Types of DeepSpeed's optimizer and of the one below it.
        dtypes: Of the model and of accumulated gradients.
        parameters: Shape of each parameter, whole, by its name.
    """

    zero_stage: int
    world_size: int
    data_parallel_size: int
    optimizer: str
    dtypes: str
    parameters: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands in `zerowatch.json`.

    Attributes:
        serial: Rises from save to save; steps do not where an older save was taken up again.
        steps: Windows committed.
        samples: Samples committed, of all ranks together.
        micro_steps: DeepSpeed's count of the engine.
        engine: The engine that was saved.
        config: The DeepSpeed configuration it was made with.
        rebuilt: Whether that is another than the caller's.
        files: Size of each file in bytes, by name.
    """

    serial: int
    steps: int
    samples: int
    micro_steps: int
    engine: EngineFacts
    config: Mapping[str, Any]
    rebuilt: bool
    files: Mapping[str, int]

    def to_json(self) -> str:
        """Write it.

        Raises:
            CheckpointError: The configuration holds what JSON has no words for.
        """
        try:
            return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        except TypeError as error:
            raise CheckpointError(
                f"the DeepSpeed configuration cannot be saved: {error}; give what stands there as "
                "a number or as text"
            ) from error


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: There is none that this version understands.
    """
    try:
        fields = json.loads(path.read_bytes())
        written = fields.pop("format")
        if written == FORMAT:
            return Manifest(**{**fields, "engine": EngineFacts(**fields["engine"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so that what stands beside it is no whole save of "
            f"a TrainingRun. {recovery_hint(path.parent)}"
        ) from error
    raise CheckpointError(
        f"{path} is of format {written}, and this version of zerowatch reads format {FORMAT}; "
        "load it with the version that wrote it"
    )


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Check that all files are there, in full length.

    Raises:
        CheckpointError: They are not.
    """
    wrong = "; ".join(_wrong_files(folder, files))
    if wrong:
        raise CheckpointError(f"the save {folder} is damaged: {wrong}. {recovery_hint(folder)}")


def check_engine(folder: Path, saved: EngineFacts, now: EngineFacts) -> None:
    """Check that an engine can take a save up.

    Raises:
        CheckpointError: It cannot; the text says what to do.
    """
    differences = [
        (saved.world_size, now.world_size, "rank(s)", _SAME_RANKS),
        (saved.data_parallel_size, now.data_parallel_size, "data-parallel rank(s)", _SAME_RANKS),
        (saved.zero_stage, now.zero_stage, "as ZeRO stage", _SAME_CONFIG),
        (saved.dtypes, now.dtypes, "as data types", _SAME_CONFIG),
        (saved.optimizer, now.optimizer, "as optimizer", _SAME_CONFIG),
    ]
    for before, after, what, advice in differences:
        if before != after:
            raise CheckpointError(
                f"the save {folder} was written with {before} {what}, this run has {after}: "
                f"{advice}"
            )
    wrong = next(_wrong_parameters(saved.parameters, now.parameters), None)
    if wrong is not None:
        raise CheckpointError(
            f"the save {folder} is of another model: {wrong}. Make the model as it was, or save "
            "this run in a folder of its own"
        )


_SAME_RANKS = (
    "each rank's file holds its own part of the optimizer's state. Start as many ranks as then; "
    "DeepSpeed's ds_to_universal turns its files into ones for any number"
)
_SAME_CONFIG = (
    "the files are laid out for it. Load with the configuration that zerowatch.json there holds "
    "under `config`, and rebuild the engine afterwards"
)


def recovery_hint(save: Path) -> str:
    """Say what to do where a save cannot be used."""
    return (
        f"To go on from an earlier one, write its name into {save.parent / 'latest'}; to begin "
        "anew, use another folder"
    )


def _wrong_files(folder: Path, files: Mapping[str, int]) -> Iterator[str]:
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes in place of {size}"


def _wrong_parameters(
    saved: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    for name in saved.keys() | now.keys():
        if name not in now:
            yield f"it has a parameter {name}, which this model has not"
        elif name not in saved:
            yield f"it has no parameter {name}"
        elif list(saved[name]) != list(now[name]):
            yield f"its {name} is of shape {list(saved[name])}, here of {list(now[name])}"
