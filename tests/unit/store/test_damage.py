"""Damage in a store: every kind of file and fault is found and named, healed by a run, and never delivered."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Count
from tests.support.small_runs import RunHost, plan_of
from tests.unit.store.file_damage import CONTENT, FAULTS
from tvmflow.cli.cache import store_checks
from tvmflow.core.errors import EXIT_OK, StoreError
from tvmflow.engine import answers
from tvmflow.store.disk import StoreFolder
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.garbage_collection import Limits, collect_garbage
from tvmflow.store.integrity import check_integrity, repair_store
from tvmflow.store.inventory import add_pin
from tvmflow.store.local import LocalStore

PLACES: Final = {
    "format": "format",
    "result": "actions/*/*",
    "blob": "cas/*/*",
    "note of a key": "last/net/*",
    "note of a stamp": "stats/*",
    "note of a fact": "facts/*",
    "note of a delivery": "delivered/*",
    "pin": "pins/*",
    "answer": "plans/*",
    "log": "logs/net/*",
    "download": "downloads/*",
    "upload": "spool/remote/*",
    "lock": "locks/gc",
    "lock of runs": "run.lock",
    "lock of results": "use.lock",
    "lease": "runs/*",
    "claim": "work/*/claim",
    "schedules": "locked/*",
}
# Locks and leases have no content, a log is for people.
WITHOUT_CONTENT: Final = frozenset(
    {"log", "lock", "lock of runs", "lock of results", "lease", "claim"}
)
# What the run below reads or writes.
TOUCHED: Final = frozenset(
    {
        "format",
        "result",
        "blob",
        "note of a key",
        "note of a delivery",
        "lock of runs",
        "lock of results",
    }
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has every kind of file, and what was delivered from it."""
    folder = tmp_path_factory.mktemp("template")
    make_host(folder)
    return folder


@pytest.fixture
def host(template: Path, tmp_path: Path) -> RunHost:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return RunHost(tmp_path)


def make_host(folder: Path) -> RunHost:
    """Return a host whose store has every kind of file."""
    host = RunHost(folder)
    store = host.store
    assert host.run(plan_of()).exit_code == EXIT_OK
    for number, name in enumerate(("one", "two")):
        model = folder / f"{name}.onnx"
        model.write_text(name)
        content = name.encode()
        digest = hashlib.sha256(content).hexdigest()
        store.notes.write(
            f'{{"path": "{model}", "stamp": [], "digest": "{digest}"}}', "stats", name
        )
        store.notes.write(f"fact {name}", "facts", name)
        store.notes.write("{}" if number else '{"kernels": 1}', "delivered", f"{model}")
        add_pin(store, name, store.keys()[number : number + 1])
        path = f"{store.root}/plans/{name}.answer"
        store.write_file(path, answers.encode(path, "system", 1, [], [], [], f"text {name}"))
        store.write_file(f"{store.root}/logs/net/{name}.log", b"log of " + content)
        for area in ("downloads", "locked"):
            store.write_file(f"{store.root}/{area}/{digest}", content)
        store.notes.write(f"text {name}", "spool", "remote", f"ledger-{name}")
        store.write_file(f"{store.root}/work/{digest}/claim", b"")
        store.write_file(f"{store.root}/runs/{name}", b"")
    store.write_file(f"{store.root}/locks/gc", b"")
    return host


def damage(store: LocalStore, kind: str, fault: str, choose: random.Random) -> Path:
    """Damage one file of a kind, and return its path."""
    paths = sorted(Path(store.root).glob(PLACES[kind]))
    if fault in CONTENT:
        # nothing can happen to the content of an empty file
        paths = [path for path in paths if path.stat().st_size] or paths
    path = choose.choice(paths)
    others = [other for other in paths if other != path and other.is_file()]
    others = [other for other in others if other.read_bytes() != path.read_bytes()]
    content = choose.choice(others).read_bytes() if others else b"another file's content"
    FAULTS[fault](path, content)
    return path


def must_be_found(kind: str, fault: str) -> bool:
    """Tell whether a store can know that a file is damaged: nobody knows that a note or a log was there."""
    if fault == "missing":
        return kind in ("format", "result", "blob")
    return fault not in CONTENT or kind not in WITHOUT_CONTENT


def quiet(done: int, total: int) -> None: ...


def names_of_damage(store: LocalStore) -> list[str]:
    return [finding.name for finding in check_integrity(store, quiet, store_checks()).findings]


def run_again(host: RunHost) -> None:
    """Run in a process that knows nothing yet, without what was delivered: the same files are delivered again."""
    expected = {path.name: path.read_bytes() for path in host.dist.rglob("net.bin")}
    for path in host.dist.rglob("net.bin"):
        path.unlink()
    host.store = LocalStore(host.store.root)
    host.store.create()
    report = host.run(plan_of())
    assert report.exit_code == EXIT_OK, [stage.message for stage in report.stages]
    assert {path.name: path.read_bytes() for path in host.dist.rglob("net.bin")} == expected


