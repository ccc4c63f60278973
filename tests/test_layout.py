"""Tests of rules on the code that linters do not cover: what is allowed in one file only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from package_tree import ROOT, package_files

from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.catalog.spec import PREFIX

FAIL_OPEN = {"runtime/common/fail_open.py"}
CONSOLE = ("runtime/cli/main.py", "runtime/cli/run_command.py", "runtime/cli/demo/")
# These make a tensor on the script's default device, which may be a GPU.
TENSOR_MAKERS = re.compile(
    r"torch\.(empty|empty_strided|zeros|ones|full|eye|tensor|asarray|arange|linspace|rand\w*)"
)
# These draw from the script's generators, or seed them.
GLOBAL_DRAWS = re.compile(
    r"random\.(?!Random|SystemRandom|getstate)\w+"
    r"|(np|numpy)\.random\.(?!default_rng|Generator|SeedSequence|get_state)\w+"
    r"|torch\.(rand\w*|normal|bernoulli|multinomial|poisson|manual_seed|seed)"
)
HOME_OF = {  # by library the file, or the folder, that may import it
    "prometheus_client": "metrics/exporters/prometheus.py",
    "opentelemetry": "metrics/exporters/",
    "grafanalib": "dashboards/grafana/",
    "pynvml": "runtime/devices/nvml_",
}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return each syntax node of the package that a rule is about, with "file:line"."""
    kinds = ast.Constant | ast.Call | ast.Import | ast.ImportFrom | ast.ExceptHandler
    return [
        (f"{file.as_posix()}:{node.lineno}", node)
        for file in package_files()
        for node in ast.walk(parsed(file))
        if isinstance(node, kinds)
    ]


def file_of(place: str) -> str:
    return place.rpartition(":")[0]


def test_exceptions_are_suppressed_in_one_place_only() -> None:
    swallowers = [
        place for place, node in nodes() if suppresses(node) and file_of(place) not in FAIL_OPEN
    ]

    assert swallowers == []


def suppresses(node: ast.AST) -> bool:
    """Whether this catches any exception, and does not pass it on with a closing `raise`."""
    if isinstance(node, ast.ExceptHandler):
        last = node.body[-1]
        ends_in_raise = isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)
        return not ends_in_raise and (node.type is None or names_any_exception(node.type))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return any(names_any_exception(argument) for argument in node.args)
    return False


def names_any_exception(expression: ast.expr) -> bool:
    names = {inner.id for inner in ast.walk(expression) if isinstance(inner, ast.Name)}
    return not names.isdisjoint({"Exception", "BaseException"})


def test_metric_names_stand_in_the_catalog_only() -> None:
    names = re.compile("|".join(re.escape(spec.name) for spec in CATALOG))

    strays = [
        f"{place} {node.value!r}"
        for place, node in nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (node.value == PREFIX or names.search(without_examples(node.value)))
        and not place.startswith("metrics/catalog/")
    ]

    assert strays == []


@pytest.mark.parametrize("library", HOME_OF)
def test_a_library_we_may_replace_is_imported_in_its_home_only(library: str) -> None:
    importers = {file_of(place) for place, node in nodes() if library in imported(node)}

    assert importers != set()
    assert {file for file in importers if not file.startswith(HOME_OF[library])} == set()


def imported(node: ast.AST) -> set[str]:
    """Name the top-level packages that an import statement loads."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {(node.module or "").partition(".")[0]}
    return set()


def test_each_config_that_asks_for_torchs_adam_has_the_reason_above_it() -> None:
    """Users train with DeepSpeed's own Adam: so does a job, unless the test needs another."""
    folders = (ROOT / "tests" / "support" / "scripts", ROOT / "runtime" / "cli")
    places = {
        f"{file.relative_to(ROOT)}:{number}": above.lstrip().startswith("#")
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        for number, (above, line) in enumerate(pairwise(file.read_text().splitlines()), start=2)
        if '"torch_adam"' in line
    }

    assert places
    assert [place for place, has_reason in places.items() if not has_reason] == []


def test_only_the_console_prints() -> None:
    prints = [
        place
        for place, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and not place.startswith(CONSOLE)
    ]

    assert prints == []


def test_a_new_tensor_names_its_device() -> None:
    unnamed = [
        place
        for place, node in nodes()
        if isinstance(node, ast.Call)
        and TENSOR_MAKERS.fullmatch(ast.unparse(node.func))
        and "device" not in {keyword.arg for keyword in node.keywords}
        and not place.startswith("runtime/cli/")  # its processes run no script
    ]

    assert unnamed == []


def test_no_random_number_is_drawn_from_the_generators_of_the_script() -> None:
    """A draw at a time of its own would give the ranks of a seeded script different data."""
    draws = [
        place
        for place, node in nodes()
        if any(GLOBAL_DRAWS.fullmatch(name) for name in used_names(node))
        and not place.startswith(("runtime/cli/demo/", "runtime/trainer/window/rng.py"))
    ]

    assert draws == []


def used_names(node: ast.AST) -> list[str]:
    """Name what a call without a generator calls, and what an import statement imports."""
    if isinstance(node, ast.Call):
        has_generator = "generator" in {keyword.arg for keyword in node.keywords}
        return [] if has_generator else [ast.unparse(node.func)]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def without_examples(text: str) -> str:
    """Leave out the examples of a docstring: users read names as they are."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(">>>"))


def test_each_module_is_named_in_a_test_file() -> None:
    """The tests of a module are found by a search of tests/ for its name."""
    tests = {file: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    named = {file.name.removeprefix("test_") for file in tests}
    for text in tests.values():
        named |= set(re.findall(r"[\w/]+\.py\b", text))
        named |= {module_file for node in ast.walk(ast.parse(text)) for module_file in loaded(node)}

    modules = {file for file in package_files() if file.parts[0] in ("runtime", "metrics")}
    unnamed = [
        file.as_posix()
        for file in sorted(modules)
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in parsed(file).body)
        and named.isdisjoint(endings(file))
    ]

    assert unnamed == []


def loaded(node: ast.AST) -> Iterator[str]:
    """Yield the files of our modules that an import statement may load."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerowatch."):
        folder = str(node.module).partition(".")[2].replace(".", "/")
        yield f"{folder}.py"
        yield from (f"{folder}/{alias.name}.py" for alias in node.names)


def endings(file: Path) -> set[str]:
    """Return the ways to write a file's path: its name, with its folder, and so on."""
    return {"/".join(file.parts[start:]) for start in range(len(file.parts))}


def test_tests_replace_clocks_of_waits_by_module_only() -> None:
    replaces = re.compile(r'setattr\((\w+\.)*time, "(monotonic|perf_counter)')  # see `set_clock`

    found = [
        file.name for file in (ROOT / "tests").rglob("*.py") if replaces.search(file.read_text())
    ]

    assert found == []
