"""Sharing trials through a remote cache: none are lost, and untrusted ones are rejected."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.cache_server import Cache
from tests.support.small_runs import RunHost
from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.core import signing
from tvmflow.store.remote import signed_actions
from tvmflow.store.remote.connection import BlobRef
from tvmflow.tuning import remote_ledger
from tvmflow.tuning.ledger import Ledger, MachineClass, target_key
from tvmflow.tuning.ledger_folders import read_records
from tvmflow.tuning.remote_ledger import LedgerSync, PullResult, index_key

HERE = MachineClass("0", DEVICE)
WORKLOAD = hashlib.sha256(b"one").hexdigest()
SETTINGS = {"device": DEVICE}


@pytest.fixture(autouse=True)
def this_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the TVM build that the records are of."""
    monkeypatch.setattr("tvmflow.core.packages.identity", lambda name: "0")


def record_trials(machine: RunHost, numbers: Iterable[int]) -> None:
    opened = Ledger.open(Path(machine.store.ledger), TARGET, "0", DEVICE)
    opened.workload(WORKLOAD).extend([trial(number) for number in numbers])


def known_trials(machine: RunHost) -> set[int]:
    path = Path(machine.store.ledger, target_key(TARGET, "0", DEVICE), f"{WORKLOAD}.jsonl")
    return {trial.trace[0][0][2][0] for trial in read_records(path).records.in_order()}


def push(machine: RunHost) -> int:
    remote_client = machine.remote_client()
    try:
        return remote_ledger.push_trials(remote_client.connection, HERE)
    finally:
        remote_client.finish()


def pull(machine: RunHost) -> PullResult:
    remote_client = machine.remote_client()
    try:
        return remote_ledger.pull_trials(remote_client.connection, HERE)
    finally:
        remote_client.finish()


def index_of(cache: Cache) -> dict[str, BlobRef]:
    return signed_actions.decode(cache.ac[index_key(HERE)])


def test_trials_of_one_machine_reach_another(cache: Cache, tmp_path: Path) -> None:
    """Each takes what it lacks, once; a second pull downloads nothing."""
    one, two = RunHost(tmp_path / "1", cache.url, writes=True), RunHost(tmp_path / "2", cache.url)
    record_trials(one, range(5))
    record_trials(two, range(3, 8))
    assert push(one) == 5
    assert pull(two).new == 3
    assert known_trials(two) == set(range(8))
    cache.requests.clear()
    assert pull(two) == PullResult(0, 1, ())
    assert cache.list_requests("GET", "cas") == []


def test_a_later_pack_replaces_the_previous_one_of_a_writer(cache: Cache, tmp_path: Path) -> None:
    """One pack for each writer, however often it tunes."""
    one, two = RunHost(tmp_path / "1", cache.url, writes=True), RunHost(tmp_path / "2", cache.url)
    for until in (2, 4, 6):
        record_trials(one, range(until))
        push(one)
    assert sum(path.endswith(".jsonl.gz") for path in index_of(cache)) == 1
    assert pull(two).new == 6


