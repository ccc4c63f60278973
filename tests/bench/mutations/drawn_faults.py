"""Draws faults at random, for a new list in `planted_faults.py`.

.venv/bin/python tests/bench/mutations/drawn_faults.py SEED

Prints, for each of the 30 faults of a list, candidates in the order in which they were drawn. The
author of the list, who has not looked at the tests, takes the first one of each that changes what a
user sees, and notes why those before it do not. First each package has one; the others are drawn by
number of lines. One of four kinds is drawn, each as often, and then a place in the package:

- sign: plus and minus exchanged
- off-by-one: an integer plus 1, or a comparison that counts the limit in or out
- dropped call: a statement that only calls something
- wrong label: a name in quotes, replaced by another one of the same file
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "support")]

from package_tree import ROOT, package_files

NUM_FAULTS, NUM_CANDIDATES = 30, 12
SIGN, OFF_BY_ONE, DROPPED_CALL, WRONG_LABEL = "sign", "off-by-one", "dropped call", "wrong label"
KINDS = (SIGN, OFF_BY_ONE, DROPPED_CALL, WRONG_LABEL)
_BOUNDARIES: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_TEXTS = (ast.Constant, ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFault:
    """One change of a source file.

    Attributes:
        file: Path below the root of the repository.
        kind: One of KINDS.
        line: Number of the first line that changes.
        old: The lines that change, as they are.
        new: The same lines with the fault.
    """

    file: str
    kind: str
    line: int
    old: str
    new: str


def package_of(file: str) -> str:
    """Return the package of a file, such as "runtime/common"; subpackages belong to it."""
    return "/".join(Path(file).parts[:-1][:2])


def draw(seed: int, sources: dict[str, str]) -> list[list[DrawnFault]]:
    """Draw the candidates of each fault of a list.

    Args:
        seed: Of all choices.
        sources: Texts of the files by path.
    """
    chance = random.Random(seed)
    lines: dict[str, int] = {}
    for file, source in sources.items():
        lines[package_of(file)] = lines.get(package_of(file), 0) + source.count("\n")
    packages = sorted(lines)
    weights = [lines[name] for name in packages]
    packages += chance.choices(packages, weights, k=NUM_FAULTS - len(packages))
    changes = {name: _changes_by_kind(name, sources, chance) for name in set(packages)}
    drawn = []
    for name in sorted(packages):
        candidates: list[DrawnFault] = []
        while len(candidates) < NUM_CANDIDATES:
            one = chance.choice(chance.choice(changes[name]))
            if _is_change(one, sources[one.file]):
                candidates.append(one)
        drawn.append(candidates)
    return drawn


def _changes_by_kind(
    package: str, sources: dict[str, str], chance: random.Random
) -> list[list[DrawnFault]]:
    found = [
        change
        for file, source in sorted(sources.items())
        if package_of(file) == package
        for change in changes_of(file, source, chance)
    ]
    by_kind = [[one for one in found if one.kind == kind] for kind in KINDS]
    return [each for each in by_kind if each]


def changes_of(file: str, source: str, chance: random.Random) -> Iterator[DrawnFault]:
    """Yield each possible change of a file. `chance` draws the names of wrong labels."""
    tree = ast.parse(source)
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text.encode()))
    data, names = source.encode(), _names_in_quotes(tree)
    ignored = _ignored(tree)
    for node in ast.walk(tree):
        if node in ignored or not isinstance(node, ast.expr | ast.stmt):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for kind, replacement in _replacements(node, names, chance):
            first, last = starts[node.lineno - 1], starts[node.end_lineno or 0]
            new = data[first:begin] + replacement.encode() + data[end:last]
            yield DrawnFault(
                file=file,
                kind=kind,
                line=node.lineno,
                old=data[first:last].decode(),
                new=new.decode(),
            )


def _replacements(
    node: ast.AST, names: Sequence[str], chance: random.Random
) -> Iterator[tuple[str, str]]:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            if not isinstance(left, _TEXTS) and not isinstance(right, ast.JoinedStr | ast.List):
                other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
                yield SIGN, ast.unparse(ast.BinOp(left=left, op=other, right=right))
        case ast.AugAssign(op=ast.Add() | ast.Sub(), target=target, value=value):
            sign = "-" if isinstance(node.op, ast.Add) else "+"
            yield SIGN, f"{ast.unparse(target)} {sign}= {ast.unparse(value)}"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield SIGN, ast.unparse(operand)
        case ast.Compare(ops=ops, left=left, comparators=values):
            for number, op in enumerate(ops):
                if type(op) in _BOUNDARIES:
                    changed = [*ops[:number], _operator(_BOUNDARIES[type(op)]), *ops[number + 1 :]]
                    yield OFF_BY_ONE, ast.unparse(ast.Compare(left, changed, values))
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield OFF_BY_ONE, str(value + 1)
        case ast.Expr(value=ast.Call()):
            yield DROPPED_CALL, "pass"
        case ast.Constant(value=str() as name) if name in names and len(names) > 1:
            other_name = chance.choice([each for each in names if each != name])
            yield WRONG_LABEL, f'"{other_name}"'


def _operator(text: str) -> ast.cmpop:
    comparison = ast.parse(f"0 {text} 0", mode="eval").body
    assert isinstance(comparison, ast.Compare)
    return comparison.ops[0]


def _names_in_quotes(tree: ast.Module) -> list[str]:
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({value for value in values if isinstance(value, str) and value.isidentifier()})


def _ignored(tree: ast.Module) -> set[ast.AST]:
    """Return what no fault is planted in: annotations, decorators, f-strings, type checking."""
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            rest = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
            parts = [*node.decorator_list, node.returns]
            parts += [each.annotation for each in (*arguments, *rest)]
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.JoinedStr):  # Python 3.11 has no columns within it
            parts = [*node.values]
        elif isinstance(node, ast.If):
            parts = [node] if ast.unparse(node.test) == "TYPE_CHECKING" else []
        elif isinstance(node, ast.Call):
            parts = [node] if ast.unparse(node.func) in ("cast", "TypeVar") else []
        for part in parts:
            ignored.update(() if part is None else ast.walk(part))
    return ignored


def _is_change(fault: DrawnFault, source: str) -> bool:
    """Whether the fault leaves valid code, which is another program."""
    lines = source.splitlines(keepends=True)
    end = fault.line - 1 + fault.old.count("\n")
    faulty = "".join([*lines[: fault.line - 1], fault.new, *lines[end:]])
    try:
        return ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def main() -> None:
    sources = {
        str(file): (ROOT / file).read_text() for file in package_files() if len(file.parts) > 1
    }
    for number, candidates in enumerate(draw(int(sys.argv[1]), sources), start=1):
        print(f"# {number}: {package_of(candidates[0].file)}")
        for one in candidates:
            print(f"{one.file}:{one.line} {one.kind}\n- {one.old.rstrip()}\n+ {one.new.rstrip()}")


if __name__ == "__main__":
    main()
