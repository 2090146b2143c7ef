"""What every test gets: the checkout on the path of the processes that tests start, and one model in every form."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.support.exports import Exported

ROOT = Path(__file__).resolve().parent.parent

Count: TypeAlias = Callable[[str, int], None]
"""Adds a number to a count that is printed at the end: `count("kills", 20)`."""

MANY_CASES = 4
COMPILING = ("tests/unit/compiler/", "tests/unit/frontends/")
"""The tests of which most cases compile a model: of many, `make test` runs one in `SPREAD`."""
SPREAD = 6
MANY_SLOW_CASES = 4
SLOW_CASES = 2
"""The cases that `make test-slow` runs of a slow test with many, evenly spread."""
OTHER_SUITES = ("faults", "fuzz", "cross", "cuda", "pytorch", "nightly")

# Workers import the tests' own support modules, wherever pytest was started.
os.environ["PYTHONPATH"] = str(ROOT)
# A shell that starts the tests in the background ignores SIGINT, and so would the commands that they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP, which the tests themselves survive as before: other programs do not inherit a handler.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# Nobody's own keys sign what tests make, or judge it.
for name in ("TVMFLOW_SIGNING_KEY", "TVMFLOW_TRUSTED_KEYS"):
    os.environ.pop(name, None)
# The same examples on every machine, and no time limit for one, which a busy machine may exceed.
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Let no test find the root of a project, or a repository, above the folders of tests."""
    base = config.getoption("basetemp") or os.environ.get("PYTEST_DEBUG_TEMPROOT")
    folder = Path(base or tempfile.gettempdir())
    folders = dict.fromkeys((str(folder.absolute()), str(folder.resolve())))
    os.environ["GIT_CEILING_DIRECTORIES"] = os.pathsep.join(folders)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Distribute the tests over the suites, and of a suite keep the part that `TVMFLOW_TEST_PART` names, as in 1/3."""
    leave_cases_to_slower_suites(items)
    yield  # pytest selects by markers

    number, _, parts = os.environ.get("TVMFLOW_TEST_PART", "1/1").partition("/")
    kept = list_modules(items, int(number), int(parts))
    config.hook.pytest_deselected(items=[item for item in items if item.path not in kept])
    items[:] = [item for item in items if item.path in kept]


def list_modules(items: list[pytest.Item], number: int, parts: int) -> set[Path]:
    """Return the modules of part `number` (from 1) among `parts`, which have about as many tests each."""
    sizes = [0] * parts
    modules: list[set[Path]] = [set() for _ in range(parts)]
    for path, size in sorted(
        Counter(item.path for item in items).items(), key=lambda entry: (-entry[1], entry[0])
    ):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += size
        modules[smallest].add(path)
    return modules[number - 1]


def leave_cases_to_slower_suites(items: list[pytest.Item]) -> None:
    """Of a test with many cases, leave some to slower suites.

    Of a slow one, a few are left to `make test-slow`, and the others to the night. Of one that compiles,
    `make test` and `make test-slow` have different cases, one in `SPREAD` each, and the night all.
    """
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        name, is_slow = item.nodeid.partition("[")[0], bool(item.get_closest_marker("slow"))
        is_divided = is_slow or name.startswith(COMPILING)
        if is_divided and not any(map(item.get_closest_marker, OTHER_SUITES)):
            cases.setdefault((name, is_slow), []).append(item)
    for (_, is_slow), alike in cases.items():
        if is_slow and len(alike) >= MANY_SLOW_CASES:
            mark(alike, pytest.mark.nightly, but=spread(len(alike), SLOW_CASES))
        elif not is_slow and len(alike) >= MANY_CASES:
            kept = spread(len(alike), -(-len(alike) // SPREAD))
            mark(alike, pytest.mark.slow, but=kept)
            mark(
                alike,
                pytest.mark.nightly,
                but=kept | {(place + SPREAD // 2) % len(alike) for place in kept},
            )


def spread(number: int, kept: int) -> set[int]:
    """Return one place of each of `kept` equal ranges, not at the same distance: those of a grid would be alike in one argument."""
    starts = [index * number // kept for index in range(kept + 1)]
    ranges = enumerate(itertools.pairwise(starts))
    return {start + index % (end - start) for index, (start, end) in ranges}


def mark(items: list[pytest.Item], marker: pytest.MarkDecorator, *, but: set[int]) -> None:
    for index, item in enumerate(items):
        if index not in but:
            item.add_marker(marker)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The digits in every form, made once for all tests that load them."""
    from tests.support import exports
    from tests.support.shared import shared_folder

    folder = shared_folder(
        tmp_path_factory, "exports", lambda folder: exports.make(folder / "digits")
    )
    return exports.Exported(folder / "digits")


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process gets that is to find an sm_90: the stand-in, or this machine's if `TVMFLOW_TEST_GPU` is set."""
    from tests.support import gpu

    if os.environ.get("TVMFLOW_TEST_GPU"):
        return {}

    folder = tmp_path_factory.mktemp("gpu")
    gpu.make_driver(folder)
    return dict(gpu.environment(folder))


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Count what a test did (kills, damaged files, mutated recipes); the sums over all tests are printed."""
    return lambda name, number: record_property("count", (name, number))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums of all counts, those of tests that failed included."""
    totals: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get(
        "failed", []
    ):
        for kind, value in report.user_properties:
            if kind == "count":
                totals[value[0]] += value[1]
    if totals:
        terminalreporter.section("counts")
        for name, number in sorted(totals.items()):
            terminalreporter.write_line(f"{number:>7,}  {name}")
