"""How many micro-batches make a step, by the three batch sizes of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_reader import AUTO, ConfigReader

TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def micro_batches(config: Mapping[str, Any], data_parallel: int, origin: str = "ds config") -> int:
    """Return the micro-batches of one step on one rank, as DeepSpeed works them out.

    Raises:
        DsConfigError: They do not divide over the ranks, or are not given.
    """
    reader = ConfigReader(config, origin)
    note_auto(reader)
    reader.raise_for_auto()
    total, micro, steps = (
        None if config.get(key) in (None, AUTO) else reader.size(key, 1, least=1)
        for key in (TOTAL, MICRO, ACCUMULATION)
    )
    if total is None and micro is None and AUTO not in (config.get(TOTAL), config.get(MICRO)):
        reader.refuse(f"{TOTAL} or {MICRO} is missing; give one of them")
    if steps is None:
        steps = total // (micro * data_parallel) if total and micro else 1
    if total is not None:
        micro = total // (steps * data_parallel) if micro is None and steps else micro
        if not steps or total != (micro or 0) * steps * data_parallel:
            reader.refuse(
                f"{TOTAL} {total} is not {MICRO} {micro} x {ACCUMULATION} {steps} x "
                f"{data_parallel} data-parallel ranks; change one of them"
            )
    return steps


def note_auto(reader: ConfigReader) -> None:
    """Have the reader note the accumulation steps, if "auto" and not to be worked out."""
    known = [key for key in (TOTAL, MICRO) if reader.block.get(key) not in (None, AUTO)]
    if len(known) < 2:
        reader.number(ACCUMULATION, 1)
