"""Garbage collection: what is removed, what stays, and that concurrent runs lose nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import COMPILE, plan_of, planned, recipe
from tests.support.fake_executor import FakeExecutor
from tests.support.stored_results import stage_key
from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.types import Artifact, Plan
from tvmflow.engine import session
from tvmflow.store import disk, garbage_collection
from tvmflow.store.garbage_collection import (
    DAY,
    Collection,
    Limits,
    collect_garbage,
    preview_collection,
)
from tvmflow.store.integrity import Finding, check_integrity
from tvmflow.store.inventory import (
    add_pin,
    list_pins,
    list_recipe_pins,
    remove_pin,
    stored_paths,
    take_inventory,
)
from tvmflow.store.local import LocalStore

OLD = Limits(clock_margin_s=-5.0)
"""The limits of a collection for which what a test just made was made before."""
ALL = OLD._replace(max_age_s=0.0)
EXACT = ALL._replace(clock_margin_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def make(
    store: LocalStore, text: str, *, days: float = 0, size: int = 100, made_for: str = ""
) -> Artifact:
    """A result with a content of its own, last used so many days ago."""
    key = stage_key(text)
    with store.claim(key.digest) as claim:
        Path(claim.out, "x").write_bytes(text.encode() * size)
        made = store.publish(claim, key, {}, 0.1, made_for)
    set_back(Path(store.action_path(key.digest)), days)
    return made


def short(name: str) -> str:
    """Return the first digits of a key, as lines about results show them."""
    return stage_key(name).digest[:12]


def set_back(path: Path, days: float) -> None:
    """Set back when a file was last used by so many days, and a minute."""
    when = time.time() - days * DAY - 60
    os.utime(path, (when, when))


def evicted(collection: Collection) -> list[str]:
    return [f"{eviction.kind} {eviction.name}" for eviction in collection.evictions]


@pytest.fixture(autouse=True)
def no_device_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use no device lock of this machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_needed_results_stay_and_unused_ones_are_removed_by_age(store: LocalStore) -> None:
    """A result that a recipe needs stays at any age; an unused one is removed with its blobs once it is older than the limit."""
    root = make(store, "a", days=400, made_for="net:build/host")
    old = make(store, "b", days=31, made_for="net:build/host")
    young = make(store, "c", days=29)
    store.remember("net", "build/host", root.key)
    dry = preview_collection(store, OLD)
    assert evicted(dry) == [f"result net:build/host {old.key[:12]}"]
    assert dry.evictions[0].reason == "nothing needs it, and it was not used for 30 days"
    assert store.find(old.key) == old
    set_back(Path(store.action_path(old.key)), 31)
    done = collect_garbage(store, OLD)
    assert (evicted(done), done.freed) == (evicted(dry), dry.freed)
    assert store.find(old.key) is None
    assert not Path(store.blobs.path(old.files[0].digest)).exists()
    assert [store.find(result.key) for result in (root, young)] == [root, young]


def test_a_blob_that_a_needed_result_shares_stays(store: LocalStore) -> None:
    """Equal files are stored once, and for as long as one result that stays refers to them."""
    for text in "ab":
        key = stage_key(text)
        with store.claim(key.digest) as claim:
            Path(claim.out, "same").write_text("same")
            shared = store.publish(claim, key, {}, 0.1).files[0]
    store.remember("net", "build", stage_key("a").digest)
    assert evicted(collect_garbage(store, ALL)) == [f"result build {short('b')}"]
    assert store.find(stage_key("b").digest) is None
    assert store.find(stage_key("a").digest) is not None
    assert Path(store.blobs.path(shared.digest)).read_text() == "same"


def test_max_size_removes_what_was_unused_longest(store: LocalStore) -> None:
    """The youngest unused results stay; when the needed ones alone are too large, the report says so."""
    for number, text in enumerate("abcd"):
        make(store, text, days=10 - number, size=10_000)
    store.remember("net", "build", stage_key("a").digest)
    collection = collect_garbage(store, OLD._replace(max_age_s=None, max_bytes=32_000))
    assert [title.rpartition(" ")[2] for title in evicted(collection)] == [short("b")]
    assert collection.kept_bytes <= 32_000
    collection = collect_garbage(store, OLD._replace(max_age_s=None, max_bytes=5_000))
    assert [title.rpartition(" ")[2] for title in evicted(collection)] == [short("c"), short("d")]
    assert collection.kept_bytes > 5_000
    assert store.find(stage_key("a").digest) is not None


def test_a_pin_keeps_results_and_blobs_until_it_is_removed(store: LocalStore) -> None:
    """Lock files and releases pin by name; what is missing is returned; once the pin is removed, so are its results."""
    made = make(store, "a", days=90)
    loose = Path(store.root, "loose")
    loose.write_text("a content without a result")
    digest = store.blobs.add(str(loose))
    absent = "f" * 64
    assert add_pin(
        store, "net.lock.yaml", [made.key, absent], [digest], file="/gone/net.lock.yaml"
    ) == [absent]
    assert collect_garbage(store, ALL).evictions == ()
    [pin] = list_pins(store)
    assert (pin.name, pin.file) == ("net.lock.yaml", "/gone/net.lock.yaml")
    with pytest.raises(UsageError, match=r"nothing is pinned as 'net\.lock'"):
        remove_pin(store, "net.lock")
    remove_pin(store, "net.lock.yaml")
    kinds = [eviction.kind for eviction in collect_garbage(store, ALL).evictions]
    assert sorted(kinds) == ["blob", "result"]


def test_a_pin_that_cannot_be_read_stops_the_collection(store: LocalStore) -> None:
    """Since it is not known what it needs, nothing is removed; the error names the pin and the remedy."""
    made = make(store, "a", days=90)
    store.notes.write("{", "pins", "broken")
    with pytest.raises(StoreError, match="pins/broken cannot be read") as raised:
        collect_garbage(store, ALL)
    assert "tvmflow cache unpin broken" in raised.value.fix
    assert store.find(made.key) == made


def test_what_an_active_run_has_used_stays(store: LocalStore, monkeypatch: Any) -> None:
    """What was found or made since it began is kept, whatever the limits; after it ended, it is removed."""
    used, other = make(store, "a", days=90), make(store, "b", days=90)
    run = LocalStore(store.root)
    with run.running():
        assert run.find(used.key) == used
        made = make(run, "c")
        store.find(made.key)
        os.utime(store.action_path(made.key))
        gone_now = collect_garbage(store, EXACT)
        assert (evicted(gone_now), gone_now.runs) == ([f"result build {short('b')}"], 1)
        assert run.find(used.key) == used
        assert run.find(other.key) is None
    time.sleep(0.02)
    assert len(collect_garbage(store, EXACT).evictions) == 2


def test_a_nested_run_shares_the_lease_of_the_outer_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the outer run used stays when the inner one has ended, and both count as one run."""
    made = make(store, "a", days=90)
    run = LocalStore(store.root)
    with run.running() as began:
        with run.running() as part:
            assert part == began
            assert run.find(made.key) == made
        collection = preview_collection(store, EXACT)
        assert (collection.evictions, collection.runs) == ((), 1)
    assert disk.active_runs(store.root) == []


