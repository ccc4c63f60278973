"""Documents: the files they name exist, front matter is read, train.sbatch does what they state."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from package_tree import ROOT

from zerowatch.metrics.settings import RUN_ID_PATTERN

DOCUMENTS = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md")
    for file in ROOT.glob(pattern)
)
TREE_PATH = re.compile(r"(?<![\w/.-])(?:runtime|metrics|dashboards|docker|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
WHERE_TO_CHANGE = re.compile(
    r"^\| [^|]+ \| ([^|]*`(?:runtime|metrics|dashboards)/[^|]*) \| ([^|]*) \|$", re.M
)
CODE = re.compile(r"`([^`]+)`")
FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()

    missing = {name for name in TREE_PATH.findall(text) if not (ROOT / name).exists()}
    links = {
        link for link in LINK.findall(text) if not (ROOT / document).parent.joinpath(link).exists()
    }

    assert missing == set()
    assert links == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_front_matter_has_lines_of_its_own(document: str) -> None:
    text = (ROOT / document).read_text()

    if text.startswith("---"):  # on one line it would be shown as text
        found = FRONT_MATTER.match(text)
        assert found is not None
        assert isinstance(yaml.safe_load(found[1]), dict)


def test_a_kubectl_command_names_the_namespace() -> None:
    commands = [
        line
        for document in DOCUMENTS
        for line in (ROOT / document).read_text().splitlines()
        if line.startswith("kubectl apply")
    ]

    assert len(commands) >= 3
    assert [line for line in commands if " -n " not in line] == []


def test_the_sbatch_file_passes_its_cores_on_and_has_a_port_for_each_job(tmp_path: Path) -> None:
    first, second = (srun_of_job(number, tmp_path) for number in (4711, 4712))

    assert "--cpus-per-task=64" in first
    assert "--rdzv-endpoint=node-1:24711" in first
    assert "--rdzv-endpoint=node-1:24712" in second
    assert first[-3:] == ["train.py", "--deepspeed", "ds.json"]


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("train", "train-4711"),
        ("llama 7b/v1.2,bs=32", "llama_7b_v1.2_bs_32-4711"),
        (".hidden", "_hidden-4711"),
        ("größe", "gr____e-4711"),  # one `_` for each byte
        ("a" * 100, "a" * 60 + "-4711"),
    ],
)
def test_each_name_of_a_job_makes_a_run_id(tmp_path: Path, name: str, run_id: str) -> None:
    srun_of_job(4711, tmp_path, SLURM_JOB_NAME=name)

    assert (tmp_path / "run-id").read_text() == run_id
    assert re.fullmatch(RUN_ID_PATTERN, run_id)


def test_the_sbatch_file_keeps_a_run_id_that_is_set(tmp_path: Path) -> None:
    srun_of_job(4711, tmp_path, ZEROWATCH_RUN_ID="night-7")

    assert (tmp_path / "run-id").read_text() == "night-7"


def test_the_first_of_very_many_nodes_is_the_master(tmp_path: Path) -> None:
    """More names than fit into a pipe, so scontrol still writes when the first name is read."""
    num_nodes = 10_000

    arguments = srun_of_job(4711, tmp_path, SLURM_NNODES=str(num_nodes))

    assert "--rdzv-endpoint=node-1:24711" in arguments


def srun_of_job(number: int, folder: Path, **variables: str) -> list[str]:
    """Run train.sbatch as a job of Slurm, and return the arguments of srun.

    The run id of the job is in the file `run-id`.
    """
    for name, line in {
        "scontrol": r"""seq -f 'node-%.0f' "$SLURM_NNODES" """,
        "srun": rf"""printf %s "$ZEROWATCH_RUN_ID" > '{folder}/run-id'; printf '%s\n' "$@" """,
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "PATH": f"{folder}:{os.environ['PATH']}",
        **variables,
    }
    command = ["bash", ROOT / "docker/slurm/train.sbatch", "train.py", "--deepspeed", "ds.json"]
    done = subprocess.run(command, env=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_names_to_look_for_are_in_the_files_of_their_row() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where do I change")[2]
    rows = WHERE_TO_CHANGE.findall(table.partition("\n## ")[0])

    missing = {
        name
        for paths, names in rows
        for name in CODE.findall(names)
        if not any(is_named_in(ROOT / path, name) for path in CODE.findall(paths))
    }

    assert len(rows) > 20
    assert missing == set()


def is_named_in(path: Path, name: str) -> bool:
    """Whether a file, or a file below a folder, contains a name or is called so."""
    files = [path] if path.is_file() else path.rglob("*.py")
    return (path / name).exists() or any(
        re.search(rf"\b{name}\b", file.read_text()) for file in files
    )
