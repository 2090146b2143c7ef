"""The previous release is verified before anything is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.release.releases import SIZES, Releases
from tvmflow.core import signing
from tvmflow.core.errors import LockMismatch
from tvmflow.provenance.write import MEASUREMENTS_STATEMENT, RELEASE_STATEMENT, sign_statements
from tvmflow.recipe import Gates
from tvmflow.recipe.lock_file import Measurements
from tvmflow.release.folder import SUMS
from tvmflow.release.gates import LOCK, MEASUREMENTS, MEASUREMENTS_PAGE


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Releases:
    for name in (signing.KEY_VARIABLE, signing.TRUSTED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Releases(tmp_path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def refused(releases: Releases) -> str:
    """Return why version 1.1 is not made; nothing may be left of it."""
    with pytest.raises(LockMismatch, match="is not as it was made") as error:
        releases.make("1.1")
    assert not (releases.folder / "releases/all-1.1").exists()
    assert "release.against" in error.value.fix
    return error.value.message


def test_an_edited_accuracy_does_not_pass_a_gate(releases: Releases) -> None:
    """The gate would compare with an accuracy that nobody has measured."""
    good = Measurements(accuracy=0.99, bytes=SIZES)
    folder = releases.make("1.0", good).folder
    edit(folder / MEASUREMENTS, "0.99", "0.90")
    with pytest.raises(LockMismatch, match="is not as it was made") as error:
        releases.make(
            "1.1", Measurements(accuracy=0.9, bytes=SIZES), gates=Gates(max_accuracy_drop=0.01)
        )
    assert f"{MEASUREMENTS}: it was changed after the release" in error.value.message


def remove_statement(folder: Path) -> None:
    (folder / RELEASE_STATEMENT).unlink()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda folder: (folder / "net/host/net.so").write_bytes(b"x"),
            "net/host/net.so: it was changed after the release",
        ),
        (lambda folder: (folder / LOCK).unlink(), f"{LOCK}: it is missing"),
        (lambda folder: (folder / SUMS).unlink(), f"{SUMS}: it is missing"),
        (lambda folder: (folder / MEASUREMENTS).unlink(), f"{MEASUREMENTS}: it is missing"),
        (
            lambda folder: (folder / MEASUREMENTS_PAGE).write_text("faster"),
            f"{MEASUREMENTS_PAGE}: it was changed after the release",
        ),
        (
            lambda folder: (folder / MEASUREMENTS_STATEMENT).unlink(),
            f"{MEASUREMENTS_STATEMENT}: No such file",
        ),
        (remove_statement, f"{RELEASE_STATEMENT}: No such file"),
        (
            lambda folder: (folder / RELEASE_STATEMENT).write_text("{}"),
            f"{RELEASE_STATEMENT}: it is not an envelope",
        ),
        (
            lambda folder: (folder / "net/host/net.intoto.jsonl").unlink(),
            "net/host/net.intoto.jsonl: No such file",
        ),
        (
            lambda folder: (folder / "net/host/net.intoto.jsonl").write_bytes(
                (folder / RELEASE_STATEMENT).read_bytes()
            ),
            "net/host/net.intoto.jsonl: it was changed after the release",
        ),
    ],
)
def test_damage_is_named(releases: Releases, damage: Callable[[Path], None], problem: str) -> None:
    damage(releases.make("1.0").folder)
    assert problem in refused(releases)


def test_measurements_of_another_release_are_not_those_of_this_one(releases: Releases) -> None:
    """They have a good statement, with a signature too, but it is about other files."""
    folder = releases.make("1.0", Measurements(accuracy=0.99, bytes=SIZES)).folder
    other = Releases(releases.folder / "other")
    other.change_library()
    worse = other.make("1.0", Measurements(accuracy=0.9, bytes=SIZES)).folder
    for name in (MEASUREMENTS, MEASUREMENTS_PAGE, MEASUREMENTS_STATEMENT):
        (folder / name).write_bytes((worse / name).read_bytes())
    assert f"{MEASUREMENTS_STATEMENT}: its files are not those" in refused(releases)


def test_a_copy_under_another_version_is_not_taken_for_a_release(releases: Releases) -> None:
    folder = releases.make("1.0").folder
    folder.rename(folder.with_name("all-1.0.5"))
    assert "it is about all 1.0, not all 1.0.5" in refused(releases)


def test_a_last_release_without_its_files_is_not_passed_over(releases: Releases) -> None:
    """Comparing with an older one instead would hide what was lost since."""
    releases.make("1.0")
    (releases.folder / "releases/all-1.0.5").mkdir()
    assert "all-1.0.5, the release to compare with" in refused(releases)


def test_what_somebody_adds_to_a_release_is_no_damage(releases: Releases) -> None:
    (releases.make("1.0").folder / "notes.txt").write_text("tested on the board")
    assert releases.make("1.1").previous == "all-1.0"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    signing.generate_key(tmp_path / "key")
    return tmp_path / "key"


def test_where_keys_are_trusted_one_of_them_must_have_signed(
    releases: Releases, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = releases.make("1.0").folder
    monkeypatch.setenv(signing.TRUSTED_VARIABLE, f"{key}.pub")
    assert f"{RELEASE_STATEMENT}: it is not signed" in refused(releases)
    for statement in folder.rglob("*.intoto.jsonl"):
        sign_statements(statement, signing.load_private_key(key))
    assert releases.make("1.1").previous == "all-1.0"


def test_who_signs_releases_checks_the_own_signature(
    releases: Releases, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit of the statement itself is found by the key that made it, without a list of trusted keys."""
    monkeypatch.setenv(signing.KEY_VARIABLE, str(key))
    folder = releases.make("1.0").folder
    edit(folder / RELEASE_STATEMENT, '"sig":"', '"sig":"AAAA')
    assert "does not match this text" in refused(releases)
