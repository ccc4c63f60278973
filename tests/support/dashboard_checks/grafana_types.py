"""Checks dashboards with TypeScript against the types that Grafana publishes per release.

A dashboard is written as literals: the compiler refuses unknown keys and wrong enum values.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from package_tree import ROOT
from require import program

SOURCES = ROOT / "tests" / "dashboards" / "types"
CACHE = ROOT / ".build" / "grafana-types"
RELEASES = ("11", "12", "13")
INSTALL_SECONDS = 300

Json = dict[str, Any]


def installed() -> Path:
    """Return the folder with Grafana's types, installed once, or skip."""
    npm = program("npm", apt="npm")
    program("node", apt="nodejs")
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = (SOURCES / "package-lock.json").read_text()
    mark = CACHE / "installed-package-lock.json"
    if mark.is_file() and mark.read_text() == lock:
        return CACHE
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCES / name, CACHE)
    command = [npm, "ci", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund"]
    result = subprocess.run(
        command, cwd=CACHE, capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    if result.returncode != 0:
        pytest.skip(f"needs Grafana's types from npm's registry: {result.stderr[-300:]}")
    mark.write_text(lock)
    return CACHE


def complaints(dashboards: dict[str, Json], release: str, folder: Path) -> str:
    """Return the compiler's errors for dashboards and the types of a release; empty if none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shapes.ts").write_text(shapes(release))
    for name, dashboard in dashboards.items():
        (folder / f"{name}.ts").write_text(as_literals(dashboard))
    (folder / "tsconfig.json").write_text(json.dumps(compiler_options(dashboards)))
    compiler = CACHE / "node_modules" / ".bin" / "tsc"
    result = subprocess.run(
        [compiler, "-p", folder], capture_output=True, text=True, cwd=folder, timeout=120
    )
    return result.stdout + result.stderr


def shapes(release: str) -> str:
    """Return our TypeScript types, built on those of a Grafana release."""
    text = (SOURCES / "shapes.ts").read_text()
    text = text.replace("'@grafana/schema", f"'grafana-schema-{release}")
    if release == "11":  # its package names its files by their ending
        text = text.replace("_types.gen'", "_types.gen.js'")
    return text


def compiler_options(dashboards: dict[str, Json]) -> Json:
    return {
        "compilerOptions": {
            "strict": True,
            "noEmit": True,
            "module": "esnext",
            "moduleResolution": "bundler",
            "target": "es2022",
            "skipLibCheck": True,
            "types": [],
        },
        "files": [f"{name}.ts" for name in dashboards],
    }


def as_literals(dashboard: Json) -> str:
    """Write a dashboard as TypeScript: each of its parts a constant of the type it should have."""
    parts = ["import type { Annotation, Frame, Panels, Variable } from './shapes';"]
    frame = {
        key: value
        for key, value in dashboard.items()
        if key not in ("annotations", "panels", "templating")
    }
    parts.append(constant("frame", "Frame", frame))
    for index, variable in enumerate(dashboard["templating"]["list"]):
        parts.append(constant(f"variable{index}", "Variable", variable))
    for index, annotation in enumerate(dashboard["annotations"]["list"]):
        parts.append(constant(f"annotation{index}", "Annotation", annotation))
    for row in dashboard["panels"]:
        for panel in ({**row, "panels": []}, *row["panels"]) if row["type"] == "row" else (row,):
            parts.append(constant(f"panel{panel['id']}", f"Panels['{panel['type']}']", panel))
    return "\n".join(parts)


def constant(name: str, kind: str, value: Any) -> str:
    return f"export const {name}: {kind} = {json.dumps(value, indent=2)};"
