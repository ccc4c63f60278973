"""Compares the ranks' data: differing datasets or orders would lose or repeat samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...common.host_group import HostCollectives


def rank_differences(host_group: HostCollectives, values: Mapping[str, Any]) -> str | None:
    """Return a text that names the values that differ between the ranks; None if all are equal.

    All ranks must call this function. All ranks get the same text.

    Args:
        host_group: Group of all ranks.
        values: This rank's values by name: numbers, text, and lists of these.
    """
    texts = host_group.all_gather_text(json.dumps(values, default=_plain))
    first, *others = (json.loads(text) for text in texts)
    differences = []
    for name, value in first.items():
        for rank, other in enumerate(others, start=1):
            if name in other and other[name] != value:
                differences.append(f"{name} is {value} on rank 0 and {other[name]} on rank {rank}")
                break
    return "; ".join(differences) or None


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
