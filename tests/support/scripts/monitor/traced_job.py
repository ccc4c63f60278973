"""Trains without and with monitoring that sends OTLP; reports what differed."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from compare_monitored import CONFIGURATIONS, compare

if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    logging.getLogger("somebody.else").warning("a line of the script's own")
    found = compare(dict(CONFIGURATIONS["stage 2"]))
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