def test_a_result_that_is_used_after_it_was_chosen_stays(
    store: LocalStore, monkeypatch: Any
) -> None:
    """A run that begins during the collection finds what it needs, and that stays with its blobs."""
    made = make(store, "a", days=90)
    make(store, "b", days=80)
    run = LocalStore(store.root)
    look = take_inventory

    def look_and_be_overtaken(of: LocalStore) -> Any:
        seen = look(of)
        stack.enter_context(run.running())
        assert run.find(made.key) == made
        return seen

    monkeypatch.setattr(garbage_collection, "take_inventory", look_and_be_overtaken)
    with contextlib.ExitStack() as stack:
        assert evicted(collect_garbage(store, EXACT)) == [f"result build {short('b')}"]
        assert Path(run.blobs.verified_path(made.files[0].digest)).read_bytes() == b"a" * 100


def test_finding_a_result_without_a_run_writes_once_a_day(store: LocalStore) -> None:
    """Without a run, use is recorded to the day."""
    made = make(store, "a", days=0.5)
    path = Path(store.action_path(made.key))
    before = path.stat().st_mtime_ns
    store.find(made.key)
    assert path.stat().st_mtime_ns == before
    set_back(path, 1.5)
    store.find(made.key)
    assert time.time() - path.stat().st_mtime < 60


