"""Checks a ds config: whether DeepSpeed accepts it, and settings that are known to do harm."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....errors import ZerowatchError
from ....metrics.settings import load_settings
from ...common import accelerator
from ...common.ds_config import file_fault, parse_text, read_zerowatch_block
from ...common.ds_config_errors import misspelled_keys, value_fault
from .verdicts import Finding, Job, failed, ok, skipped, warning

_BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_MODEL_PARALLEL_KEYS = {"tensor_parallel", "sequence_parallel_size", "pipeline"}
# What DeepSpeed raises for a wrong value, besides its own error.
_CONFIG_ERRORS = (AssertionError, AttributeError, LookupError, TypeError, ValueError)
# By the blocks of the config with "enabled": what they do, what to do.
_HARMFUL_BLOCKS: Mapping[str, tuple[str, str]] = {
    "comms_logger": (
        "DeepSpeed synchronizes the device after every collective, so nothing overlaps",
        'remove "comms_logger"; zerowatch measures without it',
    ),
    "flops_profiler": (
        "DeepSpeed also switches wall_clock_breakdown on, which synchronizes the device in each "
        "step",
        'remove "flops_profiler"; zerowatch publishes FLOPs and MFU',
    ),
}
# By keys that are true.
_HARMFUL_KEYS: Mapping[str, tuple[str, str]] = {
    "wall_clock_breakdown": (
        "DeepSpeed synchronizes the device at each timer",
        'remove "wall_clock_breakdown"; zerowatch measures phases without it',
    ),
    "memory_breakdown": (
        "DeepSpeed collects garbage and resets the allocator's peak several times in each step, so "
        "peaks of memory are too low",
        'remove "memory_breakdown"; zerowatch publishes memory by category',
    ),
}
# DeepSpeed's monitors import these packages, and raise an error without them.
_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_LEAST_BUCKET = 100_000


def check_ds_config(job: Job) -> Iterator[Finding]:
    """Check the file that --ds-config names."""
    path = job.ds_config
    if path is None:
        yield skipped("no ds config given; give it with --ds-config")
        return
    try:
        content = parse_text(Path(path).read_text(encoding="utf-8"), unique_keys=True)
    except (OSError, ValueError) as error:
        reason = (file_fault(path) if os.path.exists(path) else "no such file") or str(error)
        yield failed(f"{path}: {' '.join(reason.split())}", "correct the file")
        return
    if not isinstance(content, dict):
        yield failed(f"{path} must hold one JSON object", "give a DeepSpeed configuration")
        return
    faults = [each for check in _CHECKS for each in check(path, content, job)]
    yield from faults
    if not faults:
        yield ok(f"{path}: DeepSpeed accepts it; no setting in it is known to do harm")


def _refused(path: str, content: dict[str, Any], job: Job) -> Iterator[Finding]:
    """Let DeepSpeed read the config."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    known = {key: value for key, value in content.items() if value != "auto"}
    autos = sorted(_autos(content))
    if autos:
        yield ok(
            f'{path}: "auto" at {", ".join(autos)}: Hugging Face\'s Trainer or Accelerate fills it '
            "in; without them, DeepSpeed refuses it"
        )
    # DeepSpeed reads it in this process, as if for one rank.
    given = {key: known.pop(key) for key in _BATCH_KEYS if key in known}
    # The size of the batch is divided over the data-parallel ranks.
    is_split = not content.keys().isdisjoint(_MODEL_PARALLEL_KEYS)
    ranks = None if is_split else job.world_size
    yield from _batch_faults(path, given, bool(set(autos) & set(_BATCH_KEYS)), ranks)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    advice = "correct the value; deepspeed.initialize raises this error"
    try:
        DeepSpeedConfig({**known, "train_micro_batch_size_per_gpu": 1})
    except (*_CONFIG_ERRORS, DeepSpeedConfigError) as error:
        yield failed(f"{path}: DeepSpeed refuses it: {value_fault(error, content)}", advice)
    try:
        load_settings(ds_block=read_zerowatch_block(content))
    except ZerowatchError as error:
        yield failed(f"{path}: {error}", "correct the setting")


