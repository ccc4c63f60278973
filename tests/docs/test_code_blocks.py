"""Each code block of README.md and docs/ is run, or checked as far as this machine can."""

from __future__ import annotations

import builtins
import json
import re
import shlex
import string
import subprocess
import symtable
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import yaml
from chosen_cases import chosen
from package_tree import ROOT
from recorded_runs import write_run
from require import program
from scripts.forked_ranks import start_ranks
from scripts.launching import ABORTED, SCRIPTS, ZEROWATCH, Finished

from zerowatch.__main__ import commands
from zerowatch.metrics.settings import load_settings

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"\w+=\S*")
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
# What a Python block may use without defining it, as the reader's own script would.
GIVEN = {
    "zerowatch": "import zerowatch",
    "model": """
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
""",
    "dataset": """
import torch
dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
""",
    "loss": "def loss(model, batch): return model(**batch).loss",
    "engine": 'engine = zerowatch.initialize(model=model, config="ds.json")[0]',
    "run": 'run = zerowatch.TrainingRun(model, config="ds.json", loss=loss)',
}
# Commands that need what no test machine has; here only their files and options are checked.
NEEDS = {
    "docker": "a Docker engine",
    "kubectl": "a cluster",
    "deepspeed": "as many GPUs as it says",
    "pip": "another environment",
    "sbatch": "a Slurm cluster",
    "scancel": "a Slurm cluster",
    "amtool": "an Alertmanager",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    return [each for page in PAGES for each in blocks_of(page) if each.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the documents suppose to be in it."""
    return filled(tmp_path_factory.mktemp("commands"))


def filled(folder: Path) -> Path:
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    (folder / "train.py").write_text("print('trained')\n")
    (folder / "my_project.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(64, 64)\n"
    )
    for run in ("nightly", "before", "after"):
        write_run(folder / "runs" / run)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_a_language_that_is_checked(page: Path) -> None:
    languages = {block.language for block in blocks_of(page)}

    assert languages <= {"python", "sh", "yaml", "toml", "json", "promql", "text"}


@pytest.fixture(scope="module")
def scripts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Block, Path]:
    """Run the Python blocks, each in a folder and a process of its own; return their scripts."""
    written = {}
    for block in chosen(request, "block"):
        if block.language == "python":
            written[block] = filled(tmp_path_factory.mktemp("block")) / "block.py"
            written[block].write_text(f"{given_to(block.text)}\n{block.text}")
    run_scripts(written.values())
    # Once more, as other jobs, where torch aborted at exit.
    run_scripts(
        [
            script
            for script in written.values()
            if result(script)[0] != "0" and ABORTED in result(script)[1]
        ]
    )
    return written


def run_scripts(files: Collection[Path]) -> None:
    if files:
        job, first = SCRIPTS / "code_blocks_job.py", next(iter(files))
        done = start_ranks(
            1, job, *files, cwd=first.parent.parent, variables={"CUDA_VISIBLE_DEVICES": ""}
        )
        assert done.returncode == 0, done.stderr


def result(script: Path) -> tuple[str, str]:
    """Return exit code and output."""
    return script.with_suffix(".code").read_text(), script.with_suffix(".log").read_text()


@pytest.mark.jobs
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_python_block_runs(block: Block, scripts: dict[Block, Path]) -> None:
    code, output = result(scripts[block])

    assert code == "0", output[-3000:]


def given_to(text: str) -> str:
    """Return definitions of all that a block uses and does not define."""
    needed = [name for name in GIVEN if name in undefined(text)]
    while more := [
        name
        for name in GIVEN
        if name not in needed and any(name in undefined(GIVEN[each]) for each in needed)
    ]:
        needed += more
    return "\n".join(text for name, text in GIVEN.items() if name in needed)


def undefined(text: str) -> set[str]:
    """Name the globals that a script uses and does not define."""
    scopes = [symtable.symtable(text, "block", "exec")]
    defined = {each.get_name() for each in scopes[0].get_symbols() if each.is_assigned()}
    defined |= {each.get_name() for each in scopes[0].get_symbols() if each.is_imported()}
    used: set[str] = set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        used |= {each.get_name() for each in scope.get_symbols() if each.is_global()}
        if scope.get_type() == "module":
            used |= {each.get_name() for each in scope.get_symbols() if each.is_referenced()}
    return used - defined - set(dir(builtins))


def command_lines() -> list[tuple[Block, str]]:
    return [
        (block, line)
        for block in blocks("sh")
        for line in block.text.splitlines()
        if line.strip() and not line.startswith("#")
    ]


@pytest.mark.parametrize(
    ("block", "line"), command_lines(), ids=[f"{b}-{line[:50]}" for b, line in command_lines()]
)
def test_a_command_line_works(block: Block, line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)
    if len(words) == 1 and ASSIGNMENT.match(words[0]):
        return  # a variable of the shell, which the next line uses
    while ASSIGNMENT.fullmatch(words[0]):
        name = words.pop(0).partition("=")[0]
        if name.startswith("ZEROWATCH_"):
            assert name.removeprefix("ZEROWATCH_").lower() in known_variables(), name

    match words:
        case [_, *rest] if example := next((w for w in rest if w.startswith("examples/")), None):
            # `tests/examples/` runs the examples.
            source = (ROOT / example).read_text()
            options = rest[rest.index(example) + 1 :]
            assert [each for each in options if each.startswith("--") and each not in source] == []
        case ["make", *targets]:
            wanted = [each for each in targets if "=" not in each]
            assert (
                subprocess.run(["make", "-n", *wanted], cwd=ROOT, capture_output=True).returncode
                == 0
            )
        case ["zerowatch", "estimate", *_]:
            done = zerowatch(folder, *words[1:])
            assert done.returncode == 0, done.stderr
        case ["zerowatch", "run", *rest]:
            done = zerowatch(folder, "run", *("1" if each == "8" else each for each in rest))
            assert "trained" in done.stdout, done.stderr
        case ["python", "-c", source]:
            compile(with_shell_variables(source, block), line, "exec")
        case ["python", "-m", "zerowatch", *rest]:
            done = start_ranks(1, "-m", "zerowatch", *rest, cwd=folder)
            assert "trained" in done.stdout, done.stderr
        case ["zerowatch", *rest]:
            parse(commands, rest)
        case [name, *rest] if Path(name).name in NEEDS:
            assert missing_files(rest) == []
        case ["curl", address]:
            assert address.endswith(("/metrics", "/targets"))
        case [_, script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case ["python3", "-m", "pip", "install", *_, wheels]:
            assert wheels == ".build/wheels/*.whl"  # where the block before puts them
        case ["python3.11", "-m", "venv", _]:
            pass  # what `make` does itself
        case _:
            pytest.fail(f"no check for {line!r}; add one here")


def with_shell_variables(text: str, block: Block) -> str:
    """Replace the variables that the block sets."""
    lines = (shlex.split(line, comments=True) for line in block.text.splitlines())
    values = dict(words[0].split("=", 1) for words in lines if ASSIGNMENT.match(words[0]))
    return string.Template(text).substitute(values)


@cache
def zerowatch(folder: Path, *words: str) -> Finished:
    """Run a command once, however many documents have it."""
    return start_ranks(1, ZEROWATCH, *words, cwd=folder)


def parse(command: click.Command, words: list[str]) -> None:
    """Raise if these words are no valid call of a command, without running it."""
    context = command.make_context(
        command.name or "zerowatch", list(words), resilient_parsing=False
    )
    if isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        assert inner is not None, words
        parse(inner, words[1:])


def known_variables() -> set[str]:
    """Name all settings as their environment variables do, without the prefix."""
    settings = load_settings({}).model_dump()
    return {
        f"{section}_{option}"
        for section, options in settings.items()
        if isinstance(options, dict)
        for option in options
    } | {name for name, value in settings.items() if not isinstance(value, dict)}


def missing_files(words: list[str]) -> list[str]:
    named = [each for each in words if each.startswith("docker/")]
    return [each for each in named if not (ROOT / each).exists()]


@pytest.mark.parametrize(
    "block", [each for each in blocks("yaml") if "\nreceivers:" not in each.text], ids=str
)
def test_a_prometheus_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    assert "scrape_configs" in yaml.safe_load(block.text)
    promtool = program("promtool", apt="prometheus")
    (tmp_path / "prometheus.yml").write_text(block.text)

    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_in_a_file_are_accepted(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zerowatch.toml").write_text(block.text)

    settings = load_settings({}).model_dump()

    for section, options in tomllib.loads(block.text).items():
        assert options.items() <= settings[section].items()
