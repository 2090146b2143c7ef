"""Cleaning removes what can be made again, except what lock files and releases need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stored_results import stage_key
from tvmflow.core.errors import StoreError
from tvmflow.core.types import Artifact, StageKey
from tvmflow.store.garbage_collection import clean_store
from tvmflow.store.inventory import add_pin
from tvmflow.store.local import FILES, LocalStore

FREE, PINNED = stage_key("a"), stage_key("b")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def publish(store: LocalStore, key: StageKey, content: bytes) -> Artifact:
    with store.claim(key.digest) as claim:
        Path(claim.out, "x").write_bytes(content)
        return store.publish(claim, key, {}, 0.5)


def stored_files(store: LocalStore) -> set[str]:
    """Return the paths of all files in the store but those of the store itself."""
    root = Path(store.root)
    paths = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return paths - FILES


def test_cleaning_keeps_measured_trials_by_default(store: LocalStore) -> None:
    """The ledger is removed only on request."""
    publish(store, FREE, b"content")
    store.remember("net", "build", FREE.digest)
    trials = Path(store.ledger, "t", "w.jsonl")
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    cleaning = clean_store(store, ledger=False)
    assert (cleaning.results, cleaning.kept_results, cleaning.trial_bytes) == (1, 0, 0)
    assert cleaning.bytes > len(b"content")
    assert stored_files(store) == {"ledger/t/w.jsonl"}
    assert clean_store(store, ledger=True).trial_bytes == 3
    assert stored_files(store) == set()


def test_what_a_lock_file_or_a_release_needs_stays(store: LocalStore) -> None:
    """Its results with their blobs, its own blobs, and its pin; a recipe's results go."""
    publish(store, FREE, b"free")
    kept = publish(store, PINNED, b"pinned")
    for key in (FREE, PINNED):
        store.remember("net", f"build/{key.digest[:4]}", key.digest)
    page = store.blobs.add_file("page", str(_write(Path(store.root, "tmp", "page"), b"page")))
    add_pin(store, "v1", [PINNED.digest], [page.digest])
    cleaning = clean_store(store, ledger=False)
    assert (cleaning.results, cleaning.kept_results, cleaning.pins) == (1, 1, ("v1",))
    assert store.find(PINNED.digest) == kept
    assert store.find(FREE.digest) is None
    blobs = {kept.files[0].digest, page.digest}
    assert stored_files(store) == {
        f"actions/{PINNED.digest[:2]}/{PINNED.digest}",
        "pins/v1",
        *(f"cas/{digest[:2]}/{digest}" for digest in blobs),
    }
    size = sum(Path(store.root, name).stat().st_size for name in stored_files(store))
    assert cleaning.kept_bytes == size - Path(store.root, "pins", "v1").stat().st_size


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_preview_says_the_same_and_removes_nothing(store: LocalStore) -> None:
    publish(store, FREE, b"free")
    before = stored_files(store)
    preview = clean_store(store, ledger=False, dry_run=True)
    assert stored_files(store) == before
    assert clean_store(store, ledger=False) == preview


def test_a_pin_that_cannot_be_read_stops_the_cleaning(store: LocalStore) -> None:
    """What it needs is not known, so nothing is removed."""
    made = publish(store, FREE, b"free")
    _write(Path(store.root, "pins", "v1"), b"damaged\n\n")
    with pytest.raises(StoreError, match="it is not known which results it needs"):
        clean_store(store, ledger=False)
    assert store.find(FREE.digest) == made


def test_cleaning_is_refused_while_a_run_is_active(store: LocalStore) -> None:
    """Nothing is removed then."""
    made = publish(store, FREE, b"content")
    with store.running(), pytest.raises(StoreError, match="a run is using the store"):
        clean_store(LocalStore(store.root), ledger=False)
    assert store.find(FREE.digest) == made
