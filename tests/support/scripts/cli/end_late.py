"""Script that keeps running in a thread and in an exit handler after its last line."""

import atexit
import pickle
import threading


class Kept:
    """A class that an exit handler pickles."""


def late(where):
    """Pickle by name, which needs this script's module."""
    print(where, type(pickle.loads(pickle.dumps(Kept()))).__name__)


def work():
    """Run after the main thread has ended."""
    threading.main_thread().join()
    late("thread")


atexit.register(late, "exit")
threading.Thread(target=work).start()
print("last line")
