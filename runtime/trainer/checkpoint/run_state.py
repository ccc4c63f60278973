"""Reads and writes one rank's state of a run, except its engine, as one file of a checkpoint.

The file holds numbers, text, tensors and arrays, in dicts, lists and tuples, but no other objects.
To load any other object, Python would have to unpickle it. This runs code, and breaks when the
class changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....errors import CheckpointError
from .safe_load import load_plain

_LEAVES = (type(None), bool, int, float, str, bytes)
_ARRAY = "zerowatch.array"  # the key of an array that is written as a tensor
_NUMERIC = "biuf"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run between two windows, except weights, optimizer and schedule of the engine.

    The attributes' names are the keys in the file, except where the field's metadata has a `key`.

    Attributes:
        steps: Windows committed.
        samples: Samples committed, of all ranks together.
        config: The ds config in use.
        config_changes: What rebuilds have changed in the caller's ds config, nested as in it.
        micro_batch_plan: Samples per micro-batch, the failing sizes by length, and all other state
            that decides how the next window is split.
        weight_exponent: `WindowRunner.exponent`: exponent of the power of two closest to the mean
            weight of a sample.
        rng: Python's, numpy's and torch's generators of this rank.
        data: This rank's position in its data: a loader's `state_dict()`.
        compression: Residuals of gradient compression on this rank.
        client_state: The caller's own state.
        shard: Description of this rank's shard of the optimizer (`shard_layout`); None if there is
            none. Checkpoints of earlier versions lack it.
        autocast_scale: State of the GradScaler of `torch_autocast`, which DeepSpeed does not save;
            None if there is none. Checkpoints of earlier versions lack it.
        data_started_by: The attempt of the run that asked to start its data at the beginning and
            not at a saved position (`FolderOwner.attempt`). None if no attempt of this run did, and
            in checkpoints of earlier versions.
    """

    steps: int
    samples: int
    config: Mapping[str, Any]
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_plan: Mapping[str, Any] = field(default_factory=dict)
    weight_exponent: int = 0
    rng: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    compression: Mapping[str, Any] | None = None
    client_state: Any = None
    shard: Sequence[Mapping[str, Any]] | None = None
    autocast_scale: Mapping[str, Any] | None = None
    data_started_by: Mapping[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return a serializable copy on the host.

        Raises:
            CheckpointError: It holds something that is not plain data.
        """
        return {name: to_serializable(getattr(self, name), name) for name in _FIELDS}

    @staticmethod
    def from_plain(values: Any) -> RunState:
        """Return the state that was written.

        Raises:
            CheckpointError: It was written by another version.
        """
        keys = set(_FIELDS)
        if not isinstance(values, dict):
            raise CheckpointError("it is of another program")
        values = {"shard": None, "autocast_scale": None, "data_started_by": None, **values}
        if "rebuilt" in values:  # of an earlier version
            is_rebuilt = values.pop("rebuilt")
            values["config_changes"] = values.get("config") if is_rebuilt else {}
        if values.keys() != keys:
            odd = ", ".join(sorted(keys.symmetric_difference(values)))
            raise CheckpointError(
                f"it was written by another version of zerowatch, which differs in {odd}; "
                "load it with that version"
            )
        return RunState(**{name: from_serializable(values[name]) for name in _FIELDS})


_FIELDS = [each.name for each in fields(RunState)]


def rank_file(checkpoint: Path, rank: int) -> Path:
    """Return the path of a rank's file in the folder of a checkpoint."""
    return checkpoint / f"zerowatch-rank-{rank:05d}.pt"


def write_rank(checkpoint: Path, rank: int, state: RunState) -> None:
    """Write a rank's file.

    Raises:
        OSError: The file cannot be written.
        CheckpointError: The state holds something that is not plain data.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_plain(state.to_plain(), rank_file(checkpoint, rank))


def write_plain(values: Mapping[str, Any], path: Path) -> None:
    """Write what `RunState.to_plain` returned.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        torch.save(values, path)
    except RuntimeError as error:  # torch reports disk errors as RuntimeError
        raise write_error(path, error) from error


def read_rank(checkpoint: Path, rank: int) -> RunState:
    """Read a rank's file.

    Raises:
        CheckpointError: It is missing, damaged, or holds something that is not plain data.
    """
    path = rank_file(checkpoint, rank)
    values = load_plain(path)
    try:
        return RunState.from_plain(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def write_error(path: object, error: Exception) -> OSError:
    """Return an OSError for an error of torch's writer."""
    return OSError(f"{path} cannot be written; is the disk full? ({error})")


def to_serializable(node: Any, path: str) -> Any:
    """Return a copy, on the host, that `torch.load(weights_only=True)` reads back.

    Args:
        node: A tree.
        path: Name of the tree, for the error.

    Raises:
        CheckpointError: It holds an object that is not plain data.
    """
    if isinstance(node, torch.Tensor):
        return node.detach().cpu().clone()  # for a view, torch would write the whole storage
    if isinstance(node, np.generic):
        return to_serializable(node.item(), path)
    if isinstance(node, np.ndarray) and node.dtype.kind in _NUMERIC:
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(node).reshape(node.shape).copy())}
    if isinstance(node, Mapping):
        return {
            _checked_key(key, path): to_serializable(child, f"{path}.{key}")
            for key, child in node.items()
        }
    if type(node) in (list, tuple, torch.Size):
        kind = list if isinstance(node, list) else tuple
        return kind(to_serializable(child, f"{path}[{index}]") for index, child in enumerate(node))
    if type(node) in _LEAVES:
        return node
    raise _type_error(path, node)


def from_serializable(node: Any) -> Any:
    """Return the original tree with copies of its tensors and arrays.

    A tensor that was just read is mapped from the file. The copy allows the file to be deleted.
    """
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, dict):
        if node.keys() == {_ARRAY}:
            return node[_ARRAY].clone().numpy()
        return {key: from_serializable(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(from_serializable(child) for child in node)
    return node


def _checked_key(key: Any, path: str) -> Any:
    if type(key) not in _LEAVES:
        raise _type_error(f"a key of {path}", key)
    return key


def _type_error(path: str, node: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} is of type {type(node).__module__}.{type(node).__qualname__}, which cannot be "
        "saved: only numbers, text, tensors and arrays, in dicts, lists and tuples. Save its "
        "plain parts, for example its state_dict()"
    )
