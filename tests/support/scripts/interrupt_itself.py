"""Is interrupted, as by Ctrl-C."""

import os
import signal
import time

os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
