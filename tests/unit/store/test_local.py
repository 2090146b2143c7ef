"""The local store: results are complete or absent, it repairs itself, and survives concurrent runs and kills."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.stored_results import stage_key
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import StoreError
from tvmflow.core.files import hash_file
from tvmflow.core.types import Artifact, StageKey
from tvmflow.store.disk import Claim
from tvmflow.store.local import FILES, DamagedBlob, LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


KEY = stage_key("a")


def publish(store: LocalStore, key: StageKey, files: dict[str, bytes]) -> Artifact:
    """Claim the key and publish files under it."""
    with store.claim(key.digest) as claim:
        fill(claim, files)
        return store.publish(claim, key, {"fact": 1}, 0.5)


def fill(claim: Claim, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = Path(claim.out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def stored_files(store: LocalStore) -> set[str]:
    """Return the paths of all files in the store but those of the store itself."""
    root = Path(store.root)
    paths = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return paths - FILES


def test_a_published_result_is_found_with_its_files_and_facts(store: LocalStore) -> None:
    """Its pre-image is found, too."""
    made = publish(store, KEY, {"model.json": b"{}", "deep/weights": b"w" * 100})
    assert store.find(KEY.digest) == made
    assert {file.name: file.size for file in made.files} == {"deep/weights": 100, "model.json": 2}
    assert store.preimage(KEY.digest) == KEY.preimage
    assert Path(store.blobs.verified_path(made.files[1].digest)).read_bytes() == b"{}"


def test_equal_blobs_are_stored_once_and_no_work_folder_remains(store: LocalStore) -> None:
    """Two results with the same bytes share them; nothing else is left."""
    publish(store, KEY, {"x": b"same"})
    publish(store, stage_key("b"), {"y": b"same"})
    blobs = [path for path in stored_files(store) if path.startswith("cas/")]
    actions = [path for path in stored_files(store) if path.startswith("actions/")]
    assert (len(blobs), len(actions)) == (1, 2)
    assert stored_files(store) == {*blobs, *actions}


def test_an_unknown_key_is_a_miss(store: LocalStore) -> None:
    """Nothing is known of a stage that never ran."""
    assert store.find("f" * 64) is None
    assert store.preimage("f" * 64) is None


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_result_with_a_missing_or_truncated_blob_is_a_miss(
    store: LocalStore, damage: str
) -> None:
    """A result counts only with all its files, at their size."""
    made = publish(store, KEY, {"x": b"content"})
    blob = Path(store.blobs.path(made.files[0].digest))
    blob.unlink()
    if damage == "shorter":
        blob.write_bytes(b"cont")
    assert store.find(KEY.digest) is None


def test_a_flipped_bit_is_found_on_reading_and_repaired_by_publishing_again(
    store: LocalStore,
) -> None:
    """A blob of the right size with another content is set aside when it is read; the next publish repairs it."""
    made = publish(store, KEY, {"x": b"content"})
    digest = made.files[0].digest
    blob = Path(store.blobs.path(digest))
    blob.chmod(0o644)
    blob.write_bytes(b"cOntent")
    with pytest.raises(DamagedBlob):
        store.blobs.verified_path(digest)
    assert store.find(KEY.digest) is None
    assert store.damage == [str(blob)]
    assert Path(store.root, "damaged", digest).read_bytes() == b"cOntent"
    assert publish(store, KEY, {"x": b"content"}) == made
    assert Path(store.blobs.verified_path(digest)).read_bytes() == b"content"


def test_a_damaged_record_is_a_miss_and_is_set_aside(store: LocalStore) -> None:
    """An action record that does not match its own digest is not used."""
    publish(store, KEY, {"x": b"content"})
    path = Path(store.action_path(KEY.digest))
    path.write_bytes(path.read_bytes().replace(b'"fact": 1', b'"fact": 2'))
    assert store.find(KEY.digest) is None
    assert store.damage == [str(path)]


def test_a_record_that_was_copied_over_anothers_is_never_delivered(store: LocalStore) -> None:
    """A key is the digest of its own pre-image: a record under another key is set aside and counts as missing."""
    other = publish(store, stage_key("b"), {"x": b"another library"})
    publish(store, KEY, {"x": b"content"})
    path = Path(store.action_path(KEY.digest))
    path.write_bytes(Path(store.action_path(other.key)).read_bytes())
    assert store.record(KEY.digest) is None
    path.write_bytes(Path(store.action_path(other.key)).read_bytes())
    assert store.find(KEY.digest) is None
    assert store.damage == [str(path)] * 2
    assert store.find(other.key) == other
    assert publish(store, KEY, {"x": b"content"}) == store.find(KEY.digest)


def test_a_claim_waits_for_the_other_process_and_gets_its_work_folder(store: LocalStore) -> None:
    """Two processes with one key take turns; the second gets `work` as the first left it and `out` empty."""
    order: list[str] = []
    entered = threading.Event()

    def first() -> None:
        with store.claim("c" * 64) as claim:
            entered.set()
            Path(claim.work, "progress").write_text("half")
            Path(claim.out, "torn").write_text("x")
            time.sleep(0.1)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with LocalStore(store.root).claim("c" * 64) as claim:
        order.append("second")
        assert Path(claim.work, "progress").read_text() == "half"
        assert os.listdir(claim.out) == []  # noqa: PTH208 - only the names are needed
    thread.join()
    assert order == ["first", "second"]


def test_many_processes_may_publish_the_same_results(store: LocalStore) -> None:
    """Four processes publish the same twenty results at once; every one is complete afterwards."""
    workers = [
        subprocess.Popen([sys.executable, __file__, "publish", store.root, str(seed)])
        for seed in range(4)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    for number in range(20):
        artifact = store.find(stage_key(number).digest)
        assert artifact is not None
        assert (
            Path(store.blobs.verified_path(artifact.files[0].digest)).read_bytes()
            == b"%d" % number * 999
        )


def test_processes_that_take_turns_on_a_key_keep_their_files(
    store: LocalStore,
) -> None:
    """Processes that claim and release one key alternately never lose a file to the previous one."""
    workers = [
        subprocess.Popen([sys.executable, __file__, "take_turns", store.root, str(seed)])
        for seed in range(4)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]


def test_a_file_in_place_of_a_work_folder_is_set_aside(store: LocalStore) -> None:
    """The claim gets its folder, and the file stays for whoever wants it."""
    place = Path(store.root) / "work" / KEY.digest
    place.parent.mkdir(parents=True)
    place.write_text("not a folder")
    with store.claim(KEY.digest) as claim:
        fill(claim, {"x": b"content"})
    assert store.damage == [str(place)]
    assert Path(store.root, "damaged", KEY.digest).read_text() == "not a folder"


def kill_while_publishing(store: LocalStore, delay: float) -> None:
    worker = subprocess.Popen([sys.executable, __file__, "publish", store.root, "0"])
    time.sleep(delay)
    worker.send_signal(signal.SIGKILL)
    worker.wait()


def assert_complete_or_absent(store: LocalStore) -> None:
    for number in range(20):
        artifact = store.find(stage_key(number).digest)
        for file in artifact.files if artifact else ():
            assert hash_file(store.blobs.path(file.digest)) == file.digest
    assert store.damage == []


def test_a_kill_leaves_complete_results_or_none(store: LocalStore) -> None:
    """After a SIGKILL at any instant, what can be found is complete, and the next run sweeps the rest."""
    for step in range(5):
        kill_while_publishing(store, 0.03 + 0.02 * step)
        assert_complete_or_absent(store)
    with store.running():
        assert not [path for path in stored_files(store) if path.startswith("tmp/")]


@pytest.mark.faults
def test_forty_kills_leave_complete_results_or_none(store: LocalStore) -> None:
    """The same, many times over."""
    for step in range(40):
        kill_while_publishing(store, 0.02 + 0.004 * step)
        assert_complete_or_absent(store)


def test_a_folder_with_other_files_does_not_become_a_store(tmp_path: Path) -> None:
    """`--store ~` must not begin to fill somebody's home."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"not a tvmflow store: it contains 'thesis\.tex'"):
        LocalStore(str(tmp_path)).create()


