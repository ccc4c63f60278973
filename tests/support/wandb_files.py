"""Reads the offline files of W&B, which have LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7  # bytes


def rows(folder: Path) -> list[tuple[int, dict[str, object]]]:
    """Return step and values of each row in the one offline run below a folder."""
    (file,) = (path for path in folder.rglob("*.wandb") if "latest-run" not in path.parts)
    found = []
    for data in log_entries(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            row = record.history
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in row.item
            }
            own = {name: value for name, value in values.items() if not name.startswith("_")}
            found.append((row.step.num, own))
    return found


def log_entries(content: bytes) -> Iterator[bytes]:
    position, entry = HEADER, b""  # the file has a header of its own
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
        _, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        entry += content[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):  # the whole entry, or its last part
            yield entry
            entry = b""
