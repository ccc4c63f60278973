"""Script that exits with the code or the message that is its argument."""

import sys

code = sys.argv[1]
sys.exit(int(code) if code.isdigit() else code)
