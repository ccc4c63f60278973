"""Leaves with the code, or the message, in its arguments."""

import sys

code = sys.argv[1]
sys.exit(int(code) if code.isdigit() else code)
