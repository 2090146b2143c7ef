"""`tvmflow cache`: what it says, and with which exit code."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tvmflow import cli
from tvmflow.commands import cache
from tvmflow.stores.local import LocalStore
from tvmflow.values import StageKey

DAY = 86_400.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with a result that a recipe needs and an older one that nothing does."""
    monkeypatch.setenv("TVMFLOW_STORE", str(tmp_path / "cache"))
    made = LocalStore(str(tmp_path / "cache"))
    made.create()
    for text, days in (("a", 3), ("b", 40)):
        key = StageKey(text * 64, {"stage": "build"})
        with made.claim(key.digest) as slot:
            Path(slot.out, "lib0.o").write_bytes(text.encode() * 2000)
            made.publish(slot, key, {}, 0.1, "net:build/host")
        when = time.time() - days * DAY
        os.utime(Path(made.root, "actions", text * 2, key.digest), (when, when))
    made.remember("net", "build/host", "a" * 64)
    return made


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["cache", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_stat_says_whose_results_there_are_and_what_gc_would_free(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recipes with their stages, what nothing needs, and the same as JSON."""
    code, out, _ = answer(capsys, "stat")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "net 1 results 2.3 kB last used 3 days ago" in lines
    assert "build 1 results 2.3 kB" in lines
    assert "nothing needs 1 results 2.3 kB" in lines
    assert lines[-1] == "`tvmflow cache gc` would free 2.3 kB; with --max-age 0, 2.3 kB"
    found: Any = json.loads(answer(capsys, "stat", "--json")[1])
    assert [each["name"] for each in found["recipes"]] == ["net"]
    assert found["free_now"] == found["free_all"] > 2000


def test_gc_says_line_by_line_what_goes_and_why(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """First what would go, then what went; what a recipe needs is there afterwards."""
    code, out, _ = answer(capsys, "gc", "--dry-run")
    first, last = out.splitlines()
    assert code == 0
    assert (
        first.split()
        == (
            "result net:build/host bbbbbbbbbbbb 40 days 2.3 kB "
            "nothing needs it, and it was not used for 30 days"
        ).split()
    )
    assert last.startswith("2.3 kB would be removed, ")
    assert store.find("b" * 64) is not None
    when = time.time() - 40 * DAY
    os.utime(Path(store.root, "actions", "bb", "b" * 64), (when, when))
    found: Any = json.loads(answer(capsys, "gc", "--json")[1])
    assert (found["done"], [each["kind"] for each in found["gone"]]) == (True, ["result"])
    assert store.find("b" * 64) is None
    assert store.find("a" * 64) is not None


def test_gc_that_cannot_reach_the_size_says_what_holds_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that is needed goes for a number; the exit code tells, and so does the way out."""
    code, out, _ = answer(capsys, "gc", "--max-size", "100B")
    assert code == 1
    assert "tvmflow cache pins" in out and "tvmflow cache unpin NAME" in out
    assert store.find("a" * 64) is not None
    _, out, _ = answer(capsys, "pins")
    assert out.split()[:3] == ["recipe:net", "1", "results"]
    assert answer(capsys, "unpin", "recipe:net")[0] == 0
    assert answer(capsys, "pins")[1] == "nothing is pinned\n"
    code, _, err = answer(capsys, "unpin", "recipe:net")
    assert (code, "`tvmflow cache pins` lists what is" in err) == (2, True)


def test_a_pin_whose_lock_file_is_gone_is_told_with_the_command_that_drops_it(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays until somebody says so: the file may only have moved."""
    store.pin("net.lock.yaml", ["a" * 64, "f" * 64], file="/gone/net.lock.yaml")
    _, out, _ = answer(capsys, "pins")
    assert "1 of them missing" in out
    assert "/gone/net.lock.yaml is gone: `tvmflow cache unpin net.lock.yaml`" in out


def test_verify_names_what_is_wrong(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when all is right; 1 with the results that a wrong content belonged to."""
    artifact = store.find("a" * 64)
    assert artifact is not None
    # keys in this test are no digests of what they stand for, which counts as wrong too
    code, out, _ = answer(capsys, "verify")
    assert code == 1
    assert f"result {'a' * 64} was damaged and set aside" in out
    assert "net:build/host aaaaaaaaaaaa" in out
    code, out, _ = answer(capsys, "verify")
    assert (code, out.partition(" (")[0]) == (0, "0 results and 2 contents read")


def test_a_folder_that_is_no_store_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all by what removes things."""
    for word in ("stat", "verify", "gc", "pins"):
        code, _, err = answer(capsys, word, "--store", str(tmp_path))
        assert (code, f"{tmp_path} is not a tvmflow store" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "seconds"),
    [("30d", 30 * DAY), ("1.5h", 5400), ("90min", 5400), ("2w", 14 * DAY), ("0", 0)],
)
def test_ages_have_units(word: str, seconds: float) -> None:
    assert cache.age(word) == seconds


@pytest.mark.parametrize(
    ("word", "number"), [("20GB", 20 * 10**9), ("1.5 GiB", 3 << 29), ("500kB", 500_000), ("0", 0)]
)
def test_sizes_have_units(word: str, number: int) -> None:
    assert cache.size(word) == number


@pytest.mark.parametrize("word", ["30", "-1d", "d", "1e3d", "30 years", "", "nan", "١d"])
def test_an_age_that_could_mean_two_things_is_none(word: str) -> None:
    """A number alone may be days or seconds: better asked than guessed."""
    with pytest.raises(argparse.ArgumentTypeError, match="such as 30d"):
        cache.age(word)