def test_leftovers_are_removed_unless_they_are_locked(store: LocalStore, tmp_path: Path) -> None:
    """Unreferenced blobs, downloads, work folders of killed processes, notes about files that no longer exist."""
    root = make(store, "a")
    key = stage_key("e", "import", {"model": "d" * 64})
    with store.claim(key.digest) as claim:
        Path(claim.out, "x").write_text("import")
        store.publish(claim, key, {}, 0.1)
    store.remember("net", "build", root.key)
    store.remember("net", "import", key.digest)
    downloads = Path(store.downloads)
    downloads.mkdir()
    for name in ("c" * 64, "d" * 64, "c" * 64 + ".lock"):
        (downloads / name).write_text("model")
        set_back(downloads / name, 90)
    (tmp_path / "loose").write_text("loose")
    store.blobs.add(str(tmp_path / "loose"))
    for folder in ("1" * 64, "2" * 64):
        Path(store.root, "work", folder, "work").mkdir(parents=True)
        Path(store.root, "work", folder, "claim").touch()
    store.notes.write(json.dumps({"path": "/gone", "stamp": [], "digest": ""}), "stats", "s1")
    store.notes.write(json.dumps({"path": str(tmp_path), "stamp": [], "digest": ""}), "stats", "s2")
    store.notes.write("{}", "plans", "p")
    trials = Path(store.ledger, "t", "w.jsonl")
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    with store.claim("1" * 64):
        collection = collect_garbage(store, ALL)
    assert sorted(evicted(collection)) == [
        f"blob {hash_of('loose')[:12]}…",
        "download cccccccccccc…",
        "note stats/s1",
        "work 222222222222…",
    ]
    assert trials.read_text() == "{}\n"
    assert store.find(root.key) == root
    assert evicted(preview_collection(store, ALL)) == ["work " + "1" * 12 + "…"]


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_second_collection_at_once_is_refused(store: LocalStore) -> None:
    """It fails with a message and does not wait."""
    with (
        garbage_collection.exclude_maintenance(store),
        pytest.raises(StoreError, match="another `tvmflow cache gc`"),
    ):
        collect_garbage(store, ALL)


def test_garbage_is_collected_on_a_full_disk(store: LocalStore, monkeypatch: Any) -> None:
    """Without space for a lease, it is collected while no run is active, and refused otherwise."""
    make(store, "a", days=90)

    def full(root: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    other = LocalStore(store.root)
    with other.running(), monkeypatch.context() as patch:
        patch.setattr(disk, "hold_lease", full)
        with pytest.raises(StoreError, match="a run is using the store"):
            collect_garbage(store, ALL)
    monkeypatch.setattr(disk, "hold_lease", full)
    assert evicted(collect_garbage(store, ALL)) == [f"result build {short('a')}"]


def test_a_preview_writes_nothing(store: LocalStore) -> None:
    """No byte and no time in the store changes, so a read-only store can be previewed."""
    make(store, "a", days=90)

    def everything() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in Path(store.root).rglob("*")}

    before = everything()
    assert len(preview_collection(store, ALL).evictions) == 1
    assert everything() == before


def test_runs_in_threads_of_one_process_share_a_lease(store: LocalStore) -> None:
    """The lease is held until the last of them ends: stages of a worker are threads of one process."""
    first, second = store.running(), store.running()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(disk.active_runs(store.root)) == 1
    with pytest.raises(StoreError), disk.exclude_runs(store.root):
        pass
    second.__exit__(None, None, None)
    assert disk.active_runs(store.root) == []
    with disk.exclude_runs(store.root):
        pass


