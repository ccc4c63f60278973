"""Training script without torch, whose ranks fail, hang or exit as its arguments say."""

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
# In one write each: print may write its newline apart, and the ranks share a pipe.
os.write(1, f"out: rank {rank} of {os.environ['WORLD_SIZE']} args {sys.argv[1:]}\n".encode())
run = os.environ.get("ZEROWATCH_RUN_ID") or os.environ.get("_ZEROWATCH_RUN_ID")
os.write(1, f"out: run {run}\n".encode())
if "leave" in sys.argv and rank == 0:
    with open("left", "w"):
        sys.exit(0)
if "leave" in sys.argv:
    while not os.path.exists("left"):
        time.sleep(0.01)
    time.sleep(0.5)  # rank 0 ends; both exits may be seen at once
    sys.exit(7)
if "fail" in sys.argv and rank == 1:
    sys.exit(7)
if "die" in sys.argv and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "fail" in sys.argv or "die" in sys.argv:
    time.sleep(120)  # the agent ends this rank
