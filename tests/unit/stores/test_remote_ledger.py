"""Trials of a team: everybody's are taken, nobody's are lost, and strangers' are refused."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.cache_server import Cache, cache_server
from tests.support.small_runs import Machine
from tests.support.trials import DEVICE, TARGET, trial
from tvmflow import signing
from tvmflow.stores.remote import actions, ledger
from tvmflow.stores.remote.actions import Content
from tvmflow.tuning.ledger import Ledger, target_key
from tvmflow.tuning.records import Here, read_trials

HERE = Here("0", DEVICE)
WORKLOAD = hashlib.sha256(b"one").hexdigest()
SETTINGS = {"device": DEVICE}


@pytest.fixture
def cache() -> Iterator[Cache]:
    with cache_server() as made:
        yield made


@pytest.fixture(autouse=True)
def this_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of TVM that the records are of."""
    monkeypatch.setattr("tvmflow.tools.identity", lambda name: "0")


def measured(machine: Machine, numbers: Iterable[int]) -> None:
    opened = Ledger.open(Path(machine.store.ledger), TARGET, "0", DEVICE)
    opened.workload(WORKLOAD).extend([trial(number) for number in numbers])


def known(machine: Machine) -> set[int]:
    path = Path(machine.store.ledger, target_key(TARGET, "0", DEVICE), f"{WORKLOAD}.jsonl")
    return {each.trace[0][0][2][0] for each in read_trials(path).trials}


def push(machine: Machine) -> int:
    tier = machine.tier()
    try:
        return ledger.push(tier, HERE)
    finally:
        tier.finish()


def pull(machine: Machine) -> ledger.Pulled:
    tier = machine.tier()
    try:
        return ledger.pull(tier, HERE)
    finally:
        tier.finish()


def index_of(cache: Cache) -> dict[str, Content]:
    return actions.decode(cache.ac[ledger.index_key(HERE)])


def test_what_one_measured_another_begins_with(cache: Cache, tmp_path: Path) -> None:
    """Each takes what it lacks, once; a second pull downloads nothing."""
    one, two = Machine(tmp_path / "1", cache.url, writes=True), Machine(tmp_path / "2", cache.url)
    measured(one, range(5))
    measured(two, range(3, 8))
    assert push(one) == 5
    assert pull(two).new == 3
    assert known(two) == set(range(8))
    cache.requests.clear()
    assert pull(two) == ledger.Pulled(0, 1, ())
    assert cache.asked("GET", "cas") == []


def test_what_is_measured_later_takes_the_place_of_what_was_given_before(
    cache: Cache, tmp_path: Path
) -> None:
    """One pack a writer, however often it tunes."""
    one, two = Machine(tmp_path / "1", cache.url, writes=True), Machine(tmp_path / "2", cache.url)
    for until in (2, 4, 6):
        measured(one, range(until))
        push(one)
    assert sum(path.endswith(".jsonl.gz") for path in index_of(cache)) == 1
    assert pull(two).new == 6


@pytest.mark.parametrize("kind", ["http", "folder"])
def test_writers_at_the_same_time_lose_nothing(kind: str, cache: Cache, tmp_path: Path) -> None:
    """Four that push at once: all of their trials are there afterwards."""
    (tmp_path / "shared").mkdir()
    url = cache.url if kind == "http" else str(tmp_path / "shared")
    writers = [Machine(tmp_path / str(number), url, writes=True) for number in range(4)]
    start = threading.Barrier(len(writers))

    def work(number: int, machine: Machine) -> None:
        for step in range(2):
            measured(machine, range(number * 100 + step * 10, number * 100 + step * 10 + 10))
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
    reader = Machine(tmp_path / "reader", url)
    assert pull(reader).problems == ()
    assert known(reader) == {n * 100 + k for n in range(4) for k in range(20)}


