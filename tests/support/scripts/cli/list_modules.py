"""Script that prints whether torch was imported before it, and which signals have handlers."""

import signal
import sys

print("torch" in sys.modules, "deepspeed" in sys.modules)
print([signal.getsignal(each) for each in sorted(signal.valid_signals())])
print(sys.excepthook is sys.__excepthook__)