def test_a_stale_lease_is_ignored_and_removed(store: LocalStore) -> None:
    """A killed process leaves a lease file that is not locked."""
    process = subprocess.Popen(
        [sys.executable, __file__, "hold", store.root], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert len(disk.active_runs(store.root)) == 1
    process.kill()
    process.communicate()
    assert disk.active_runs(store.root, remove_stale=True) == []
    assert list(Path(store.root, "runs").iterdir()) == []


# ---------------------------------------------------------------- verify


def quiet(done: int, total: int) -> None: ...


def test_the_integrity_check_sets_aside_what_is_damaged(store: LocalStore) -> None:
    """A flipped bit, a missing blob, a record under another key: each is reported with the results it affects; the rest stays."""
    plan = a_plan(Path(store.root).parent, "one")
    report = session.run_plan(plan, store, FakeExecutor(), ignore, options(store))
    assert report.exit_code == 0
    assert check_integrity(store, quiet).findings == ()
    results = {
        spec.stage: store.find(store.last_key("net", spec.label) or "") for spec in plan.stages
    }
    build, export, verify = (results[stage] for stage in ("build", "export", "verify"))
    assert build and export and verify
    flipped = Path(store.blobs.path(build.files[0].digest))
    flipped.chmod(0o644)
    flipped.write_bytes(flipped.read_bytes().replace(b"kernels", b"Kernels"))
    Path(store.blobs.path(export.files[0].digest)).unlink()
    moved = Path(store.action_path("0" * 64))
    moved.parent.mkdir()
    Path(store.action_path(verify.key)).rename(moved)
    checked = check_integrity(store, quiet)
    assert [(finding.kind, finding.name[:3], finding.fault) for finding in checked.findings] == [
        ("result", "000", "damaged"),
        ("blob", build.files[0].digest[:3], "damaged"),
        ("blob", export.files[0].digest[:3], "missing"),
        ("result", verify.key[:3], "missing"),
    ]
    assert checked.findings[1].affected == (f"net:build/host {build.key[:12]}",)
    again = FakeExecutor()
    assert session.run_plan(plan, store, again, ignore, options(store)).exit_code == 0
    assert sorted(again.ran) == ["net/build+host", "net/export+host", "net/verify+host"]
    assert check_integrity(store, quiet).findings == ()


def test_the_integrity_check_names_what_is_pinned_and_missing(store: LocalStore) -> None:
    """A release whose results are missing cannot be made from this store; the report names the pin."""
    add_pin(store, "v1.release", ["a" * 64], ["b" * 64])
    assert check_integrity(store, quiet).findings == (
        Finding("result", "a" * 64, "missing", ("pinned by v1.release",)),
        Finding("blob", "b" * 64, "missing", ("pinned by v1.release",)),
    )


# ---------------------------------------------------------------- runs and collections at once


def ignore(event: dict[str, Any]) -> None: ...


def options(store: LocalStore) -> session.SessionOptions:
    return session.SessionOptions(jobs=2, dist=str(Path(store.root).parent / "dist"))


def a_plan(folder: Path, model: str, name: str = "net", *, targets: int = 1) -> Plan:
    """A recipe of four stages, and of one model or another."""
    place = folder / model
    place.mkdir(exist_ok=True)
    if not (place / "net.onnx").exists():
        aside = place / f"{os.getpid()}"
        aside.write_text(model)
        aside.rename(place / "net.onnx")
    made = recipe(name, outputs=["bundle"])
    return plan_of(planned(made, stages=COMPILE, folder=str(place)))


def delivered(folder: Path, name: str) -> dict[str, str]:
    """Return every delivered file of a recipe, without the recipe's name in its own."""
    base = folder / name
    return {
        str(path.relative_to(base)): path.read_text() for path in base.rglob("*") if path.is_file()
    }


def storm(folder: Path, *, processes: int, rounds: int, went: int) -> None:
    """Run several processes until so many collections took place meanwhile and removed so many results."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    LocalStore(str(folder / "store")).create()
    enough = str(folder / "enough")
    collector = start("collect", str(folder / "store"), enough, str(rounds), str(went))
    builders = [start("build", str(folder), str(seed), enough) for seed in range(processes)]
    outputs = [builder.communicate()[0] for builder in builders]
    collector.send_signal(signal.SIGTERM)
    collected = collector.communicate()[0]
    assert [builder.returncode for builder in builders] == [0] * processes, "\n".join(outputs)
    assert collector.returncode == 0, collected
    assert check_integrity(LocalStore(str(folder / "store")), quiet).findings == ()


def test_runs_lose_nothing_to_concurrent_collections(tmp_path: Path) -> None:
    """Two processes run recipes that share their results, while everything that no run uses is removed."""
    storm(tmp_path, processes=2, rounds=3, went=3)


@pytest.mark.faults
def test_a_hundred_runs_lose_nothing_to_concurrent_collections(tmp_path: Path) -> None:
    """The same with four processes, and a hundred collections that removed a hundred results."""
    storm(tmp_path, processes=4, rounds=100, went=100)


@pytest.mark.faults
def test_a_collection_killed_at_any_instant_leaves_a_valid_store(tmp_path: Path) -> None:
    """What can be found is complete; the next collection removes what the killed one left."""
    store = LocalStore(str(tmp_path / "store"))
    store.create()
    draw = random.Random(0)
    for step in range(40):
        for number in range(30):
            key = stage_key(number)
            if store.find(key.digest) is None:
                with store.claim(key.digest) as claim:
                    Path(claim.out, "content").write_bytes(b"%d" % number * 999)
                    Path(claim.out, "shared").write_bytes(b"%d" % (number % 7) * 999)
                    store.publish(claim, key, {}, 0.0)
        process = subprocess.Popen(
            [sys.executable, __file__, "collect", store.root, str(tmp_path / "enough"), "0", "0"],
            stdout=subprocess.PIPE,
        )
        time.sleep(draw.uniform(0.12, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for number in range(30):
            artifact = store.find(stage_key(number).digest)
            for file in artifact.files if artifact else ():
                assert hash_file(store.blobs.path(file.digest)) == file.digest, step
        assert store.damage == []
    collect_garbage(store, ALL)
    assert not [*stored_paths(store, "cas"), *stored_paths(store, "actions")]


def _hold(root: str) -> None:
    """Hold a lease for ever, in a process of its own."""
    with disk.hold_lease(root):
        print("held", flush=True)
        time.sleep(600)


def _collect(root: str, enough: str, least_rounds: str, least_gone: str) -> None:
    """In a process of its own: forget what recipes need and collect all, again and again until it is stopped.

    The file `enough` appears when there were so many collections and so many results went.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    store = LocalStore(root)
    rounds = went = 0
    try:
        while not stopped:
            for pin in list_recipe_pins(store):
                if rounds % 2:
                    remove_pin(store, pin.name)
            collection = collect_garbage(store, EXACT)
            rounds, went = (
                rounds + 1,
                went + sum(eviction.kind == "result" for eviction in collection.evictions),
            )
            if rounds >= int(least_rounds) and went >= int(least_gone):
                Path(enough).touch()
    finally:
        Path(enough).touch()  # no run continues for a collector that failed


def _build(folder: str, seed: str, enough: str) -> None:
    """Run a recipe of changing models in a process of its own until the file `enough` exists; every result must be right."""
    place, draw = Path(folder), random.Random(seed)
    right: dict[str, dict[str, str]] = {}
    store = LocalStore(f"{folder}/store")
    for number in itertools.count():
        if Path(enough).exists():
            return
        model = draw.choice(["one", "two", "three"])
        executor = FakeExecutor(draw.uniform(0, 0.05))
        dist = place / f"dist-{seed}"
        chosen = session.SessionOptions(jobs=2, dist=str(dist))
        report = session.run_plan(a_plan(place, model), store, executor, ignore, chosen)
        assert report.exit_code == 0, report
        assert report.damage == (), report
        twice = [stage for stage, times in Counter(executor.ran).items() if times > 1]
        assert twice == [], (number, twice)
        if model not in right:
            alone = LocalStore(f"{folder}/alone-{seed}-{model}")
            alone.create()
            chosen = session.SessionOptions(dist=f"{folder}/right-{seed}-{model}")
            session.run_plan(a_plan(place, model), alone, FakeExecutor(), ignore, chosen)
            right[model] = delivered(Path(chosen.dist), "net")
            # the file, the verdict, the measurements, what describes them, and the README
            assert len(right[model]) == 7
        assert delivered(dist, "net") == right[model], number


COMMANDS: dict[str, Any] = {"hold": _hold, "collect": _collect, "build": _build}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])


