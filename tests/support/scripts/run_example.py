"""Runs a script of `examples/` without compiling DeepSpeed's shared-memory op."""

import runpy
import sys
from pathlib import Path

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")

# As a script that ends monitoring itself: W&B cannot start once the interpreter has begun to exit.
entry_points = sys.modules.get("zerowatch.runtime.entry_points")
watch = entry_points.current_watch() if entry_points else None
if watch is not None:
    watch.close()
