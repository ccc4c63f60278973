"""Script that prints its uncaught errors with its own `sys.excepthook`."""

import sys
import traceback


def show(kind, error, trace):
    """Print the error and the functions of its traceback."""
    print("hook:", kind.__name__, error, [frame.name for frame in traceback.extract_tb(trace)])


sys.excepthook = show
raise LookupError("no such row")
