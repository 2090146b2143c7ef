"""`tvmflow doctor` on bad disks: each that would stop a run is bad, is named, and has a fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.disks import NOEXEC, READ_ONLY, fill, small_disk
from tvmflow.cli.doctor import Finding, examine_disks
from tvmflow.core.file_locks import held
from tvmflow.store.local import LocalStore
from tvmflow.targets.devices import RUNTIME_VARIABLE

SPACE = "space for the store"


@pytest.fixture(autouse=True)
def no_other_runs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device locks of the test's own: another run on this machine may hold one of the usual ones."""
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path_factory.mktemp("runtime")))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def bad(store: LocalStore, dist: Path | str = "dist") -> dict[str, Finding]:
    """Return the findings that are not good, by subject."""
    findings = list(examine_disks(store, Path(dist)))
    assert all(finding.fix for finding in findings if not finding.good)
    return {finding.subject: finding for finding in findings if not finding.good}


def test_good_disks_have_nothing_bad_and_nothing_is_left_behind(
    store: LocalStore, tmp_path: Path
) -> None:
    """Also where neither the store nor the folder for deliveries exists yet."""
    assert bad(store, tmp_path / "dist") == {}
    assert bad(LocalStore(str(tmp_path / "new" / "store")), tmp_path / "dist") == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_a_read_only_disk_is_bad(tmp_path: Path) -> None:
    """For the store and for deliveries, each by its name."""
    with small_disk(tmp_path / "disk", 1 << 20, flags=READ_ONLY) as disk:
        finding = bad(LocalStore(str(disk / "store")), disk / "dist")
        assert not finding["store can be written"].optional
        for subject in ("store can be written", "dist can be written"):
            assert "Read-only file system" in finding[subject].detail
            assert finding[subject].fix.startswith("mount that file system writable")


def test_what_a_disk_lacks_is_said(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are written all the same, and may be damaged by a power failure, or changed by mistake."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    findings = {finding.subject: finding for finding in examine_disks(store, tmp_path / "dist")}
    for subject in ("store can be written", "dist can be written"):
        assert findings[subject].good
        assert "(fsync)" in findings[subject].detail and "(chmod)" in findings[subject].detail
    (tmp_path / "file").write_bytes(b"x")
    digest = store.blobs.add(str(tmp_path / "file"))
    store.notes.write("a" * 64, "last", "net", "build")
    assert Path(store.blobs.verified_path(digest)).read_bytes() == b"x"


def test_a_full_disk_is_bad(tmp_path: Path) -> None:
    """The file system and what is free are shown."""
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        fill(disk)
        finding = bad(LocalStore(str(disk / "store")))
        assert f"tmpfs at {disk}, 0 B of 65.5 kB free" in finding[SPACE].detail
        assert "no space left on the disk" in finding["store can be written"].detail


def test_a_disk_without_inodes_is_bad(tmp_path: Path) -> None:
    """There is space, and no file can be created."""
    with small_disk(tmp_path / "disk", 1 << 20, files=1) as disk:
        assert "all of its 1 file in use" in bad(LocalStore(str(disk / "store")))[SPACE].detail


def test_a_noexec_folder_for_temporary_files_is_bad(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are loaded from there."""
    with small_disk(tmp_path / "disk", 1 << 20, flags=NOEXEC) as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        assert "mounted noexec" in bad(store)["temporary files"].detail


@pytest.mark.parametrize(
    ("folder", "words", "is_optional"),
    [
        ("/sys", "/sys", False),
        ("/dev/null", "/dev/null", False),
        ("relative/folder", "is not an absolute path: /tmp/tvmflow-", True),
    ],
)
def test_a_bad_runtime_folder_is_named(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, folder: str, words: str, is_optional: bool
) -> None:
    """A relative one is ignored, as its specification says, so that a run works all the same."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    finding = bad(store)["folder of the device locks"]
    assert words in finding.detail and "XDG_RUNTIME_DIR" in finding.fix
    assert finding.optional is is_optional


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_runtime_folder_of_another_user_is_bad(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns it could take away the locks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    locks = tmp_path / f"tvmflow-{os.getuid()}"
    locks.mkdir()
    os.chown(locks, 1234, 1234)
    finding = bad(store)["folder of the device locks"]
    assert finding.detail == f"{locks} belongs to user 1234, not to 0"
    locks.rmdir()
    locks.symlink_to(tmp_path)
    assert bad(store)["folder of the device locks"].detail == f"{locks} is not a folder"


@pytest.mark.parametrize("name", ["run.lock", "use.lock", "locks/gc"])
def test_a_lock_that_nobody_can_take_is_named_with_its_holder(store: LocalStore, name: str) -> None:
    """By pid and command."""
    path = Path(store.root, name)
    path.parent.mkdir(exist_ok=True)
    with held(path):
        finding = bad(store)["lock of the store"]
    assert f"{path} is held by" in finding.detail and not finding.optional
    assert "lock of the store" not in bad(store)


def test_damage_is_named_and_does_not_stop_a_run(store: LocalStore) -> None:
    """The next run heals it; the fix is at hand."""
    Path(store.root, "format").write_text("")
    store.notes.write("a" * 64, "last", "net", "build")
    Path(store.root, "last/net/build").write_text("")
    finding = bad(LocalStore(store.root))["store"]
    assert finding.detail == (
        "damaged: format (it does not name the format of this store), "
        "last/net/build (its content is damaged)"
    )
    assert finding.optional and "tvmflow cache repair" in finding.fix


def test_leases_of_killed_runs_are_counted(store: LocalStore) -> None:
    """They hold nothing."""
    Path(store.root, "runs").mkdir()
    Path(store.root, "runs", "killed").touch()
    [finding] = [
        finding for finding in examine_disks(store, Path("dist")) if finding.subject == "store"
    ]
    assert finding.good
    assert finding.detail == "no damaged files; 1 lease of killed runs, which the next run removes"


@pytest.mark.parametrize("content", ["a file", "another version", "somebody's folder"])
def test_what_is_no_store_is_bad(tmp_path: Path, content: str) -> None:
    """A run would refuse it with the same words."""
    root = tmp_path / "store"
    if content == "a file":
        root.write_text("x")
    else:
        root.mkdir()
        name, text = ("format", "tvmflow store 9\n") if content == "another version" else ("a", "")
        (root / name).write_text(text)
    finding = bad(LocalStore(str(root)))
    assert not finding["store"].optional
