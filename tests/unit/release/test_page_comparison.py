"""Pages beside another run or release: as `tvmflow compare` judges both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.facts import VERDICT
from tests.unit.release.page_locks import lock
from tvmflow.core.errors import UsageError
from tvmflow.engine.builds import Build
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import list_runs, record_run
from tvmflow.pages.content import Change, Gate, KernelChange, Library, Page
from tvmflow.release.comparison import Side, make_side
from tvmflow.release.page import compare_page
from tvmflow.store.local import LocalStore

NET = Build("net", "host", verdict="verified", latency_s=1e-3, size_bytes=1000)
EDGE = NET._replace(target="edge")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def side(name: str, *builds: Build, **kernels: float) -> Side:
    return Side(name, {build.name: build for build in builds}, kernels={"net/host": kernels})


def page(*builds: Build) -> Page:
    return Page("Run", "net", libraries=tuple(Library(build, build.recipe) for build in builds))


def record(store: LocalStore, key: str = "") -> Side:
    with record_run(store, ["run", "net.yaml"]) as recording:
        stage = StageReport("net:verify/host", "ran", "", 1.0, VERDICT, key=key)
        recording.report, recording.exit_code = RunReport((stage,), (), (), 1.0), 0
    return make_side(list_runs(store).runs[0])


@pytest.mark.parametrize(("latency_s", "is_noise"), [(1.01e-3, True), (1.5e-3, False)])
def test_each_library_has_its_predecessor_and_what_is_noise_is_named(
    store: LocalStore, latency_s: float, is_noise: bool
) -> None:
    now = NET._replace(latency_s=latency_s)
    compared = compare_page(page(now, EDGE), side("lock file a", NET), side("b", now, EDGE), store)
    assert compared.previous == "lock file a"
    net, edge = compared.libraries
    assert (net.previous, net.is_noise, net.is_same) == (NET, is_noise, False)
    assert (edge.previous, edge.is_noise) == (None, False)
    assert compared.changes == (Change("net/edge", "build", "added"),)


def test_only_kernels_that_matter_are_listed(store: LocalStore) -> None:
    """A little noise is none, nor is what takes no time; what is gone or new is, whatever time it takes."""
    before = side("a", NET, conv=5e-4, pool=1e-4, same=3e-4, tiny=1e-6, gone=2e-5)
    after = side("b", NET, conv=6e-4, pool=5e-5, same=3.1e-4, tiny=2e-6, new=1e-6)
    one_sided = (
        KernelChange("net/host", "gone", 2e-5, None),
        KernelChange("net/host", "new", None, 1e-6),
    )
    slower = NET._replace(latency_s=1.2e-3)
    after = after._replace(builds={"net/host": slower})
    assert compare_page(page(slower), before, after, store).kernel_changes == (
        KernelChange("net/host", "conv", 5e-4, 6e-4),
        KernelChange("net/host", "pool", 1e-4, 5e-5),
        *one_sided,
    )
    # a library that is as fast as before has no slower kernels
    after = after._replace(builds={"net/host": NET._replace(latency_s=1.01e-3)})
    assert compare_page(page(NET), before, after, store).kernel_changes == one_sided


def test_kernels_that_one_side_does_not_know_are_not_new(store: LocalStore) -> None:
    compared = compare_page(page(NET), side("a", NET), side("b", NET, conv=1e-3), store)
    assert compared.kernel_changes == ()


def test_a_latency_that_was_not_measured_again_is_said_to_be_so(store: LocalStore) -> None:
    key = "ab" * 32
    before, after = record(store, key), record(store, key)
    (library,) = compare_page(page(*after.builds.values()), before, after, store).libraries
    assert (library.is_same, library.note) == (True, "not measured again")
    (other,) = compare_page(
        page(*after.builds.values()), record(store, "cd" * 32), after, store
    ).libraries
    assert (other.is_same, other.note) == (False, "")


def test_a_forced_verify_measures_again(store: LocalStore) -> None:
    """Its result has the same key, and another latency: the page says what `compare` says."""
    key = "ab" * 32
    before, after = record(store, key), record(store, key)
    slower = after.builds["net/host"]._replace(latency_s=7e-3)
    after = after._replace(builds={"net/host": slower})
    (library,) = compare_page(page(slower), before, after, store).libraries
    assert (library.is_same, library.note) == (False, "")


def test_what_a_release_says_of_the_one_before_stays_where_it_is_compared_with_that(
    store: LocalStore,
) -> None:
    """Beside another one, nothing is left of it but the gates."""
    gates = (Gate("net/host", "max_slowdown", "10%", "1%", "passed"),)
    now = Library(NET, "net", previous=NET, is_same=True, note="the same library")
    released = Page("Release", "net-3", (), "net-2", (now,), ("New: net/edge",), gates=gates)
    last, older, after = (
        side("release", NET)._replace(lock=lock(name), release=name)
        for name in ("net-2", "net-1", "net-3")
    )
    compared = compare_page(released, last, after, store)
    assert (compared.libraries, compared.notes) == ((now,), ("New: net/edge",))
    other = compare_page(released, older, after, store)
    assert (other.previous, other.notes) == ("net-1", ("The gates compared it with net-2.",))
    assert (other.libraries[0].is_same, other.libraries[0].note) == (False, "")


def test_what_has_nothing_in_common_is_an_error(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="lock file a and b have no build in common"):
        compare_page(page(NET), side("lock file a", EDGE), side("b", NET), store)
    run = record(store)
    with pytest.raises(UsageError, match="cannot be compared with itself"):
        compare_page(page(NET), run, run, store)
