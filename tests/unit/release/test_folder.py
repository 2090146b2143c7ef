"""Release folders: complete or absent, never changed, and compared with the previous release."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.support.provenance import contents
from tests.support.umask import modes_below, umask
from tests.unit.release.releases import SIZES, Releases
from tvmflow.core.errors import LockMismatch, RecipeError, VerifyFailed
from tvmflow.core.types import Plan
from tvmflow.recipe import Gates
from tvmflow.recipe.lock_file import (
    Measurements,
)
from tvmflow.release.folder import (
    SUMS,
)
from tvmflow.release.gates import LOCK
from tvmflow.release.page import REPORT


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    return Releases(tmp_path)


def read_sums(folder: Path) -> dict[str, str]:
    lines = (folder / SUMS).read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}


def test_a_release_has_all_files_with_their_checksums_and_statements(releases: Releases) -> None:
    result = releases.make("1.0")
    folder = result.folder
    assert (result.is_new, result.previous, result.failed_gates) == (True, "", ())
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"net/host/net.so", "net/host/net.tvmflow", LOCK, REPORT, SUMS} < names
    assert {"net/host/net.intoto.jsonl", "release.intoto.jsonl"} < names
    sums = read_sums(folder)
    assert {"net/host/net.so", LOCK, REPORT} < set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_the_umask_decides_who_may_read_a_release(releases: Releases, mask: int) -> None:
    """Every file of it: copied from the store, rendered or signed."""
    with umask(mask) as mode:
        folder = releases.make("1.0").folder
    assert modes_below(folder) == {mode}
    folders = (folder, *(path for path in folder.rglob("*") if path.is_dir()))
    assert {path.stat().st_mode & 0o7777 for path in folders} == {0o777 & ~mask}


def test_the_same_files_are_not_released_again(releases: Releases) -> None:
    """Measurements may differ: the folder stays as it is."""
    first = releases.make("1.0")
    written = (first.folder / LOCK).read_text()
    again = releases.make("1.0", Measurements(latency_us=5.0, bytes=SIZES))
    assert (again.is_new, again.folder) == (False, first.folder)
    assert (first.folder / LOCK).read_text() == written


@pytest.mark.parametrize("name", ["README.md", "net/host/README.md", REPORT])
def test_a_release_whose_descriptions_would_be_others_is_the_same(
    releases: Releases, name: str
) -> None:
    """As another version of tvmflow may write them."""
    folder = releases.make("1.0").folder
    digests = {path: digest for path, digest in read_sums(folder).items() if path != name}
    (folder / SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in digests.items()))
    assert not releases.make("1.0").is_new


def test_a_release_explains_itself(releases: Releases) -> None:
    """A README in it and in each folder, with checksums; each page links only to what is there."""
    folder = releases.make("1.0").folder
    readme = (folder / "README.md").read_text()
    links = {line.partition("](")[2].partition(")")[0] for line in readme.splitlines()} - {""}
    assert links == {link for link in links if (folder / link).is_file()} >= {"net/host/README.md"}
    assert {"README.md", "net/host/README.md"} <= set(read_sums(folder))
    for page in (REPORT, "measurements.html"):
        html = (folder / page).read_text()
        targets = re.findall(r'<a href="([^"#]+)"', html)
        assert targets and all((folder / link).is_file() for link in targets)


def test_a_version_with_other_files_is_an_error(releases: Releases) -> None:
    releases.make("1.0")
    releases.change_library()
    with pytest.raises(LockMismatch, match=r"all-1\.0 exists with a different net/host/net\.so"):
        releases.make("1.0")


def test_a_release_that_was_changed_is_an_error(releases: Releases) -> None:
    folder = releases.make("1.0").folder
    (folder / "net/host/net.so").write_bytes(b"something else")
    with pytest.raises(LockMismatch, match=r"net\.so was changed after the release"):
        releases.make("1.0")


def test_a_folder_of_somebody_else_is_not_taken_for_a_release(releases: Releases) -> None:
    (releases.folder / "releases/all-1.0").mkdir(parents=True)
    with pytest.raises(LockMismatch, match="is not a release that tvmflow made"):
        releases.make("1.0")


def test_a_failed_gate_leaves_nothing_behind(releases: Releases) -> None:
    result = releases.make("1.0", gates=Gates(max_bytes=100))
    assert [(failed.label, failed.gate) for failed in result.failed_gates] == [
        ("net/host", "max_bytes")
    ]
    assert "net.tvmflow has 900 bytes" in result.failed_gates[0].message
    assert list((releases.folder / "releases").iterdir()) == []


def test_the_previous_release_has_the_next_lower_version(releases: Releases) -> None:
    """Versions are compared as numbers: 1.10 comes after 1.9."""
    for version in ("1.0", "1.10", "1.9"):
        releases.make(version)
    assert releases.make("1.9.1").previous == "all-1.9"
    assert releases.make("2.0").previous == "all-1.10"
    assert releases.make("0.1").previous == ""


def test_another_release_can_be_named_to_compare_with(releases: Releases) -> None:
    releases.make("1.0")
    releases.make("1.1")
    assert releases.make("1.2", against="1.0").previous == "all-1.0"
    assert releases.make("1.3", against="none").previous == ""
    with pytest.raises(RecipeError, match=r"there is no release 0\.9") as wrong:
        releases.make("1.4", against="0.9")
    assert wrong.value.fix == "releases in this folder: 1.0, 1.1, 1.2, 1.3"


def test_folders_of_other_names_are_no_releases(releases: Releases) -> None:
    releases.make("1.0")
    for name in ("all-old", "all-0.9", "other-1.0"):
        (releases.folder / "releases" / name).mkdir()
    assert releases.make("1.1").previous == "all-1.0"


TIMED = Measurements(latency_us=100.0, bytes=SIZES)


def test_the_same_library_is_not_timed_again(releases: Releases) -> None:
    """Whatever the recorded latencies are."""
    releases.make("1.0", TIMED)
    slow = Measurements(latency_us=900.0, bytes=SIZES)
    result = releases.make("1.1", slow, gates=Gates(max_slowdown=0.05))
    (comparison,) = result.comparisons
    assert comparison.is_same_library and result.is_new


def test_libraries_that_do_not_run_here_are_compared_as_recorded(releases: Releases) -> None:
    """The bundles of this test hold no machine code."""
    releases.make("1.0", TIMED)
    files = contents()
    files["export"]["net.tvmflow"] += b"\0"
    releases.world.make(files)
    slow = Measurements(latency_us=900.0, bytes=SIZES)
    result = releases.make("1.1", slow, gates=Gates(max_slowdown=0.05))
    (comparison,) = result.comparisons
    assert comparison.latencies is None and comparison.not_timed_reason
    assert [failed.gate for failed in result.failed_gates] == ["max_slowdown"]
    assert "as recorded" in result.failed_gates[0].message


def test_a_target_without_a_recorded_latency_is_not_timed(releases: Releases) -> None:
    releases.make("1.0")
    (comparison,) = releases.make("1.1", TIMED).comparisons
    assert (comparison.latencies, comparison.not_timed_reason) == (None, "")
    assert not comparison.is_same_library


# ---------------------------------------------------------------- before anything is built


def test_nothing_is_wrong_with_a_release_of_all_that_the_last_one_had(releases: Releases) -> None:
    releases.check()
    releases.make("1.0")
    releases.check()


def test_a_target_that_the_command_line_leaves_out_is_missed_in_the_first_release_too(
    releases: Releases,
) -> None:
    with pytest.raises(VerifyFailed) as error:
        releases.check("net", "net/host", "net/edge", "other", "other/host")
    lines = error.value.message.splitlines()
    where = releases.folder / "all.yaml"
    assert lines == [
        f"net/edge: content: it is in {where}, and not in this release",
        f"other: content: it is in {where}, and not in this release",
        "NOT RELEASED: nothing was built",
    ]
    assert "`drop: [net/edge, other]`" in error.value.fix
    releases.check("net/edge", "other", "other/host", drop=["net/edge", "other"])


def test_what_the_last_release_had_is_missed_unless_its_loss_is_declared(
    releases: Releases,
) -> None:
    releases.make("1.0")
    lock = releases.world.plan
    gone = tuple(spec for spec in lock.stages if spec.stage not in ("verify", "export"))
    releases.world.plan = Plan(gone, ())
    with pytest.raises(VerifyFailed, match=r"net: content: it is in all-1\.0, and not in this"):
        releases.check("other")
    releases.check(drop=["net"])


def test_a_declared_loss_that_is_none_is_an_error(releases: Releases) -> None:
    """It would hide the loss of that target later."""
    with pytest.raises(RecipeError, match=r"release\.drop\.0: net/host is in this release"):
        releases.check(drop=["net/host"])


def test_a_release_that_loses_something_is_not_made(releases: Releases) -> None:
    """Though another run made the previous release while this one was building."""
    releases.make("1.0")
    plan = releases.world.plan
    releases.world.plan = Plan(
        tuple(spec for spec in plan.stages if spec.stage != "verify"),
        tuple(
            delivery._replace(verified_by="")
            for delivery in plan.deliveries
            if ":verify/" not in delivery.stage_id
        ),
    )
    result = releases.make("1.1")
    assert [failed[:2] for failed in result.failed_gates] == [("net/host/verify", "content")]
    assert not result.folder.exists() and not result.is_new
