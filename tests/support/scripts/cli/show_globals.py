"""Script that prints its global variables and arguments, which depend on how it was started."""

import sys

print(sys.argv, sys.path[0])
print(__name__, __file__, __spec__ and __spec__.name, __package__, __cached__, __doc__)
print(type(__loader__).__name__, __loader__.name, __loader__.path, __builtins__)
print(sys.modules["__main__"].__dict__ is globals(), __annotations__)
