"""Line coverage of `make test` and of `make test-all`, by folder of the package.

The run of all tests is recorded for the mutation check as well (`recorded_tests.py`). A line counts
if some process executed it: the tests, ranks, or programs that they started. A process that is
killed leaves no data, so that the true figures are a little higher. The last rows name the files
with most of the lines that `make test` leaves to `make test-all`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bench.bench_options import Options
from bench.mutations.mutation_check import EVERYTHING, QUICK
from bench.mutations.recorded_tests import DATA, ROOT, SOURCES, Recording, is_current, record
from bench.result_table import Row

_NAMED_FILES = 10


def bench(options: Options) -> Iterator[Row]:
    """Yield the share of lines that are executed, by folder and in all."""
    if not is_current():
        record(QUICK if options.quick else EVERYTHING)
    slow = [name for name, test in Recording().tests.items() if test.is_slow]
    by_all, by_test = _missing_lines(""), _missing_lines(_not_of(slow) if slow else "")
    for folders in (*((source,) for source in SOURCES), ("runtime", "metrics"), SOURCES):
        files = [file for file in by_all if file.partition("/")[0] in folders]
        statements = sum(by_all[file][0] for file in files)
        shares = [
            f"{1 - sum(len(missing[file][1]) for file in files) / statements:.2%}"
            for missing in (by_test, by_all)
        ]
        yield Row(
            what=f"lines of {' and '.join(folders)} executed by make test, by make test-all",
            measured=", ".join(shares),
            spread=f"of {statements}",
        )
    left = {file: sorted(by_test[file][1] - by_all[file][1]) for file in by_all}
    for file in sorted(left, key=lambda file: -len(left[file]))[:_NAMED_FILES]:
        if left[file]:
            yield Row(
                what=f"{file}: lines executed by make test-all only",
                measured=", ".join(map(str, left[file])),
            )


def _missing_lines(contexts: str) -> dict[str, tuple[int, set[int]]]:
    """Return the number of statements and the lines that no test executed, by file.

    Args:
        contexts: A pattern of the contexts that count; all count if it is empty.
    """
    from coverage import Coverage

    measured = Coverage(data_file=str(DATA), config_file=False)
    measured.load()
    measured.get_data().set_query_contexts([contexts] if contexts else None)
    found = {}
    for file in _files():
        _, statements, _, missing, _ = measured.analysis2(str(ROOT / file))
        found[file] = (len(statements), set(missing))
    return found


def _not_of(tests: Iterable[str]) -> str:
    """Return a pattern of the contexts of all other tests, and of what runs outside of tests."""
    names = "|".join(map(re.escape, tests))
    return rf"^(?!(?:.*\|)?(?:{names})(?: \((?:setup|call|teardown)\))?$)"


def _files() -> list[str]:
    found = (path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in found]
