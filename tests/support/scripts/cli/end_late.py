"""Script that keeps running in a thread and in an exit handler after its last line."""

import atexit
import pickle
import threading
import time


class Kept:
    """A class that is still there at the end."""


def late(where):
    """Pickle by name, which needs this script's module."""
    print(where, type(pickle.loads(pickle.dumps(Kept()))).__name__)


def work():
    """Go on after the main thread is done."""
    time.sleep(0.1)
    late("thread")


atexit.register(late, "exit")
threading.Thread(target=work).start()
print("last line")