CASES: Final = [(kind, fault) for kind in PLACES for fault in FAULTS]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_damage_is_found_and_named(host: RunHost, kind: str, fault: str) -> None:
    """The check names the file, and after a repair and a run it finds nothing."""
    store = LocalStore(host.store.root)
    path = damage(store, kind, fault, random.Random(f"{kind} {fault}"))
    names = names_of_damage(store)
    if must_be_found(kind, fault):
        assert any(path.name in name for name in names), (path, names)
    repair_store(LocalStore(store.root), quiet, store_checks())
    run_again(host)
    assert names_of_damage(LocalStore(store.root)) == []


@pytest.mark.parametrize(("kind", "fault"), [case for case in CASES if case[0] in TOUCHED])
def test_a_run_heals_damage_by_itself(host: RunHost, kind: str, fault: str) -> None:
    """Without a check before it, and it delivers what it delivered before."""
    damage(host.store, kind, fault, random.Random(f"{kind} {fault}"))
    run_again(host)
    run_again(host)


@pytest.mark.parametrize(
    "folder",
    ["actions", "cas", "last", "work", "runs", "tmp", "logs", "delivered", "damaged", "ledger"],
)
def test_a_file_in_place_of_a_folder_is_set_aside(host: RunHost, folder: str) -> None:
    """The run says so and makes the folder again; the file is kept."""
    place = Path(host.store.root, folder)
    if place.exists():
        place.rename(place.parent.parent / "moved")
    place.write_text("not a folder")
    assert folder in names_of_damage(LocalStore(host.store.root))
    run_again(host)
    kept = [
        path for path in Path(host.store.root, "damaged").iterdir() if path.name.startswith(folder)
    ]
    assert [path.read_text() for path in kept] == ["not a folder"]
    assert names_of_damage(LocalStore(host.store.root)) == []


def test_a_store_without_its_format_keeps_its_trials(host: RunHost) -> None:
    """An empty `format` is what a crash of a machine may leave; it says nothing about the rest."""
    trials = Path(host.store.ledger, "t", "w.jsonl")
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    Path(host.store.root, "format").write_text("")
    store = LocalStore(host.store.root)
    store.create()
    assert store.damage == [f"{store.root}/format"]
    assert trials.read_text() == "{}\n"
    assert LocalStore(host.store.root).condition() == "good"


def test_a_damaged_pin_stops_a_collection_until_it_is_repaired(host: RunHost) -> None:
    """Nobody knows what it needs; the repair names the moved file and what to do."""
    Path(host.store.root, "pins", "one").write_text("")
    with pytest.raises(StoreError, match="it is not known which results it needs"):
        collect_garbage(host.store, Limits(0.0))
    [step] = repair_store(LocalStore(host.store.root), quiet, store_checks())
    assert step[:4] == ("pin", "pins/one", "its content is damaged", "moved to damaged/one")
    assert step.fix.startswith("make the lock file or the release of that name again")
    collect_garbage(host.store, Limits(0.0))


def test_a_damaged_digest_of_a_model_is_not_believed(host: RunHost, tmp_path: Path) -> None:
    """One flipped digit would be a key for a model that nobody has."""
    model = tmp_path / "model.onnx"
    model.write_text("weights")
    os.utime(model, (1, 1))
    store = host.store
    notes = Path(store.root, "stats")
    digest = FileDigests(store).digest(str(model))
    for note in notes.iterdir():
        note.write_text(note.read_text().replace(digest[:8], "00000000"))
    assert FileDigests(LocalStore(store.root)).digest(str(model)) == digest


@pytest.mark.faults
def test_hundred_damaged_files_of_each_kind(tmp_path: Path, count: Count) -> None:
    """Seeded: any number of files of any kinds at once, found, healed by a run, or repaired."""
    choose = random.Random(20)
    named: Counter[str] = Counter()
    damaged: Counter[str] = Counter()
    for number in range(100 * len(PLACES) // 6):
        host = make_host(tmp_path / str(number))
        paths = {}
        for kind in choose.sample(list(PLACES), 6):
            fault = choose.choice(list(FAULTS))
            damaged[f"{kind}: {fault}"] += 1
            path = damage(host.store, kind, fault, choose)
            # what names a missing file may be damaged, too
            if must_be_found(kind, fault) and fault != "missing":
                paths[path.name] = f"{kind}: {fault}"
        names = names_of_damage(LocalStore(host.store.root))
        assert not [path for path in paths if not any(path in name for name in names)], (
            number,
            paths,
            names,
        )
        named.update(paths.values())
        if choose.random() < 0.5:
            repair_store(LocalStore(host.store.root), quiet, store_checks())
        run_again(host)
        repair_store(LocalStore(host.store.root), quiet, store_checks())
        run_again(host)
        assert names_of_damage(LocalStore(host.store.root)) == []
    count("damaged files of a store", damaged.total())
    count("damaged files of a store: found and named", named.total())
    assert min(Counter(case.partition(":")[0] for case in damaged.elements()).values()) > 60


def test_a_lock_that_is_removed_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder removes the folder of a finished result at any time; whoever asks for the lock makes a new one."""
    folder = StoreFolder(str(tmp_path))
    lock = tmp_path / "claim"
    lock.touch()

    def remove_it(_path: str) -> bool:
        lock.unlink(missing_ok=True)
        return False

    monkeypatch.setattr(os.path, "isfile", remove_it)
    os.close(folder.open_lock(str(lock)))
    assert folder.moved == []
