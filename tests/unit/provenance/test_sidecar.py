"""When sidecar files are written, and when they are kept."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.provenance import World, contents
from tvmflow.core import signing
from tvmflow.core.errors import StoreError
from tvmflow.provenance import delivered, write
from tvmflow.stages import verify
from tvmflow.store.local import DamagedBlob


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "here")


def signers(path: Path) -> list[str]:
    return [entry["keyid"] for entry in json.loads(path.read_bytes())["signatures"]]


def use_key(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    """Make a key, set it as the signing key, and return its id."""
    public = signing.generate_key(path)
    monkeypatch.setenv(signing.KEY_VARIABLE, str(path))
    return public.id


def test_sidecar_files_are_delivered_and_written_once(world: World) -> None:
    assert world.pending()
    assert world.deliver() == [
        "roofline.svg",
        "net.tvmflow",
        "net.so",
        "verify.json",
        "measurements.json",
        "net.intoto.jsonl",
        "net.cdx.json",
        "net.measurements.intoto.jsonl",
        "README.md",
    ]
    before = [path.stat().st_mtime_ns for path in (world.statement, world.bom)]
    assert not world.pending()
    world.deliver()
    assert [path.stat().st_mtime_ns for path in (world.statement, world.bom)] == before


def test_equal_results_give_equal_bytes_in_any_folder(tmp_path: Path) -> None:
    """In another folder and store, and in another order."""
    first, second = World(tmp_path / "here"), World(tmp_path / "far" / "away")
    second.deliver()
    first.deliver()
    assert first.statement.read_bytes() == second.statement.read_bytes()
    assert first.bom.read_bytes() == second.bom.read_bytes()


def test_other_measurements_change_only_their_own_statement(world: World) -> None:
    """Whoever verifies the same library again gets the same statement and bill of materials."""
    world.deliver()
    stable = [path.read_bytes() for path in (world.statement, world.bom)]
    before = world.measurements.read_bytes()
    measured = {"passed": True, "against": "reference", "accuracy": 0.5}
    world.make(contents(measurements=json.dumps(measured).encode()))
    assert world.pending()
    world.deliver()
    assert [path.read_bytes() for path in (world.statement, world.bom)] == stable
    assert world.measurements.read_bytes() != before


def test_the_measured_files_are_those_of_verify() -> None:
    assert delivered.MEASURED_FILES == (verify.MEASUREMENTS,)


@pytest.mark.parametrize(
    "name", ["net.intoto.jsonl", "net.cdx.json", "net.measurements.intoto.jsonl", "README.md"]
)
def test_a_missing_or_edited_sidecar_file_is_written_again(world: World, name: str) -> None:
    world.deliver()
    path = world.folder / name
    content = path.read_bytes()
    path.unlink()
    assert world.pending()
    world.deliver()
    assert path.read_bytes() == content
    path.write_bytes(content.replace(b"net", b"ten"))
    assert world.pending()
    world.deliver()
    assert path.read_bytes() == content


def test_changed_results_are_described_again(world: World) -> None:
    """A verdict with another reference gives another statement."""
    world.deliver()
    before = world.statement.read_bytes()
    verdict = json.loads(contents()["verify"]["verdict.json"])
    world.make(contents(verdict=json.dumps({**verdict, "reference": "MXNet 1.9.1"}).encode()))
    assert world.pending()
    world.deliver()
    assert world.statement.read_bytes() != before
    assert not world.pending()


def test_a_recipe_that_replaces_the_files_of_another_says_so(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recipes with one name share a folder; a recipe that was moved is no other one."""
    monkeypatch.chdir(tmp_path)
    (origin,) = world.plan.origins
    for name in ("one.yaml", "two.yaml", "two.yaml", "moved.yaml"):
        path = Path(name)
        path.touch()
        world.plan = world.plan._replace(origins=(origin._replace(path=name),))
        world.bom.unlink(missing_ok=True)
        with caplog.at_level(logging.WARNING, "tvmflow"):
            world.deliver()
        if name == "two.yaml":
            path.unlink()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "had the files of one.yaml, which has the same name as two.yaml: they were" in message


