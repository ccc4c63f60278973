"""Counts what makes the package hard to read: `python tests/newcomer/counts.py [CHECKOUT]`.

Prints a table: modules, their median length, modules with one importer, constructor parameters that
are callables, class names defined twice, `torch.cuda` outside of one file, and words to replace.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

ACCELERATOR = "runtime/common/accelerator.py"
WORDS = re.compile(
    r"told|tells?|telling|anew|borne|bore|bears?|lawful(?:ly)?|foresee[ns]?|foretold|foretell|dear|whence"
    r"|astray|say so|says so|let be|for want of|take it that|in the place of|the like",
    re.IGNORECASE,
)
WHOLE_WORDS = re.compile(rf"\b(?:{WORDS.pattern})\b", re.IGNORECASE)
SELF = "tests/newcomer/counts.py"  # the pattern itself has all the words
DOCUMENTS = ("*.md", "docs/**/*.md", "dashboards/*.md", "docker/*.md")


def modules_of(root: Path) -> dict[str, Path]:
    """Map the dotted names of the package's modules to their files."""
    files = [root / "__init__.py", root / "__main__.py", root / "errors.py"]
    for folder in ("runtime", "metrics", "dashboards"):
        files += sorted((root / folder).rglob("*.py"))
    return {dotted(file.relative_to(root)): file for file in files if file.exists()}


def dotted(file: Path) -> str:
    parts = ("zerowatch", *file.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, tree: ast.Module, is_package: bool, known: set[str]) -> set[str]:
    """Name the modules of the package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            origin = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names} | {origin}
    return (found & known) - {name}


def callable_parameters(tree: ast.Module) -> int:
    """Count constructor parameters, and fields of dataclasses, that are annotated as callables."""
    aliases = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "Callable[" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    pattern = re.compile("|".join(rf"\b{name}\b" for name in ["Callable", *sorted(aliases)]))
    count = 0
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        is_dataclass = any("dataclass" in ast.unparse(each) for each in owner.decorator_list)
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotations = [each.annotation for each in arguments]
            elif is_dataclass and isinstance(node, ast.AnnAssign):
                annotations = [node.annotation]
            else:
                continue
            count += sum(bool(each and pattern.search(ast.unparse(each))) for each in annotations)
    return count


def words_by_kind(files: dict[str, Path], root: Path) -> dict[str, Counter[str]]:
    """Count the words in identifiers, strings (docstrings too), comments, documents and tests."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files.values():
        for kind, counter in words_of(file).items():
            found[kind] += counter
    for pattern in DOCUMENTS:
        for file in root.glob(pattern):
            if file.name != "CHANGELOG.md":
                found["documents"].update(words_in(file.read_text()))
    for file in (root / "tests").rglob("*.py"):
        if file != root / SELF and "node_modules" not in file.parts:
            for counter in words_of(file).values():
                found["tests"] += counter
    for file in (root / "tests").rglob("*.md"):
        if "node_modules" not in file.parts:
            found["tests"].update(words_in(file.read_text()))
    return found


def words_of(file: Path) -> dict[str, Counter[str]]:
    """Count the words of one Python file by kind of token."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.NAME:
            parts = re.sub(r"([a-z])([A-Z])", r"\1_\2", token.string).lower().split("_")
            found["identifiers"].update(part for part in parts if WHOLE_WORDS.fullmatch(part))
        elif token.type == tokenize.COMMENT:
            found["comments"].update(words_in(token.string))
        elif token.type == tokenize.STRING:
            found["strings"].update(words_in(token.string))
    return found


def words_in(text: str) -> list[str]:
    return [each.lower() for each in WHOLE_WORDS.findall(text)]


def main() -> None:
    """Print the table for a checkout."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    files = modules_of(root)
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    real = [name for name, count in lines.items() if count > 1]
    importers: Counter[str] = Counter()
    for name, tree in trees.items():
        is_package = files[name].name == "__init__.py"
        importers.update(imports_of(name, tree, is_package, set(files)))
    classes: Counter[str] = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    twice = sorted(name for name, count in classes.items() if count > 1)
    cuda = [
        name
        for name, file in files.items()
        if "torch.cuda" in file.read_text() and not file.as_posix().endswith(ACCELERATOR)
    ]
    rows = {
        "modules": len(real),
        "median lines": median(lines[name] for name in real),
        "modules of runtime/ with one importer": sum(
            importers[name] == 1 for name in real if name.startswith("zerowatch.runtime.")
        ),
        "callable constructor parameters": sum(map(callable_parameters, trees.values())),
        "class names defined twice": f"{len(twice)} ({', '.join(twice)})",
        "files with torch.cuda, but accelerator.py": len(cuda),
    }
    for kind, counter in sorted(words_by_kind(files, root).items()):
        common = ", ".join(f"{word} {count}" for word, count in counter.most_common(6))
        rows[f"words in {kind}"] = f"{counter.total()} ({common})"
    for label, value in rows.items():
        print(f"| {label} | {value} |")


if __name__ == "__main__":
    main()
