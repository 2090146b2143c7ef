"""When statement and bill of materials are written, and when they are left as they are."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.provenance import World, contents
from tvmflow import signing
from tvmflow.errors import StoreError
from tvmflow.provenance import beside, writing
from tvmflow.stores.local import Damaged


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "here")


def signers(path: Path) -> list[str]:
    return [each["keyid"] for each in json.loads(path.read_bytes())["signatures"]]


def use_key(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    """Make a key and sign with it from now on; its id."""
    public = signing.generate(path)
    monkeypatch.setenv(signing.KEY_VARIABLE, str(path))
    return public.id


def test_they_lie_beside_the_files_and_nothing_is_done_twice(world: World) -> None:
    assert world.pending()
    assert world.deliver() == [
        "net.tvmflow",
        "net.so",
        "roofline.svg",
        "verify.json",
        "net.intoto.jsonl",
        "net.cdx.json",
    ]
    before = [path.stat().st_mtime_ns for path in (world.statement, world.bom)]
    assert not world.pending()
    world.deliver()
    assert [path.stat().st_mtime_ns for path in (world.statement, world.bom)] == before


def test_equal_results_give_equal_bytes_wherever_they_are(tmp_path: Path) -> None:
    """Another folder, another store, made in another order."""
    here, there = World(tmp_path / "here"), World(tmp_path / "far" / "away")
    there.deliver()
    here.deliver()
    assert here.statement.read_bytes() == there.statement.read_bytes()
    assert here.bom.read_bytes() == there.bom.read_bytes()


@pytest.mark.parametrize("name", ["net.intoto.jsonl", "net.cdx.json"])
def test_one_that_is_gone_or_was_edited_comes_back(world: World, name: str) -> None:
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


def test_other_results_are_described_anew(world: World) -> None:
    """A verdict with other figures is another file; so is what is said of it."""
    world.deliver()
    before = world.statement.read_bytes()
    verdict = json.loads(contents()["verify"]["verdict.json"])
    world.make(contents(verdict=json.dumps({**verdict, "accuracy": 0.5}).encode()))
    assert world.pending()
    world.deliver()
    assert world.statement.read_bytes() != before
    assert not world.pending()


def test_nothing_is_said_of_what_was_not_verified(world: World) -> None:
    del world.artifacts["net:verify/host"]
    assert not world.pending()
    assert world.deliver() == []


def test_a_damaged_result_is_made_again_before_anything_is_said_of_it(world: World) -> None:
    """The walk stops at it as every reader of the store does."""
    tasks = next(
        file
        for file in world.artifacts["net:extract_tasks/host"].files
        if file.name == "tasks.json"
    )
    path = Path(world.store.blob(tasks.digest))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"conv", b"CONV"))
    with pytest.raises(Damaged):
        world.deliver()
    assert not world.statement.exists()


def test_a_key_signs_and_another_signs_too(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key nobody signs; a key that comes later signs what is there; nobody's signature is lost."""
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


def test_a_signature_does_not_outlive_what_was_signed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_key(monkeypatch, tmp_path / "first")
    world.deliver()
    monkeypatch.delenv(signing.KEY_VARIABLE)
    world.make(contents(verdict=b'{"passed": true, "against": "none"}'))
    world.deliver()
    assert signers(world.statement) == []


def test_a_kill_between_the_two_costs_one_more_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bill of materials is there, the statement about it is not; the next run writes that."""
    put = writing.put

    def killed(path: Path, content: bytes) -> None:
        if path == world.statement:
            raise KeyboardInterrupt
        put(path, content)

    monkeypatch.setattr(writing, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        world.deliver()
    monkeypatch.undo()
    assert world.bom.exists() and not world.statement.exists()
    assert world.pending()
    world.deliver()
    assert world.statement.exists() and not world.pending()


def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deliver()
    before = world.statement.read_bytes()
    world.make(contents(verdict=b'{"passed": true, "against": "none"}'))

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreError, match="no space left on the disk"):
        world.deliver()
    monkeypatch.undo()
    assert world.statement.read_bytes() == before
    world.deliver()
    assert world.statement.read_bytes() != before


def test_what_stands_in_the_way_is_named(world: World) -> None:
    (world.statement / "inner").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"net\.intoto\.jsonl"):
        world.deliver()
    assert not [path for path in world.folder.iterdir() if path.name.endswith(".part")]


def test_a_link_in_the_place_of_one_is_replaced_not_followed(world: World, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    world.folder.mkdir(parents=True)
    world.statement.symlink_to(elsewhere)
    world.deliver()
    assert elsewhere.read_bytes() == b"precious"
    assert not world.statement.is_symlink()


@pytest.mark.parametrize("note", ["", "[]", "{", '{"of": 1}', "\udcff"])
def test_a_damaged_note_only_costs_another_look(world: World, note: str) -> None:
    world.deliver()
    (path,) = Path(world.store.root, "delivered").glob("*net.intoto.jsonl")
    path.write_bytes(note.encode("utf-8", "surrogateescape"))
    content = world.statement.read_bytes()
    assert world.pending()
    world.deliver()
    assert world.statement.read_bytes() == content
    assert not world.pending()


def test_finding_that_all_is_there_loads_next_to_nothing() -> None:
    """A run with nothing to do asks it."""
    heavy = ("cryptography", "pathlib", "pydantic", "tvmflow.signing", "tvmflow.provenance.trail")
    code = (
        "import sys; import tvmflow.provenance.beside; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_variable_is_the_one_that_signing_reads() -> None:
    assert beside._KEY_VARIABLE == signing.KEY_VARIABLE
