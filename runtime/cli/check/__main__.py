"""Runs the check on a rank that a launcher has started: `-m zerowatch.runtime.cli.check`."""

from .command import check

if __name__ == "__main__":
    check()
