"""The local store: complete or absent, self-healing, safe for two at once and against kills."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tvmflow.errors import StoreError
from tvmflow.stores.cleaning import clean_store
from tvmflow.stores.local import Damaged, LocalStore, Slot, disk_errors, hash_file
from tvmflow.values import Artifact, StageKey


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def a_key(text: str = "a") -> StageKey:
    return StageKey(text * 64, {"stage": "import", "settings": {"x": text}})


def publish(store: LocalStore, key: StageKey, files: dict[str, bytes]) -> Artifact:
    """Claim the key and publish files under it."""
    with store.claim(key.digest) as slot:
        fill(slot, files)
        return store.publish(slot, key, {"fact": 1}, 0.5)


def fill(slot: Slot, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = Path(slot.out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def everything(store: LocalStore) -> set[str]:
    """The paths of all files in the store but its own furniture."""
    root = Path(store.root)
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return found - {"CACHEDIR.TAG", "format", "run.lock", "use.lock"}


def test_what_was_published_is_found_with_its_files_and_facts(store: LocalStore) -> None:
    """A published result comes back whole, and its pre-image with it."""
    made = publish(store, a_key(), {"model.json": b"{}", "deep/weights": b"w" * 100})
    assert store.find("a" * 64) == made
    assert {file.name: file.size for file in made.files} == {"deep/weights": 100, "model.json": 2}
    assert store.preimage("a" * 64) == a_key().preimage
    assert Path(store.checked_blob(made.files[1].digest)).read_bytes() == b"{}"


def test_equal_content_is_kept_once_and_no_work_folder_remains(store: LocalStore) -> None:
    """Two results with the same bytes share them; nothing else is left behind."""
    publish(store, a_key("a"), {"x": b"same"})
    publish(store, a_key("b"), {"y": b"same"})
    blobs = [path for path in everything(store) if path.startswith("cas/")]
    actions = [path for path in everything(store) if path.startswith("actions/")]
    assert (len(blobs), len(actions)) == (1, 2)
    assert everything(store) == {*blobs, *actions}


def test_an_unknown_key_is_a_miss(store: LocalStore) -> None:
    """Nothing is known of what never ran."""
    assert store.find("f" * 64) is None
    assert store.preimage("f" * 64) is None


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_result_whose_file_is_gone_or_cut_is_a_miss(store: LocalStore, damage: str) -> None:
    """A result counts only with all its files, at their size."""
    made = publish(store, a_key(), {"x": b"content"})
    blob = Path(store.blob(made.files[0].digest))
    blob.unlink()
    if damage == "shorter":
        blob.write_bytes(b"cont")
    assert store.find("a" * 64) is None


def test_a_flipped_bit_is_found_on_reading_and_healed_by_publishing_again(
    store: LocalStore,
) -> None:
    """A file of the right size and the wrong content is set aside when read; the next publish mends it."""
    made = publish(store, a_key(), {"x": b"content"})
    digest = made.files[0].digest
    blob = Path(store.blob(digest))
    blob.chmod(0o644)
    blob.write_bytes(b"cOntent")
    with pytest.raises(Damaged):
        store.checked_blob(digest)
    assert store.find("a" * 64) is None
    assert store.damage == [str(blob)]
    assert Path(store.root, "damaged", digest).read_bytes() == b"cOntent"
    assert publish(store, a_key(), {"x": b"content"}) == made
    assert Path(store.checked_blob(digest)).read_bytes() == b"content"


def test_a_damaged_action_is_a_miss_and_is_set_aside(store: LocalStore) -> None:
    """An action file that does not match its own digest is not believed."""
    publish(store, a_key(), {"x": b"content"})
    path = Path(store.root, "actions", "aa", "a" * 64)
    path.write_bytes(path.read_bytes().replace(b'"fact": 1', b'"fact": 2'))
    assert store.find("a" * 64) is None
    assert store.damage == [str(path)]


def test_a_claim_waits_for_the_other_process_and_sees_its_work_folder(store: LocalStore) -> None:
    """Two that want one key take turns; the second finds `work` as the first left it and `out` empty."""
    order: list[str] = []
    entered = threading.Event()

    def first() -> None:
        with store.claim("c" * 64) as slot:
            entered.set()
            Path(slot.work, "progress").write_text("half")
            Path(slot.out, "torn").write_text("x")
            time.sleep(0.1)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with LocalStore(store.root).claim("c" * 64) as slot:
        order.append("second")
        assert Path(slot.work, "progress").read_text() == "half"
        assert os.listdir(slot.out) == []  # noqa: PTH208 - names are all that is asked
    thread.join()
    assert order == ["first", "second"]


def test_many_processes_publishing_the_same_results_do_no_harm(store: LocalStore) -> None:
    """Four processes publish the same twenty results at once; every one is whole afterwards."""
    workers = [
        subprocess.Popen([sys.executable, __file__, "publish", store.root, str(seed)])
        for seed in range(4)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    for number in range(20):
        found = store.find(f"{number:064d}")
        assert found is not None
        assert Path(store.checked_blob(found.files[0].digest)).read_bytes() == b"%d" % number * 999


def test_a_claim_released_under_many_waiting_for_it_keeps_each_ones_files(
    store: LocalStore,
) -> None:
    """Processes that claim and release one key by turns never lose a file to the one before them."""
    workers = [
        subprocess.Popen([sys.executable, __file__, "take_turns", store.root, str(seed)])
        for seed in range(4)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]


def test_a_file_where_a_claim_should_be_is_named(store: LocalStore) -> None:
    """What is no folder is left alone, and the error says where it stands."""
    place = Path(store.root) / "work" / a_key().digest
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    with pytest.raises(StoreError, match="File exists"), store.claim(a_key().digest):
        pass
    assert place.read_text() == "mine"


def kill_while_publishing(store: LocalStore, delay: float) -> None:
    worker = subprocess.Popen([sys.executable, __file__, "publish", store.root, "0"])
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    worker.wait()


def assert_complete_or_absent(store: LocalStore) -> None:
    for number in range(20):
        found = store.find(f"{number:064d}")
        for file in found.files if found else ():
            assert hash_file(store.blob(file.digest)) == file.digest
    assert store.damage == []


def test_a_kill_leaves_complete_results_or_none(store: LocalStore) -> None:
    """After a SIGKILL at any instant, what can be found is whole, and the next run sweeps the rest."""
    for step in range(5):
        kill_while_publishing(store, 0.03 + 0.02 * step)
        assert_complete_or_absent(store)
    with store.running():
        assert not [path for path in everything(store) if path.startswith("tmp/")]


@pytest.mark.faults
def test_forty_kills_leave_complete_results_or_none(store: LocalStore) -> None:
    """The same, many times over."""
    for step in range(40):
        kill_while_publishing(store, 0.02 + 0.004 * step)
        assert_complete_or_absent(store)


def test_a_folder_with_other_things_is_not_taken_for_a_store(tmp_path: Path) -> None:
    """`--store ~` must not start to fill somebody's home."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"not a tvmflow store: it holds 'thesis\.tex'"):
        LocalStore(str(tmp_path)).create()


