"""Collecting what nobody needs: what goes, what stays, and that runs beside it lose nothing."""

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
from tests.support.pretend import PretendExecutor
from tvmflow import runner
from tvmflow.errors import StoreError, UsageError
from tvmflow.stores import checking, collect, contents, leases
from tvmflow.stores.collect import DAY, Collected, Limits
from tvmflow.stores.local import LocalStore, hash_file
from tvmflow.values import Artifact, Plan, StageKey

ALL = Limits(max_age_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def make(
    store: LocalStore, text: str, *, days: float = 0, size: int = 100, made_for: str = ""
) -> Artifact:
    """A result with a content of its own, last used so many days ago."""
    key = StageKey(text * 64, {"stage": "build", "inputs": {}})
    with store.claim(key.digest) as slot:
        Path(slot.out, "x").write_bytes(text.encode() * size)
        made = store.publish(slot, key, {}, 0.1, made_for)
    set_back(Path(store.root, "actions", key.digest[:2], key.digest), days)
    return made


def set_back(path: Path, days: float) -> None:
    """Make a file look as if it had been used last so many days ago, and a minute."""
    when = time.time() - days * DAY - 60
    os.utime(path, (when, when))


def gone(found: Collected) -> list[str]:
    return [f"{each.kind} {each.name}" for each in found.gone]


@pytest.fixture(autouse=True)
def long_ago(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a test just made counts as made before; no measurement on this machine is waited for."""
    monkeypatch.setattr(collect, "_SLACK_NS", -5 * 10**9)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_what_a_recipe_last_needed_stays_and_the_rest_goes_by_age(store: LocalStore) -> None:
    """A root stays however old it is; what nothing needs goes once it is older than the limit, content and all."""
    root = make(store, "a", days=400, made_for="net:build/host")
    old = make(store, "b", days=31, made_for="net:build/host")
    young = make(store, "c", days=29)
    store.remember("net", "build/host", root.key)
    dry = collect.collect(store, Limits(), do=False)
    assert gone(dry) == ["result net:build/host " + "b" * 12]
    assert dry.gone[0].reason == "nothing needs it, and it was not used for 30 days"
    assert store.find(old.key) == old
    set_back(Path(store.root, "actions", "bb", "b" * 64), 31)
    done = collect.collect(store, Limits(), do=True)
    assert (gone(done), done.freed) == (gone(dry), dry.freed)
    assert store.find(old.key) is None
    assert not Path(store.blob(old.files[0].digest)).exists()
    assert [store.find(each.key) for each in (root, young)] == [root, young]


def test_a_content_that_a_needed_result_shares_stays(store: LocalStore) -> None:
    """Equal files are kept once, and for as long as one result that stays names them."""
    for text in "ab":
        key = StageKey(text * 64, {"stage": "build"})
        with store.claim(key.digest) as slot:
            Path(slot.out, "same").write_text("same")
            shared = store.publish(slot, key, {}, 0.1).files[0]
    store.remember("net", "build", "a" * 64)
    assert gone(collect.collect(store, ALL, do=True)) == ["result build " + "b" * 12]
    assert store.find("b" * 64) is None
    assert store.find("a" * 64) is not None
    assert Path(store.blob(shared.digest)).read_text() == "same"


def test_max_size_takes_what_was_unused_longest_until_the_store_fits(store: LocalStore) -> None:
    """The youngest of what nothing needs stays; when even the needed is too much, that is said."""
    for number, text in enumerate("abcd"):
        make(store, text, days=10 - number, size=10_000)
    store.remember("net", "build", "a" * 64)
    found = collect.collect(store, Limits(None, 32_000), do=True)
    assert [each.rpartition(" ")[2] for each in gone(found)] == ["b" * 12]
    assert found.kept_bytes <= 32_000
    found = collect.collect(store, Limits(None, 5_000), do=True)
    assert [each.rpartition(" ")[2][:1] for each in gone(found)] == ["c", "d"]
    assert found.kept_bytes > 5_000
    assert store.find("a" * 64) is not None


def test_a_pin_keeps_results_and_contents_until_it_is_dropped(store: LocalStore) -> None:
    """Locks and releases pin by name; what is missing is said at once; dropping one lets gc have it."""
    made = make(store, "a", days=90)
    loose = Path(store.root, "loose")
    loose.write_text("a content without a result")
    digest = store.add_file(str(loose))
    absent = "f" * 64
    assert store.pin("net.lock.yaml", [made.key, absent], [digest], file="/gone/net.lock.yaml") == [
        absent
    ]
    assert collect.collect(store, ALL, do=True).gone == ()
    [pin] = contents.pins(store)
    assert (pin.name, pin.file) == ("net.lock.yaml", "/gone/net.lock.yaml")
    with pytest.raises(UsageError, match=r"nothing is pinned as 'net\.lock'"):
        contents.unpin(store, "net.lock")
    contents.unpin(store, "net.lock.yaml")
    kinds = [each.kind for each in collect.collect(store, ALL, do=True).gone]
    assert sorted(kinds) == ["content", "result"]


def test_a_pin_that_cannot_be_read_stops_the_collection(store: LocalStore) -> None:
    """What it needs is not known, so nothing goes; the error names it and the way out."""
    made = make(store, "a", days=90)
    store.write_note("{", "pins", "broken")
    with pytest.raises(StoreError, match="pins/broken cannot be read") as raised:
        collect.collect(store, ALL, do=True)
    assert "tvmflow cache unpin broken" in raised.value.fix
    assert store.find(made.key) == made


def test_what_a_living_run_has_used_stays(store: LocalStore, monkeypatch: Any) -> None:
    """Found or made since it began: kept whatever the limits. After it ended, it goes."""
    monkeypatch.setattr(collect, "_SLACK_NS", 0)
    found, other = make(store, "a", days=90), make(store, "b", days=90)
    run = LocalStore(store.root)
    with run.running():
        assert run.find(found.key) == found
        made = make(run, "c")
        store.find(made.key)
        os.utime(Path(store.root, "actions", "cc", made.key))
        gone_now = collect.collect(store, ALL, do=True)
        assert (gone(gone_now), gone_now.runs) == (["result build " + "b" * 12], 1)
        assert run.find(found.key) == found
        assert run.find(other.key) is None
    time.sleep(0.02)
    assert len(collect.collect(store, ALL, do=True).gone) == 2


def test_a_part_of_a_run_is_no_run_of_its_own(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the whole used stays when the part has ended, and it is told of as one."""
    monkeypatch.setattr(collect, "_SLACK_NS", 0)
    made = make(store, "a", days=90)
    run = LocalStore(store.root)
    with run.running() as began:
        with run.running() as part:
            assert part == began
            assert run.find(made.key) == made
        found = collect.collect(store, ALL, do=False)
        assert (found.gone, found.runs) == ((), 1)
    assert leases.living(store.root) == []


def test_a_result_that_is_used_after_it_was_chosen_is_passed_over(
    store: LocalStore, monkeypatch: Any
) -> None:
    """A run that begins in the middle finds what it needs, and that stays with its contents."""
    monkeypatch.setattr(collect, "_SLACK_NS", 0)
    made = make(store, "a", days=90)
    make(store, "b", days=80)
    run = LocalStore(store.root)
    look = contents.look

    def look_and_be_overtaken(of: LocalStore) -> Any:
        seen = look(of)
        stack.enter_context(run.running())
        assert run.find(made.key) == made
        return seen

    monkeypatch.setattr(collect, "look", look_and_be_overtaken)
    with contextlib.ExitStack() as stack:
        assert gone(collect.collect(store, ALL, do=True)) == ["result build " + "b" * 12]
        assert Path(run.checked_blob(made.files[0].digest)).read_bytes() == b"a" * 100


def test_looking_at_an_up_to_date_result_writes_once_a_day(store: LocalStore) -> None:
    """Without a run, use is noted to the day: what was used within one is not written again."""
    made = make(store, "a", days=0.5)
    path = Path(store.root, "actions", "aa", made.key)
    before = path.stat().st_mtime_ns
    store.find(made.key)
    assert path.stat().st_mtime_ns == before
    set_back(path, 1.5)
    store.find(made.key)
    assert time.time() - path.stat().st_mtime < 60


def test_leftovers_go_and_what_is_held_stays(store: LocalStore, tmp_path: Path) -> None:
    """Contents without a name, downloads, work of kills, memories of files that are gone: with a reason each."""
    root = make(store, "a")
    key = StageKey("e" * 64, {"stage": "import", "inputs": {"model": "d" * 64}})
    with store.claim(key.digest) as slot:
        Path(slot.out, "x").write_text("import")
        store.publish(slot, key, {}, 0.1)
    store.remember("net", "build", root.key)
    store.remember("net", "import", key.digest)
    downloads = Path(store.downloads)
    downloads.mkdir()
    for name in ("c" * 64, "d" * 64, "c" * 64 + ".lock"):
        (downloads / name).write_text("model")
        set_back(downloads / name, 90)
    (tmp_path / "loose").write_text("loose")
    store.add_file(str(tmp_path / "loose"))
    for folder in ("1" * 64, "2" * 64):
        Path(store.root, "work", folder, "work").mkdir(parents=True)
        Path(store.root, "work", folder, "claim").touch()
    store.write_note(json.dumps({"path": "/gone", "stamp": [], "digest": ""}), "stats", "s1")
    store.write_note(json.dumps({"path": str(tmp_path), "stamp": [], "digest": ""}), "stats", "s2")
    store.write_note("{}", "plans", "p")
    trials = Path(store.ledger, "t", "w.jsonl")
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    with store.claim("1" * 64):
        found = collect.collect(store, ALL, do=True)
    assert sorted(gone(found)) == [
        f"content {hash_of('loose')[:12]}…",
        "download cccccccccccc…",
        "note stats/s1",
        "work 222222222222…",
    ]
    assert trials.read_text() == "{}\n"
    assert store.find(root.key) == root
    assert gone(collect.collect(store, ALL, do=False)) == ["work " + "1" * 12 + "…"]


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_two_collections_at_once_are_refused(store: LocalStore) -> None:
    """The second says so; it does not wait for hours."""
    with collect.alone_at_it(store), pytest.raises(StoreError, match="another `tvmflow cache gc`"):
        collect.collect(store, ALL, do=True)


def test_a_full_disk_is_no_reason_not_to_collect(store: LocalStore, monkeypatch: Any) -> None:
    """Without room for a lease, it collects while nobody else uses the store, and refuses otherwise."""
    make(store, "a", days=90)

    def full(root: str) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    other = LocalStore(store.root)
    with other.running(), monkeypatch.context() as patch:
        patch.setattr(leases, "held", full)
        with pytest.raises(StoreError, match="a run is using the store"):
            collect.collect(store, ALL, do=True)
    monkeypatch.setattr(leases, "held", full)
    assert gone(collect.collect(store, ALL, do=True)) == ["result build " + "a" * 12]


def test_a_dry_run_writes_nothing(store: LocalStore) -> None:
    """Not a byte and not a time of the store changes, so it may be run on a store that cannot be written."""
    make(store, "a", days=90)

    def everything() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in Path(store.root).rglob("*")}

    before = everything()
    assert len(collect.collect(store, ALL, do=False).gone) == 1
    assert everything() == before


def test_runs_side_by_side_in_one_process_share_what_is_held(store: LocalStore) -> None:
    """The first to end lets go of nothing: stages of a worker are threads of one process."""
    first, second = store.running(), store.running()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(leases.living(store.root)) == 1
    with pytest.raises(StoreError), LocalStore(store.root).alone():
        pass
    second.__exit__(None, None, None)
    assert leases.living(store.root) == []
    with LocalStore(store.root).alone():
        pass


def test_a_lease_dies_with_its_process_and_is_cleared_away(store: LocalStore) -> None:
    """A kill leaves a file that nobody holds: it counts for nothing."""
    process = subprocess.Popen(
        [sys.executable, __file__, "hold", store.root], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert len(leases.living(store.root)) == 1
    process.kill()
    process.communicate()
    assert leases.living(store.root, tidy=True) == []
    assert list(Path(store.root, "runs").iterdir()) == []


# ---------------------------------------------------------------- verify


def quiet(done: int, total: int) -> None: ...


def test_verify_sets_aside_what_is_wrong_and_names_whose_it_was(store: LocalStore) -> None:
    """A flipped bit, a lost file, an action under another's key: each found; what is right stays."""
    plan = a_plan(Path(store.root).parent, "one")
    report = runner.run(plan, store, PretendExecutor(), ignore, options(store))
    assert report.exit_code == 0
    assert checking.check(store, quiet).findings == ()
    found = {
        spec.stage: store.find(store.last_key("net", spec.label) or "") for spec in plan.stages
    }
    build, export, verify = (found[stage] for stage in ("build", "export", "verify"))
    assert build and export and verify
    flipped = Path(store.blob(build.files[0].digest))
    flipped.chmod(0o644)
    flipped.write_bytes(flipped.read_bytes().replace(b"kernels", b"Kernels"))
    Path(store.blob(export.files[0].digest)).unlink()
    moved = contents.action_path(store, "0" * 64)
    moved.parent.mkdir()
    contents.action_path(store, verify.key).rename(moved)
    checked = checking.check(store, quiet)
    assert [(each.what, each.name[:3], each.fault) for each in checked.findings] == [
        ("result", "000", "wrong"),
        ("content", build.files[0].digest[:3], "wrong"),
        ("content", export.files[0].digest[:3], "missing"),
    ]
    assert checked.findings[1].results == (f"net:build/host {build.key[:12]}",)
    again = PretendExecutor()
    assert runner.run(plan, store, again, ignore, options(store)).exit_code == 0
    assert sorted(again.ran) == ["net/build+host", "net/export+host", "net/verify+host"]
    assert checking.check(store, quiet).findings == ()


def test_verify_names_what_is_pinned_and_missing(store: LocalStore) -> None:
    """A release whose results are gone cannot be had again from here: that is said, and by whom they are pinned."""
    store.pin("v1.release", ["a" * 64], ["b" * 64])
    assert checking.check(store, quiet).findings == (
        checking.Finding("result", "a" * 64, "missing", ("pinned by v1.release",)),
        checking.Finding("content", "b" * 64, "missing", ("pinned by v1.release",)),
    )


# ---------------------------------------------------------------- runs and collections at once


def ignore(event: dict[str, Any]) -> None: ...


def options(store: LocalStore) -> runner.RunOptions:
    return runner.RunOptions(jobs=2, dist=str(Path(store.root).parent / "dist"))


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
    """Every delivered file of a recipe, without the recipe's name in its own."""
    base = folder / name
    return {
        str(path.relative_to(base)): path.read_text() for path in base.rglob("*") if path.is_file()
    }


def storm(folder: Path, *, processes: int, rounds: int, went: int) -> None:
    """Runs in several processes, until so many collections went on beside them and took so many results."""
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
    told = [each.communicate()[0] for each in builders]
    collector.send_signal(signal.SIGTERM)
    collected = collector.communicate()[0]
    assert [each.returncode for each in builders] == [0] * processes, "\n".join(told)
    assert collector.returncode == 0, collected
    assert checking.check(LocalStore(str(folder / "store")), quiet).findings == ()


def test_runs_lose_nothing_to_collections_beside_them(tmp_path: Path) -> None:
    """Three processes run recipes that share their results, while all that no run holds is removed."""
    storm(tmp_path, processes=3, rounds=5, went=5)


@pytest.mark.faults
def test_a_hundred_runs_lose_nothing_to_collections_beside_them(tmp_path: Path) -> None:
    """The same, four processes and a hundred collections that took a hundred results."""
    storm(tmp_path, processes=4, rounds=100, went=100)


@pytest.mark.faults
def test_a_collection_killed_at_any_instant_leaves_a_right_store(tmp_path: Path) -> None:
    """What can be found is whole; the next collection takes what the killed one left."""
    store = LocalStore(str(tmp_path / "store"))
    store.create()
    draw = random.Random(0)
    for step in range(40):
        for number in range(30):
            key = StageKey(f"{number:064d}", {"stage": "x"})
            if store.find(key.digest) is None:
                with store.claim(key.digest) as slot:
                    Path(slot.out, "content").write_bytes(b"%d" % number * 999)
                    Path(slot.out, "shared").write_bytes(b"%d" % (number % 7) * 999)
                    store.publish(slot, key, {}, 0.0)
        process = subprocess.Popen(
            [sys.executable, __file__, "collect", store.root, str(tmp_path / "enough"), "0", "0"],
            stdout=subprocess.PIPE,
        )
        time.sleep(draw.uniform(0.12, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for number in range(30):
            found = store.find(f"{number:064d}")
            for file in found.files if found else ():
                assert hash_file(store.blob(file.digest)) == file.digest, step
        assert store.damage == []
    collect.collect(store, ALL, do=True)
    assert not [*contents.files_of(store, "cas"), *contents.files_of(store, "actions")]


def _hold(root: str) -> None:
    """In a process of its own: hold a lease for ever."""
    with leases.held(root):
        print("held", flush=True)
        time.sleep(600)


def _collect(root: str, enough: str, least_rounds: str, least_gone: str) -> None:
    """In a process of its own: forget what recipes need and collect all, again and again until told to stop.

    The file `enough` appears when there were so many collections and so many results went.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    collect._SLACK_NS = 0  # type: ignore[misc]
    store = LocalStore(root)
    rounds = went = 0
    try:
        while not stopped:
            for pin in contents.recipes(store):
                if rounds % 2:
                    contents.unpin(store, pin.name)
            found = collect.collect(store, ALL, do=True)
            rounds, went = rounds + 1, went + sum(each.kind == "result" for each in found.gone)
            if rounds >= int(least_rounds) and went >= int(least_gone):
                Path(enough).touch()
    finally:
        Path(enough).touch()  # nobody runs on for a collector that failed


def _build(folder: str, seed: str, enough: str) -> None:
    """In a process of its own: run a recipe of changing models until it is enough; everything must be right every time."""
    place, draw = Path(folder), random.Random(seed)
    right: dict[str, dict[str, str]] = {}
    store = LocalStore(f"{folder}/store")
    for number in itertools.count():
        if Path(enough).exists():
            return
        model = draw.choice(["one", "two", "three"])
        executor = PretendExecutor(draw.uniform(0, 0.05))
        dist = place / f"dist-{seed}"
        chosen = runner.RunOptions(jobs=2, dist=str(dist))
        report = runner.run(a_plan(place, model), store, executor, ignore, chosen)
        assert report.exit_code == 0, report
        assert report.damage == (), report
        twice = [stage for stage, times in Counter(executor.ran).items() if times > 1]
        assert twice == [], (number, twice)
        if model not in right:
            alone = LocalStore(f"{folder}/alone-{seed}-{model}")
            alone.create()
            chosen = runner.RunOptions(dist=f"{folder}/right-{seed}-{model}")
            runner.run(a_plan(place, model), alone, PretendExecutor(), ignore, chosen)
            right[model] = delivered(Path(chosen.dist), "net")
            # the file, the verdict, and what describes both
            assert len(right[model]) == 4
        assert delivered(dist, "net") == right[model], number


COMMANDS: dict[str, Any] = {"hold": _hold, "collect": _collect, "build": _build}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
