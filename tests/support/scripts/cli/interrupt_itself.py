"""Script that sends itself SIGINT, as Ctrl-C does."""

import os
import signal
import time

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
