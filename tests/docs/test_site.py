"""The documentation is built without a warning: no broken link, no unknown name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from package_tree import ROOT

from zerowatch.metrics.catalog import CATALOG


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    table = (tmp_path / "reference" / "metrics.html").read_text()
    assert [spec.name for spec in CATALOG if f"<code>{spec.name}</code>" not in table] == []