def test_a_store_of_another_version_is_refused(store: LocalStore) -> None:
    """A store that a later tvmflow wrote is left alone."""
    Path(store.root, "format").write_text("tvmflow store 2\n")
    with pytest.raises(StoreError, match="another version of tvmflow") as raised:
        LocalStore(store.root).create()
    assert "keep its folder `ledger`" in raised.value.fix


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "Permission denied")]
)
def test_errors_of_the_disk_have_a_message_and_a_remedy(number: int, words: str) -> None:
    """A full disk or a missing permission is reported with what to do."""
    with pytest.raises(StoreError, match=words) as raised, disk_errors("/store"):
        raise OSError(number, os.strerror(number))
    assert "--store" in raised.value.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become several users")
def test_users_of_one_group_share_a_store(tmp_path: Path) -> None:
    """Each uses what the other made, and takes the same locks; the umask lets the group write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, _GROUP)
    shared.chmod(0o2775)

    def publish_as(user: int, number: int) -> None:
        store = LocalStore(str(shared))
        store.create()
        with store.running():
            publish(store, stage_key(number), {"x": b"%d" % number})
            store.remember("net", "build", stage_key(number).digest)
            for other in range(number):
                assert store.find(stage_key(other).digest), other

    for number, user in enumerate((1001, 1002, 1001, 1003)):
        assert run_as(user, lambda user=user, number=number: publish_as(user, number)) == 0


_GROUP = 2000


def run_as(user: int, action: Any) -> int:
    """Call a function in a child process of another user in the group; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([_GROUP])
            os.setgid(_GROUP)
            os.setuid(user)
            os.umask(0o002)
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _publish_twenty(root: str, seed: int) -> None:
    """Publish twenty results in an order of its own, in a process of its own."""
    store = LocalStore(root)
    for number in sorted(range(20), key=lambda n: hash((n * 7919 + seed) % 20)):
        key = stage_key(number)
        with store.claim(key.digest) as claim:
            if store.find(key.digest):
                store.release(claim)
                continue
            fill(claim, {"content": b"%d" % number * 999})
            store.publish(claim, key, {}, 0.0)


def _take_turns(root: str, seed: int) -> None:
    """Claim one key again and again in a process of its own, and find what was written there."""
    store = LocalStore(root)
    for number in range(300):
        with store.claim("0" * 64) as claim:
            fill(claim, {"content": b"%d %d" % (seed, number)})
            assert Path(claim.out, "content").read_bytes() == b"%d %d" % (seed, number)
            store.release(claim)


COMMANDS: dict[str, Any] = {"publish": _publish_twenty, "take_turns": _take_turns}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2], int(sys.argv[3]))


def test_git_leaves_out_a_store_that_is_made(tmp_path: Path) -> None:
    """`git add -A` adds nothing of it; a file that somebody has written stays as it is."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    store = LocalStore(str(tmp_path / "cache"))
    store.create()
    publish(store, KEY, {"model.json": b"{}"})
    status = ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, check=True, capture_output=True, text=True).stdout == ""
    own = tmp_path / "own"
    own.mkdir()
    (own / ".gitignore").write_text("logs\n")
    LocalStore(str(own)).create()
    assert (own / ".gitignore").read_text() == "logs\n"