# ---------------------------------------------------------------- clocks


YEAR = 365.0


def test_times_ahead_of_the_clock_keep_nothing_for_years(store: LocalStore) -> None:
    """A clock that was years ahead when results were made: they age from the next collection on."""
    make(store, "a", days=-30 * YEAR)
    blob = Path(store.blobs.path(make(store, "b", days=90).files[0].digest))
    assert evicted(collect_garbage(store, ALL)) == [f"result build {short('b')}"]
    assert not blob.exists()
    [path] = stored_paths(store, "actions")
    assert abs(path.stat().st_mtime - time.time()) < 60
    set_back(path, 1)
    assert evicted(collect_garbage(store, ALL)) == [f"result build {short('a')}"]


def test_a_result_from_the_future_is_marked_when_it_is_used(store: LocalStore) -> None:
    """It would count as used until then."""
    made = make(store, "a", days=-30 * YEAR)
    path = Path(store.action_path(made.key))
    assert store.find(made.key)
    assert abs(path.stat().st_mtime - time.time()) < 60


def test_a_run_keeps_its_results_when_the_clock_is_set_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds and makes afterwards has times before those of its lease."""
    old = make(store, "old", days=90)
    other = LocalStore(store.root)
    with store.running():
        [lease] = Path(store.root, "runs").iterdir()
        ahead_ns = time.time_ns() + 3600 * 10**9
        os.utime(lease, ns=(ahead_ns, ahead_ns))
        monkeypatch.setattr(store._lease, "began_ns", ahead_ns)
        assert store.find(old.key)
        made = make(store, "made")
        os.utime(store.action_path(made.key))
        later_ns = time.time_ns() + 600 * 10**9
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: later_ns)
            garbage_collection._remove_unused(other, Limits(0.0), later_ns)
        assert other.find(old.key) and other.find(made.key)
        assert lease.stat().st_mtime_ns < ahead_ns
