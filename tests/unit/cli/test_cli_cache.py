"""`tvmflow cache`: its output and its exit codes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.stored_results import stage_key
from tests.support.trials import DEVICE, TARGET
from tvmflow.cli import main, options
from tvmflow.store.inventory import add_pin
from tvmflow.store.local import LocalStore
from tvmflow.tuning.ledger import Ledger

DAY = 86_400.0
NEEDED, UNUSED = stage_key("a").digest, stage_key("b").digest


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with a result that a recipe needs and an older one that nothing needs."""
    monkeypatch.setenv("TVMFLOW_STORE", str(tmp_path / "cache"))
    made = LocalStore(str(tmp_path / "cache"))
    made.create()
    for text, days in (("a", 3), ("b", 40)):
        key = stage_key(text)
        with made.claim(key.digest) as claim:
            Path(claim.out, "lib0.o").write_bytes(text.encode() * 2000)
            made.publish(claim, key, {}, 0.1, "net:build/host")
        when = time.time() - days * DAY
        os.utime(made.action_path(key.digest), (when, when))
    made.remember("net", "build/host", NEEDED)
    return made


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main.main(["cache", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_stat_shows_results_by_recipe_and_what_gc_would_free(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes with their stages, results that nothing needs, and the same as JSON."""
    code, out, _ = answer(capsys, "stat")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "net 1 result 2.3 kB last used 3 days ago" in lines
    assert "build 1 result 2.3 kB" in lines
    assert "unused 1 result 2.3 kB" in lines
    assert lines[-1] == "`tvmflow cache gc` would free 2.3 kB; with --max-age 0, 2.3 kB"
    report: Any = json.loads(answer(capsys, "stat", "--json")[1])
    assert [recipe["name"] for recipe in report["recipes"]] == ["net"]
    assert report["collectable_bytes"] == report["unused_bytes"] > 2000


def test_gc_shows_a_line_with_a_reason_for_each_eviction(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --dry-run nothing is removed; a result that a recipe needs is kept."""
    code, out, _ = answer(capsys, "gc", "--dry-run")
    first, last = out.splitlines()
    assert code == 0
    assert (
        first.split()
        == (
            f"result net:build/host {UNUSED[:12]} 40 days 2.3 kB "
            "nothing needs it, and it was not used for 30 days"
        ).split()
    )
    assert last.startswith("2.3 kB would be removed, ")
    assert store.find(UNUSED) is not None
    when = time.time() - 40 * DAY
    os.utime(store.action_path(UNUSED), (when, when))
    report: Any = json.loads(answer(capsys, "gc", "--json")[1])
    assert (report["done"], [eviction["kind"] for eviction in report["evictions"]]) == (
        True,
        ["result"],
    )
    assert store.find(UNUSED) is None
    assert store.find(NEEDED) is not None


def test_gc_that_cannot_reach_the_size_refers_to_the_pins(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A needed result is never removed: the exit code is 1, and the message says how to unpin."""
    code, out, _ = answer(capsys, "gc", "--max-size", "100B")
    assert code == 1
    assert "tvmflow cache pins" in out and "tvmflow cache unpin NAME" in out
    assert store.find(NEEDED) is not None
    _, out, _ = answer(capsys, "pins")
    assert out.split()[:3] == ["recipe:net", "1", "result"]
    assert answer(capsys, "unpin", "recipe:net")[0] == 0
    assert answer(capsys, "pins")[1] == "nothing is pinned\n"
    code, _, err = answer(capsys, "unpin", "recipe:net")
    assert (code, "`tvmflow cache pins` lists the pins" in err) == (2, True)


def test_a_pin_without_its_lock_file_is_shown_with_the_command_that_removes_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not removed automatically: the file may only have been moved."""
    add_pin(store, "net.lock.yaml", [NEEDED, "f" * 64], file="/gone/net.lock.yaml")
    _, out, _ = answer(capsys, "pins")
    assert "1 of them missing" in out
    assert "/gone/net.lock.yaml does not exist: `tvmflow cache unpin net.lock.yaml`" in out


def test_verify_names_damaged_results(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 with the results that a damaged blob belongs to, otherwise 0."""
    artifact = store.find(NEEDED)
    assert artifact is not None
    blob = Path(store.blobs.path(artifact.files[0].digest))
    blob.chmod(0o644)
    blob.write_bytes(b"A" * 2000)
    moved = Path(store.action_path("0" * 64))
    moved.parent.mkdir()
    shutil.copyfile(store.action_path(UNUSED), moved)
    code, out, _ = answer(capsys, "verify")
    assert code == 1
    assert f"result {'0' * 64} was damaged and set aside" in out
    assert f"blob {blob.name} was damaged and set aside\n  net:build/host {NEEDED[:12]}" in out
    code, out, _ = answer(capsys, "verify")
    assert (code, f"blob {blob.name} is missing" in out) == (1, True)
    assert "2 results and 1 blob read" in out


def test_verify_says_of_damaged_trials_that_no_result_is_missing(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes need not run again for them."""
    ledger = Ledger.open(Path(store.ledger), TARGET, "0", DEVICE)
    (ledger.folder / f"{'a' * 64}.jsonl").write_text("no trial\n")
    code, out, _ = answer(capsys, "verify")
    assert (code, "one line was quarantined (unreadable" in out) == (1, True)
    assert out.endswith(
        "  fix: the next `tune` stage measures what is missing; all other trials stay in use\n"
    )


def test_repair_says_what_it_did_and_what_is_left(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every damaged file has a line with its new name, and what nobody can make again a fix; no trial is lost."""
    root = Path(store.root)
    add_pin(store, "v1", [NEEDED])
    trials = root / "ledger" / "target" / "kernel.jsonl"
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    (root / "format").write_text("")
    (root / "pins" / "v1").write_text("")
    os.mkfifo(root / "ledger" / "target" / "pipe.jsonl")
    (root / "ledger" / "target" / "folder.jsonl").mkdir()
    (root / "photo.jpg").write_text("mine")
    code, out, _ = answer(capsys, "verify")
    assert (code, "`tvmflow cache repair` sets aside" in out) == (1, True)
    assert "file photo.jpg is damaged: it is not part of a store" in out
    (root / "photo.jpg").unlink()
    (root / "last" / "net" / "build+host").write_text("")
    (root / "history").mkdir()
    (root / "history" / "zzzzzzz.json").write_text("{")
    code, out, _ = answer(capsys, "repair")
    assert code == 1
    for line in (
        "format format: it does not name the format of this store; moved to damaged/format",
        "note last/net/build+host: its content is damaged; moved to damaged/build+host; the next run makes it again",
        "run record history/zzzzzzz.json: its content is damaged; moved to damaged/zzzzzzz.json; nothing else says what that run did",
        "pin pins/v1: its content is damaged; moved to damaged/v1",
        "trials ledger/target/folder.jsonl: it is not a file; moved to damaged/folder.jsonl",
        "trials ledger/target/pipe.jsonl: it is not a file; moved to damaged/pipe.jsonl",
    ):
        assert line in out.splitlines(), out
    assert "fix: make the lock file or the release of that name again" in out
    assert "6 files repaired" in out and "3 to repair by hand; nothing was deleted" in out
    assert trials.exists()
    (root / "ledger" / "target" / "kernel.jsonl").unlink()
    trials.parent.rmdir()
    assert answer(capsys, "repair")[:2] == (0, "nothing is damaged\n")
    assert answer(capsys, "verify")[0] == 0


def test_somebody_elses_folder_is_not_repaired_into_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its format, only what contains nothing else is still recognized."""
    (tmp_path / "cas").mkdir()
    (tmp_path / "photo.jpg").write_text("mine")
    code, _, err = answer(capsys, "repair", "--store", str(tmp_path))
    assert (code, "is not a tvmflow store" in err) == (2, True)


def test_a_folder_that_is_not_a_store_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all for commands that remove files."""
    for word in ("stat", "verify", "gc", "pins"):
        code, _, err = answer(capsys, word, "--store", str(tmp_path))
        assert (code, f"{tmp_path} is not a tvmflow store" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "seconds"),
    [("30d", 30 * DAY), ("1.5h", 5400), ("90min", 5400), ("2w", 14 * DAY), ("0", 0)],
)
def test_ages_have_units(word: str, seconds: float) -> None:
    assert options.age(word) == seconds


@pytest.mark.parametrize(
    ("word", "number"), [("20GB", 20 * 10**9), ("1.5 GiB", 3 << 29), ("500kB", 500_000), ("0", 0)]
)
def test_sizes_have_units(word: str, number: int) -> None:
    assert options.size(word) == number


@pytest.mark.parametrize("word", ["30", "-1d", "d", "1e3d", "30 years", "", "nan", "١d"])
def test_an_ambiguous_age_is_an_error(word: str) -> None:
    """A number without a unit may be days or seconds."""
    with pytest.raises(argparse.ArgumentTypeError, match="such as 30d"):
        options.age(word)