@pytest.mark.parametrize("kind", ["http", "folder"])
def test_concurrent_writers_lose_nothing(kind: str, cache: Cache, tmp_path: Path) -> None:
    """Four push at once, and all of their trials are in the remote cache afterwards."""
    (tmp_path / "shared").mkdir()
    url = cache.url if kind == "http" else str(tmp_path / "shared")
    writers = [RunHost(tmp_path / str(number), url, writes=True) for number in range(4)]
    start = threading.Barrier(len(writers))

    def work(number: int, machine: RunHost) -> None:
        for step in range(2):
            record_trials(machine, range(number * 100 + step * 10, number * 100 + step * 10 + 10))
            start.wait()
            push(machine)

    threads = [
        threading.Thread(target=work, args=(number, machine))
        for number, machine in enumerate(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RunHost(tmp_path / "reader", url)
    assert pull(reader).problems == ()
    assert known_trials(reader) == {n * 100 + k for n in range(4) for k in range(20)}


def test_many_packs_are_merged_without_loss(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds too many merges them, and is not the one who may replace the merged pack."""
    monkeypatch.setattr(remote_ledger, "_MAX_PACKS", 3)
    for number in range(4):
        machine = RunHost(tmp_path / str(number), cache.url, writes=True)
        record_trials(machine, [number])
        push(machine)
    joiner = RunHost(tmp_path / "joiner", cache.url, writes=True)
    record_trials(joiner, [9])
    push(joiner)
    assert sum(path.endswith(".jsonl.gz") for path in index_of(cache)) == 1
    assert known_trials(joiner) == {9}
    reader = RunHost(tmp_path / "reader", cache.url)
    pull(reader)
    assert known_trials(reader) == {0, 1, 2, 3, 9}
    record_trials(joiner, [10])
    push(joiner)
    pull(reader)
    assert known_trials(reader) == {0, 1, 2, 3, 9, 10}
    pull(joiner)
    assert known_trials(joiner) == known_trials(reader)


def test_a_pack_of_another_machine_class_or_a_damaged_one_is_rejected(
    cache: Cache, tmp_path: Path
) -> None:
    """The ledger's own rules apply; the run continues with valid packs."""
    one, two = RunHost(tmp_path / "1", cache.url, writes=True), RunHost(tmp_path / "2", cache.url)
    record_trials(one, range(5))
    push(one)
    index = cache.ac[index_key(HERE)]
    other = MachineClass("0", {"kind": "cpu", "class": "other"})
    cache.ac[index_key(other)] = index
    remote_client = two.remote_client()
    pulled = remote_ledger.pull_trials(remote_client.connection, other)
    assert pulled.new == 0 and "its statement is about another pack" in pulled.problems[0]
    digest = next(blob.digest for path, blob in index_of(cache).items() if path.endswith(".gz"))
    cache.flip(digest)
    pulled = remote_ledger.pull_trials(remote_client.connection, HERE)
    remote_client.finish()
    assert pulled.new == 0 and f"the trials {digest[:12]} are rejected" in pulled.problems[0]
    assert two.messages == [*two.messages[:1], pulled.problems[0]]
    assert known_trials(two) == set()


def test_a_decompression_bomb_is_rejected(cache: Cache, tmp_path: Path) -> None:
    """A small file that decompresses to a huge one."""
    one, two = RunHost(tmp_path / "1", cache.url, writes=True), RunHost(tmp_path / "2", cache.url)
    bomb = tmp_path / "trials.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\0" * (32 << 20)))
    remote_client = one.remote_client()
    key = index_key(HERE)
    pack = remote_ledger._upload(remote_client.connection, key, bomb)
    remote_ledger.add_to_index(remote_client.connection, key, pack, set())
    remote_client.finish()
    assert "decompressed size is far larger" in pull(two).problems[0]


def test_untrusted_trials_are_rejected(cache: Cache, tmp_path: Path) -> None:
    """Those that a trusted key signed are imported."""
    signing.generate_key(tmp_path / "ci")
    trusted = signing.load_public_keys(tmp_path / "ci.pub")
    unsigned = RunHost(tmp_path / "1", cache.url, writes=True)
    record_trials(unsigned, [1])
    push(unsigned)
    signed = RunHost(
        tmp_path / "2", cache.url, writes=True, signer=signing.load_private_key(tmp_path / "ci")
    )
    record_trials(signed, [2])
    push(signed)
    careful = RunHost(tmp_path / "3", cache.url, trusted=trusted)
    pulled = pull(careful)
    assert pulled.new == 1 and known_trials(careful) == {2}
    assert len(pulled.problems) == 1 and "it is not signed" in pulled.problems[0]


def test_a_run_pulls_once_and_pushes_what_it_measured(cache: Cache, tmp_path: Path) -> None:
    """Around `tune`, also when the remote cache fails for a while: the trials wait."""
    one = RunHost(tmp_path / "1", cache.url, reads=True, writes=True)
    record_trials(one, range(3))
    remote_client = one.remote_client()
    ledger_sync = LedgerSync(remote_client)
    ledger_sync.pull(SETTINGS)
    requests = len(cache.list_requests("GET", "ac"))
    ledger_sync.pull(SETTINGS)
    ledger_sync.pull({"tune": {"trials": 0}})
    assert len(cache.list_requests("GET", "ac")) == requests == 1
    cache.statuses = [403]
    ledger_sync.offer(SETTINGS)
    remote_client.finish()
    assert len(remote_client.uploader.spool.list()) == 1 and cache.ac == {}
    later = one.remote_client()
    LedgerSync(later)
    later.uploader.start()
    later.finish()
    assert later.uploader.spool.list() == []
    two = RunHost(tmp_path / "2", cache.url)
    assert pull(two).new == 3


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_item_of_the_spool_is_dropped(text: str, cache: Cache, tmp_path: Path) -> None:
    """The trials are in the ledger, and the next tuning offers them again."""
    client = RunHost(tmp_path, cache.url, writes=True).remote_client()
    client.uploader.spool.keep(text, f"ledger-{index_key(HERE)}")
    LedgerSync(client)
    client.uploader.start()
    client.finish()
    assert client.uploader.spool.list() == [] and cache.ac == {}


def test_trials_are_shared_without_loading_tvm() -> None:
    """The main process never loads it, and nothing for requests before the first one."""
    import subprocess
    import sys

    code = (
        "import sys, tvmflow.tuning.remote_ledger, tvmflow.store.remote.client, "
        "tvmflow.tuning.packs, tvmflow.tuning.ledger\n"
        "tvmflow.tuning.ledger.this_machine_class()\n"
        "print(sorted({'tvm', 'numpy', 'onnx', 'obstore', 'urllib3', 'http.client'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"
