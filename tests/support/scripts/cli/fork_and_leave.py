"""Script that forks a child process, which exits in the same way as its parent."""

import os
import sys

child = os.fork()
if child:
    os.waitpid(child, 0)
print("parent" if child else "child", flush=True)
sys.exit(0)
