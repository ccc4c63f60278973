"""A fake rank: writes its liveness file and a record for each step, and holds 8 MiB more a step.

Arguments: the runs folder, the host's name, how many steps at most, and the cgroup to move into.
Waits at the end to be killed.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from fakes.steps import step

from zerowatch.metrics.settings import RunLogSettings
from zerowatch.runtime.common.liveness_file import LivenessFile
from zerowatch.runtime.devices.host_memory import HostMemory
from zerowatch.runtime.monitor.step_log import StepLog

for cgroup in sys.argv[4:]:
    Path(cgroup, "cgroup.procs").write_text("0")
runs, host, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder = runs / "one"
LivenessFile(folder, 0, host).open()
log = StepLog(folder, {"rank": 0}, RunLogSettings())
memory, held = HostMemory(reset_peak=True), []
for number in range(1, steps + 1):
    held.append(os.urandom(8 * 2**20))
    record = replace(
        step(number),
        ended_at_unix_seconds=time.time(),
        memory_bytes={"cpu": memory.read()},
        micro_batch_shapes=[(8, 128 * number)],
        oom_risk_ratio={"cpu": min(1.0, number / 20)},
    )
    log.append(record)
    print(number, flush=True)
time.sleep(60)