def test_many_packs_become_one_and_nothing_is_forgotten(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds too many joins them, and is not the one who may replace what came of that."""
    monkeypatch.setattr(ledger, "_MOST_PACKS", 3)
    for number in range(4):
        machine = Machine(tmp_path / str(number), cache.url, writes=True)
        measured(machine, [number])
        push(machine)
    joiner = Machine(tmp_path / "joiner", cache.url, writes=True)
    measured(joiner, [9])
    push(joiner)
    assert sum(path.endswith(".jsonl.gz") for path in index_of(cache)) == 1
    assert known(joiner) == {9}
    reader = Machine(tmp_path / "reader", cache.url)
    pull(reader)
    assert known(reader) == {0, 1, 2, 3, 9}
    measured(joiner, [10])
    push(joiner)
    pull(reader)
    assert known(reader) == {0, 1, 2, 3, 9, 10}
    pull(joiner)
    assert known(joiner) == known(reader)


def test_a_pack_of_another_machine_or_a_damaged_one_is_refused_and_named(
    cache: Cache, tmp_path: Path
) -> None:
    """The ledger's own rules stay; the run goes on with what is good."""
    one, two = Machine(tmp_path / "1", cache.url, writes=True), Machine(tmp_path / "2", cache.url)
    measured(one, range(5))
    push(one)
    index = cache.ac[ledger.index_key(HERE)]
    other = Here("0", {"kind": "cpu", "class": "other"})
    cache.ac[ledger.index_key(other)] = index
    tier = two.tier()
    pulled = ledger.pull(tier, other)
    assert pulled.new == 0 and "its seal is of another pack" in pulled.problems[0]
    digest = next(each.digest for path, each in index_of(cache).items() if path.endswith(".gz"))
    cache.flip(digest)
    pulled = ledger.pull(tier, HERE)
    tier.finish()
    assert pulled.new == 0 and f"the trials {digest[:12]} are refused" in pulled.problems[0]
    assert two.said == [*two.said[:1], pulled.problems[0]]
    assert known(two) == set()


def test_a_pack_that_would_fill_the_memory_is_refused(cache: Cache, tmp_path: Path) -> None:
    """A small file that unpacks to a huge one."""
    one, two = Machine(tmp_path / "1", cache.url, writes=True), Machine(tmp_path / "2", cache.url)
    bomb = tmp_path / "trials.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\0" * (32 << 20)))
    tier = one.tier()
    key = ledger.index_key(HERE)
    pack = ledger._send(tier, key, bomb)
    ledger._enter(tier, key, pack, set())
    tier.finish()
    assert "unpacks to far more" in pull(two).problems[0]


def test_trials_that_nobody_trusted_signed_are_refused(cache: Cache, tmp_path: Path) -> None:
    """And those of a trusted one are taken."""
    signing.generate(tmp_path / "ci")
    trusted = signing.load_public(tmp_path / "ci.pub")
    unsigned = Machine(tmp_path / "1", cache.url, writes=True)
    measured(unsigned, [1])
    push(unsigned)
    signed = Machine(
        tmp_path / "2", cache.url, writes=True, signer=signing.load_private(tmp_path / "ci")
    )
    measured(signed, [2])
    push(signed)
    careful = Machine(tmp_path / "3", cache.url, trusted=trusted)
    pulled = pull(careful)
    assert pulled.new == 1 and known(careful) == {2}
    assert len(pulled.problems) == 1 and "it is not signed" in pulled.problems[0]


def test_a_run_pulls_once_and_pushes_what_it_measured(cache: Cache, tmp_path: Path) -> None:
    """Around `tune`, also when the remote is away for a while: what was measured waits."""
    one = Machine(tmp_path / "1", cache.url, reads=True, writes=True)
    measured(one, range(3))
    tier = one.tier()
    tier.pull_ledger(SETTINGS)
    asked = len(cache.asked("GET", "ac"))
    tier.pull_ledger(SETTINGS)
    tier.pull_ledger({"tune": {"trials": 0}})
    assert len(cache.asked("GET", "ac")) == asked == 1
    cache.statuses = [403]
    tier.offer_ledger(SETTINGS)
    tier.finish()
    assert len(tier.waiting()) == 1 and cache.ac == {}
    later = one.tier()
    later.start()
    later.finish()
    assert later.waiting() == []
    two = Machine(tmp_path / "2", cache.url)
    assert pull(two).new == 3


def test_trials_are_shared_without_tvm() -> None:
    """The main process never loads it."""
    import subprocess
    import sys

    code = (
        "import sys, tvmflow.stores.remote.ledger, tvmflow.stores.remote.tier, "
        "tvmflow.tuning.pack, tvmflow.tuning.records\n"
        "tvmflow.tuning.records.this_machine()\n"
        "print(sorted({'tvm', 'numpy', 'onnx', 'obstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
