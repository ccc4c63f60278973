"""Script that sends itself SIGINT, as Ctrl-C does."""

import os
import signal
import time

os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