def _autos(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


def _batch_faults(
    path: str, given: Mapping[str, Any], has_autos: bool, world_size: int | None
) -> Iterator[Finding]:
    """Check the batch sizes by DeepSpeed's rule, as far as the number of ranks is known."""
    total, micro, steps = (given.get(key) for key in _BATCH_KEYS)
    wrong = {key: value for key, value in given.items() if not _is_size(value)}
    if wrong:
        key, value = next(iter(wrong.items()))
        yield failed(f"{path}: {key} is {value!r}", "give a whole number, 1 or more")
    elif total is None and micro is None and not has_autos:
        yield failed(
            f"{path}: neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            "give train_micro_batch_size_per_gpu",
        )
    elif total is not None and world_size is not None and not has_autos:
        parts = (micro or 1) * (steps or 1) * world_size
        if total % parts or (micro is not None and steps is not None and total != parts):
            yield failed(
                f"{path}: train_batch_size {total} is not micro-batch size x accumulation steps x "
                f"{world_size} ranks (here {micro or 'any'} x {steps or 'any'} x {world_size})",
                "change one of them",
            )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _misspelled(path: str, content: dict[str, Any], job: Job) -> Iterator[Finding]:
    for key, meant in misspelled_keys(content):
        yield warning(f"{path}: DeepSpeed ignores the unknown key {key!r}", f"write {meant!r}")


def _harmful(path: str, content: dict[str, Any], job: Job) -> Iterator[Finding]:
    for key, (effect, advice) in _HARMFUL_BLOCKS.items():
        if _is_enabled(content, key):
            yield warning(f"{path}: {key} is enabled: {effect}", advice)
    for key, (effect, advice) in _HARMFUL_KEYS.items():
        if content.get(key) is True:
            yield warning(f"{path}: {key} is true: {effect}", advice)
    zero = content.get("zero_optimization")
    bucket = zero.get("reduce_bucket_size") if isinstance(zero, Mapping) else None
    if isinstance(bucket, int | float) and 0 < bucket < _LEAST_BUCKET:
        yield warning(
            f"{path}: zero_optimization.reduce_bucket_size {bucket:g} makes one collective of each "
            f"{bucket:g} gradients, so latency dominates",
            "leave it out (5e8), or give 5e6 and more",
        )


def _is_enabled(content: Mapping[str, Any], key: str) -> bool:
    block = content.get(key)
    return isinstance(block, Mapping) and block.get("enabled") is True


def _unsupported(path: str, content: dict[str, Any], job: Job) -> Iterator[Finding]:
    """Find what this machine lacks: bf16, packages of monitors, the folder of NVMe offload."""
    device = accelerator.current
    has_bf16 = _is_enabled(content, "bf16") or _is_enabled(content, "bfloat16")
    if has_bf16 and device.is_available() and not device.module.is_bf16_supported(False):
        yield failed(
            f"{path}: bf16 is enabled, which {device.device_name(device.current_device())} does "
            "not compute",
            'use "fp16" on this GPU',
        )
    for key, package in _MONITOR_PACKAGES.items():
        if _is_enabled(content, key) and importlib.util.find_spec(package) is None:
            yield failed(
                f"{path}: {key} is enabled, but the package {package} is not installed",
                f"pip install {package}, or remove the block",
            )
    zero = content.get("zero_optimization")
    for name in ("offload_param", "offload_optimizer"):
        block = zero.get(name) if isinstance(zero, Mapping) else None
        if not isinstance(block, Mapping) or block.get("device") != "nvme":
            continue
        folder = block.get("nvme_path")
        if not isinstance(folder, str) or not _can_be_written(folder):
            yield failed(
                f"{path}: zero_optimization.{name}.nvme_path {folder!r} is not a writable folder",
                "give a folder on a local NVMe disk",
            )


def _can_be_written(folder: str) -> bool:
    """Return whether a folder, or the one in which DeepSpeed creates it, can be written."""
    path = Path(folder).absolute()
    existing = next(each for each in (path, *path.parents) if os.path.exists(each))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


_CHECKS: tuple[Callable[[str, dict[str, Any], Job], Iterator[Finding]], ...] = (
    _refused,
    _misspelled,
    _harmful,
    _unsupported,
)