def test_unverified_results_get_no_sidecar_files(world: World) -> None:
    del world.artifacts["net:verify/host"]
    assert not world.pending()
    assert world.deliver() == []


def test_a_damaged_result_stops_the_sidecar_files(world: World) -> None:
    """Reading the lineage raises, as for every reader of the store."""
    tasks = next(
        file
        for file in world.artifacts["net:extract_tasks/host"].files
        if file.name == "tasks.json"
    )
    path = Path(world.store.blobs.path(tasks.digest))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"conv", b"CONV"))
    with pytest.raises(DamagedBlob):
        world.deliver()
    assert not world.statement.exists()


def test_signatures_of_several_keys_are_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key there is no signature; a later key signs existing files; no signature is lost."""
    world.deliver()
    assert signers(world.statement) == []
    first = use_key(monkeypatch, tmp_path / "first")
    assert world.pending()
    world.deliver()
    assert signers(world.statement) == [first]
    second = use_key(monkeypatch, tmp_path / "second")
    world.deliver()
    assert signers(world.statement) == sorted([first, second])
    assert not world.pending()
    monkeypatch.delenv(signing.KEY_VARIABLE)
    assert not world.pending()


def test_signatures_are_dropped_when_the_text_changes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, tmp_path / "first")
    world.deliver()
    monkeypatch.delenv(signing.KEY_VARIABLE)
    world.make(contents(verdict=b'{"passed": true, "against": "none"}'))
    world.deliver()
    assert signers(world.statement) == []


def test_a_kill_between_the_two_files_is_repaired_by_the_next_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bill of materials exists and its statement does not; the next run writes it."""
    put = write.write_if_changed

    def killed(path: Path, content: bytes) -> None:
        if path == world.statement:
            raise KeyboardInterrupt
        put(path, content)

    monkeypatch.setattr(write, "write_if_changed", killed)
    with pytest.raises(KeyboardInterrupt):
        world.deliver()
    monkeypatch.undo()
    assert world.bom.exists() and not world.statement.exists()
    assert world.pending()
    world.deliver()
    assert world.statement.exists() and not world.pending()


def test_a_full_disk_is_reported_and_keeps_the_old_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deliver()
    before = world.statement.read_bytes()
    world.make(contents(verdict=b'{"passed": true, "against": "none"}'))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(write, "write_atomically", full)
    with pytest.raises(StoreError, match="no space left on the disk"):
        world.deliver()
    monkeypatch.undo()
    assert world.statement.read_bytes() == before
    world.deliver()
    assert world.statement.read_bytes() != before


def test_a_folder_in_place_of_a_sidecar_file_is_reported(world: World) -> None:
    (world.statement / "inner").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"net\.intoto\.jsonl"):
        world.deliver()
    assert not [path for path in world.folder.iterdir() if path.name.endswith(".part")]


def test_a_link_in_place_of_a_sidecar_file_is_replaced(world: World, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"precious")
    world.folder.mkdir(parents=True)
    world.statement.symlink_to(target)
    world.deliver()
    assert target.read_bytes() == b"precious"
    assert not world.statement.is_symlink()


@pytest.mark.parametrize("note", ["", "[]", "{", '{"of": 1}', "\udcff"])
def test_a_damaged_note_is_written_again(world: World, note: str) -> None:
    world.deliver()
    (path,) = Path(world.store.root, "delivered").glob("*net.intoto.jsonl")
    path.write_bytes(note.encode("utf-8", "surrogateescape"))
    content = world.statement.read_bytes()
    assert world.pending()
    world.deliver()
    assert world.statement.read_bytes() == content
    assert not world.pending()


def test_the_fast_path_imports_hardly_anything() -> None:
    """An up-to-date run imports the module."""
    heavy = (
        "cryptography",
        "pathlib",
        "pydantic",
        "tvmflow.core.signing",
        "tvmflow.provenance.statement",
    )
    code = (
        "import sys; import tvmflow.provenance.delivered; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_variable_is_that_of_core_signing() -> None:
    assert delivered._KEY_VARIABLE == signing.KEY_VARIABLE
