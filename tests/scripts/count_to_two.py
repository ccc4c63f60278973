"""A training script without torch: fails, hangs or ends by rank, as its arguments say."""

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
print(f"out: rank {rank} of {os.environ['WORLD_SIZE']} args {sys.argv[1:]}", flush=True)
print(f"out: run {os.environ.get('ZEROWATCH_RUN_ID')}", flush=True)
if "fail" in sys.argv and rank == 1:
    sys.exit(7)
if "die" in sys.argv and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "fail" in sys.argv or "die" in sys.argv:
    time.sleep(20)  # the agent ends this rank
