"""Runs the check on a rank that a launcher has started: `-m zerowatch.runtime.cli.check`."""

# Under `zerowatch run`, the import of torch imports modules that the check would import it from.
import torch  # noqa: F401

from .command import check

if __name__ == "__main__":
    check()
