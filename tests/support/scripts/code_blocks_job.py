"""Runs Python files, each in a process forked from this one and in the folder of the file.

Usage: code_blocks_job.py FILE... For each it writes FILE.log with the output, and FILE.code with
the exit code. The files share one import of transformers, which takes longer than all else.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import deepspeed
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401 - what the files import

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes two minutes


def main(files: list[Path]) -> Path | None:
    """Fork a process for each file; return the file in the child, None at the end."""
    for file in files:
        pid = os.fork()
        if pid == 0:
            return file
        _, status = os.waitpid(pid, 0)
        file.with_suffix(".code").write_text(str(os.waitstatus_to_exitcode(status)))
    return None


if __name__ == "__main__":
    own = main([Path(word) for word in sys.argv[1:]])
    if own is not None:
        os.chdir(own.parent)
        with own.with_suffix(".log").open("w") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
        sys.argv = [str(own)]
        runpy.run_path(str(own), run_name="__main__")
