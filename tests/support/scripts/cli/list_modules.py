"""Shows whether torch was imported before its first line, and which signals are handled."""

import signal
import sys

print("torch" in sys.modules, "deepspeed" in sys.modules)
print([signal.getsignal(each) for each in sorted(signal.valid_signals())])
print(sys.excepthook is sys.__excepthook__)