def test_a_store_of_another_format_is_refused(store: LocalStore) -> None:
    """A store that a later tvmflow wrote is left alone."""
    Path(store.root, "format").write_text("tvmflow store 2\n")
    with pytest.raises(StoreError, match="another version of tvmflow"):
        LocalStore(store.root).create()


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "Permission denied")]
)
def test_what_a_disk_can_do_is_a_sentence_with_a_remedy(number: int, words: str) -> None:
    """A full disk or a missing right is told as such, with what to do."""
    with pytest.raises(StoreError, match=words) as raised, disk_errors("/store"):
        raise OSError(number, os.strerror(number))
    assert "--store" in raised.value.fix


def test_cleaning_keeps_measured_trials_unless_told_otherwise(store: LocalStore) -> None:
    """`clean` removes what can be made again; the ledger goes only by name."""
    publish(store, a_key(), {"x": b"content"})
    trials = Path(store.ledger, "t", "w.jsonl")
    trials.parent.mkdir(parents=True)
    trials.write_text("{}\n")
    assert clean_store(store, ledger=False) > 0
    assert everything(store) == {"ledger/t/w.jsonl"}
    clean_store(store, ledger=True)
    assert everything(store) == set()


def test_cleaning_waits_for_nobody_and_harms_no_run(store: LocalStore) -> None:
    """While a run uses the store, `clean` refuses and removes nothing."""
    made = publish(store, a_key(), {"x": b"content"})
    with store.running(), pytest.raises(StoreError, match="a run is using the store"):
        clean_store(LocalStore(store.root), ledger=False)
    assert store.find(made.key) == made


def _publish_twenty(root: str, seed: int) -> None:
    """In a process of its own: publish twenty results in an order of its own."""
    store = LocalStore(root)
    for number in sorted(range(20), key=lambda n: hash((n * 7919 + seed) % 20)):
        key = StageKey(f"{number:064d}", {"stage": "x"})
        with store.claim(key.digest) as slot:
            if store.find(key.digest):
                store.release(slot)
                continue
            fill(slot, {"content": b"%d" % number * 999})
            store.publish(slot, key, {}, 0.0)


def _take_turns(root: str, seed: int) -> None:
    """In a process of its own: claim one key again and again, and find what was put there."""
    store = LocalStore(root)
    for number in range(300):
        with store.claim("0" * 64) as slot:
            fill(slot, {"content": b"%d %d" % (seed, number)})
            assert Path(slot.out, "content").read_bytes() == b"%d %d" % (seed, number)
            store.release(slot)


COMMANDS: dict[str, Any] = {"publish": _publish_twenty, "take_turns": _take_turns}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
