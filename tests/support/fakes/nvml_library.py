"""A shared library in place of NVIDIA's libnvidia-ml.so.1, which the real pynvml loads.

`nvml_library.c` is compiled by gcc. A text file, which the library reads at each call, scripts its
answers. With it, the names of symbols and the layouts of structures are tested, not only our calls.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

SOURCE = Path(__file__).with_suffix(".c")
# A healthy H100: figures by the keys of nvml_library.c, in NVML's own units.
HEALTHY: Mapping[str, object] = {
    "driver": "580.95.05",
    "cuda_version": 13000,
    "0.uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "0.name": "NVIDIA H100 80GB HBM3",
    "0.pci_bus_id": "00000000:1B:00.0",
    "0.utilization": 97,
    "0.power": 650_000,
    "0.temperature": 61,
    "0.clock1": 1980,
    "0.energy": 5_000_000,
    "0.threshold1": 88,
    "0.reasons": 0,
    "0.supported_reasons": 0x1FF,
    "0.ecc0.0": 3,
    "0.ecc1.0": 0,
    "0.rows_corrected": 1,
    "0.rows_uncorrected": 2,
    "0.remap_pending": 0,
    "0.remap_failed": 0,
    "0.pcie_replays": 4,
    **{f"0.link{link}.{kind}": 0 for link in range(18) for kind in range(3)},
    "0.event_types": 8,
    "0.memory_total": 81559 * 2**20,
    "0.memory_used": 500 * 2**20,
    "0.bus_width": 5120,
    "0.max_clock2": 2619,
    "0.pcie_generation": 1,  # idle
    "0.pcie_max_generation": 5,
    "0.pcie_lanes": 16,
    "0.pcie_max_lanes": 16,
}


class NvmlLibrary:
    """The library, loaded by a fresh pynvml.

    Args:
        monkeypatch: Undoes everything at the end of the test.
        script: Where the answers are written.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
        self._script = script
        self._figures: dict[str, object] = {}
        monkeypatch.setenv("FAKE_NVML", str(script))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        self.pynvml: Any = importlib.import_module("pynvml")
        monkeypatch.setitem(sys.modules, "pynvml", self.pynvml)
        self._library = load(self.pynvml, compiled())
        self._before = self._counters()
        self.script(HEALTHY)

    def script(self, figures: Mapping[str, object]) -> None:
        """Change answers. A figure that is None is not supported from now on."""
        self._figures |= figures
        write_answers(self._script, self._figures)

    @property
    def left_open(self) -> tuple[int, int]:
        """How often this test has NVML initialized, and how many event sets it has not freed."""
        opened, sets = self._counters()
        return opened - self._before[0], sets - self._before[1]

    def _counters(self) -> tuple[int, int]:
        names = ("fake_nvml_opened", "fake_nvml_event_sets")
        opened, sets = (ctypes.c_int.in_dll(self._library, name).value for name in names)
        return opened, sets


def load(pynvml: Any, library: Path) -> ctypes.CDLL:
    """Let a module pynvml use the library; return it.

    On a machine with a GPU, the name of the library would find NVIDIA's own.
    """
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    return pynvml.nvmlLib


def write_answers(script: Path, figures: Mapping[str, object]) -> None:
    """Write what the library answers from now on. A figure that is None is not supported."""
    lines = [f"{key} {value}\n" for key, value in figures.items() if value is not None]
    draft = script.with_suffix(".draft")
    draft.write_text("".join(lines))
    os.replace(draft, script)


@cache
def compiled() -> Path:
    """Return the path of the compiled library."""
    library = Path(mkdtemp(prefix="zerowatch-nvml-")) / "libnvidia-ml.so.1"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, "-o", str(library), str(SOURCE)], check=True)
    return library
