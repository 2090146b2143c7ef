"""Records that come from another ledger decide there as they did here, in whatever order they arrive."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cache_server import cache_server
from tests.support.small_runs import RunHost
from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.core.canonical_json import canonical
from tvmflow.tuning import remote_ledger
from tvmflow.tuning.budget import BATCH_SIZE, Budget, BudgetRules, WorkloadShare
from tvmflow.tuning.ledger import Ledger, MachineClass, WorkloadLedger, target_key
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.measurer import FinalistsRequest, FinalistTimes, read_or_measure
from tvmflow.tuning.packs import export_pack, import_pack, merge_ledger
from tvmflow.tuning.trials import (
    Ban,
    Baseline,
    ChoiceTimes,
    FinalistsRecord,
    LibraryRecord,
    Note,
    SearchEnd,
    SearchTime,
    Trial,
    to_line,
)

HERE = MachineClass("0", DEVICE)
KEY = hashlib.sha256(b"one").hexdigest()
ONLY_UNTUNED = hashlib.sha256(b"two").hexdigest()
SEARCH = "evolutionary/0"
REQUEST = hashlib.sha256(b"request").hexdigest()


def at(second: int) -> str:
    return f"2023-01-01T00:00:{second:02d}.000+00:00"


def fill(root: Path, numbers: Iterable[int], *, second: int = 0, key: str = KEY) -> WorkloadLedger:
    """A ledger with trials, and a baseline, finalists' times and a library's times of that second."""
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(key)
    times = FinalistsRecord(REQUEST, "none", (1e-3,), ((second + 1.0,), ()), at(second))
    library = LibraryRecord(REQUEST, (ONLY_UNTUNED,), (second + 1.0,), (second + 2.0,), at(second))
    ledger.add([Baseline(5, second + 1.0, at(second)), times, library])
    ledger.extend(trial(number, seconds=second + 1.0) for number in numbers)
    ledger.mark_exhausted(SEARCH)
    return ledger


class Known(NamedTuple):
    """All that a ledger knows of a workload and that decides."""

    trials: list[Trial]
    notes: list[Note]
    exhausted: list[str]


def decisions(root: Path) -> dict[str, Known]:
    """All that decides, by workload."""
    known: dict[str, Known] = {}
    for folder in list_target_folders(root):
        for key, _ in folder.workload_files():
            ledger = folder.ledger.workload(key)
            assert ledger.repairs == []
            known[key] = Known(ledger.in_order(), ledger.notes(), ledger.exhausted_searches())
    return known


def by_pack(name: str) -> Callable[[Path, Path], None]:
    def carry(source: Path, root: Path) -> None:
        pack = source.parent / f"{source.name}-{name}"
        export_pack(pack, source)
        assert import_pack(pack, root, HERE).complete

    return carry


def by_merge(source: Path, root: Path) -> None:
    assert merge_ledger(source, root, HERE).complete


WAYS = [by_pack("x.jsonl"), by_pack("x.jsonl.gz"), by_merge]


@pytest.mark.parametrize("carry", WAYS)
def test_all_that_decides_travels(tmp_path: Path, carry: Callable[[Path, Path], None]) -> None:
    """Notes of every kind, also of a workload without trials, and exhausted searches."""
    fill(tmp_path / "here", range(5))
    choice = ChoiceTimes({"winograd": 4}, {"winograd": 2}, (1.0,), (2.0,), 1, at(1))
    notes: list[Note] = [
        Baseline(5, 2.0, at(1)),
        choice,
        Ban(trial(1).id, "wrong", at(1)),
        SearchTime(1.0, 2, at(1)),
        SearchEnd(SEARCH, 8, None, 1.0, 2, at(1)),
    ]
    Ledger.open(tmp_path / "here", TARGET, "0", DEVICE).workload(ONLY_UNTUNED).add(notes)
    carry(tmp_path / "here", tmp_path / "there")
    assert decisions(tmp_path / "there") == decisions(tmp_path / "here")
    carried = decisions(tmp_path / "there")
    assert len(carried[ONLY_UNTUNED].notes) == len(notes)
    assert (len(carried[KEY].trials), len(carried[KEY].notes)) == (5, 3)
    assert carried[KEY].exhausted == [SEARCH]


def test_all_that_decides_travels_through_a_remote_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's decisions are those of the sender."""
    monkeypatch.setattr("tvmflow.core.packages.identity", lambda name: "0")
    with cache_server() as cache:
        one = RunHost(tmp_path / "1", cache.url, writes=True)
        two = RunHost(tmp_path / "2", cache.url)
        fill(Path(one.store.ledger), range(5))
        sender, receiver = one.remote_client(), two.remote_client()
        remote_ledger.push_trials(sender.connection, HERE)
        assert remote_ledger.pull_trials(receiver.connection, HERE).problems == ()
        sender.finish()
        receiver.finish()
    assert decisions(Path(two.store.ledger)) == decisions(Path(one.store.ledger))


@pytest.mark.parametrize("carry", WAYS)
@pytest.mark.parametrize("second", [range(3, 8), range(5), range(2, 4), range(10, 12)])
def test_either_order_of_two_imports_gives_the_same_ledger(
    tmp_path: Path, carry: Callable[[Path, Path], None], second: range
) -> None:
    """Of what both measured the earlier measurement stays; an export of either has the same bytes."""
    fill(tmp_path / "a", range(5), second=2)
    fill(tmp_path / "b", second, second=1)
    packs = []
    for order in itertools.permutations("ab"):
        root = tmp_path / "".join(order)
        for name in order:
            carry(tmp_path / name, root)
        packs.append(tmp_path / f"{root.name}.jsonl")
        export_pack(packs[-1], root)
    assert decisions(tmp_path / "ab") == decisions(tmp_path / "ba")
    assert packs[0].read_bytes() == packs[1].read_bytes()


def test_an_earlier_measurement_replaces_a_later_one_in_every_open_ledger(tmp_path: Path) -> None:
    """A process that has read the later one does not take the earlier one for a duplicate."""
    later, other = WorkloadLedger(tmp_path / "x.jsonl"), WorkloadLedger(tmp_path / "x.jsonl")
    later.extend([trial(1, seconds=2.0, when=at(9)), trial(2)])
    other.refresh()
    assert later.extend([trial(1, seconds=1.0, when=at(1))]) == 0
    other.refresh()
    for ledger in (later, other, WorkloadLedger(tmp_path / "x.jsonl")):
        assert [entry.seconds for entry in ledger.in_order()] == [2.0, 2e-3]
        assert ledger.repairs == []


def test_an_exhausted_search_is_not_believed_of_other_trials(tmp_path: Path) -> None:
    """Neither of a part of an export nor together with trials that the sender lacked."""
    fill(tmp_path / "here", range(5))
    export_pack(tmp_path / "best.jsonl", tmp_path / "here", best=2)
    import_pack(tmp_path / "best.jsonl", tmp_path / "part", HERE)
    fill(tmp_path / "more", [9])
    export_pack(tmp_path / "all.jsonl", tmp_path / "here")
    import_pack(tmp_path / "all.jsonl", tmp_path / "more", HERE)
    for root in (tmp_path / "part", tmp_path / "more"):
        assert decisions(root)[KEY].exhausted == []


def test_a_baseline_decides_only_if_it_was_measured_before_the_trials(tmp_path: Path) -> None:
    """What another machine measures later for its report changes no decision."""
    ledger = WorkloadLedger(tmp_path / "x.jsonl")
    ledger.record_untuned(5, 3.0)
    baseline = ledger.baseline_before_trials(5)
    assert baseline and baseline.seconds == 3.0
    ledger.append(trial(1)._replace(when="2100-01-01T00:00:00.000+00:00"))
    ledger.record_untuned(6, 2.0)
    assert (ledger.untuned_seconds(5), ledger.baseline_before_trials(5)) == (3.0, baseline)
    assert (ledger.untuned_seconds(6), ledger.baseline_before_trials(6)) == (2.0, None)
    ledger.record_untuned(5, 1.0)
    assert ledger.untuned_seconds(5) == 3.0


def test_what_is_measured_after_an_import_is_sorted_after_it(tmp_path: Path) -> None:
    """Also when the clock of the other machine is ahead."""
    ledger = WorkloadLedger(tmp_path / "x.jsonl")
    ahead = [trial(number, when=f"2100-01-01T00:00:0{number}.000+00:00") for number in range(3)]
    ledger.extend(ahead)
    ledger.append(trial(7))
    ledger.append(trial(5))
    numbers = [entry.trace[0][0][2][0] for entry in WorkloadLedger(ledger.path).in_order()]
    assert numbers == [0, 1, 2, 7, 5]


def test_a_pack_of_version_1_is_read(tmp_path: Path) -> None:
    """It has trials alone."""
    folder = Ledger.open(tmp_path / "any", TARGET, "0", DEVICE).folder
    key = target_key(TARGET, "0", DEVICE)
    about = json.loads((folder / "about.json").read_bytes())
    target = {"about": about, "workloads": 1, "trials": 1, "failed": 0}
    header = {"format": "tvmflow records", "version": 1, "targets": {key: target}, "trials": 1}
    body = canonical({"about": {}, "target": key, "workload": KEY}) + b"\n"
    body += to_line(trial(1))
    digest = hashlib.sha256(canonical(header) + b"\n" + body).hexdigest()
    pack = tmp_path / "x.jsonl"
    pack.write_bytes(canonical({**header, "digest": digest}) + b"\n" + body)
    assert import_pack(pack, tmp_path / "there", HERE).complete
    assert decisions(tmp_path / "there") == {KEY: ([trial(1)], [], [])}


def test_finalists_are_measured_once(tmp_path: Path) -> None:
    """Nearly equal ones would win by turns; what failed is measured again."""
    ledger = WorkloadLedger(tmp_path / "x.jsonl")
    timing = Timing(number=1, repeat=1, min_repeat_ms=1)
    request = FinalistsRequest(
        mod="", target=TARGET, rules_version=5, timing=timing, traces=[[[], []]], rounds=3
    )
    answers = iter([FinalistTimes(error="no device"), FinalistTimes("none", (2.0,), ((1.0,), ()))])
    first, second, third = (
        read_or_measure(request, ledger, lambda: next(answers)) for _ in range(3)
    )
    assert (first.error, second) == ("no device", third)
    again = read_or_measure(request, WorkloadLedger(ledger.path), lambda: next(answers))
    assert again == second


@pytest.mark.parametrize("without_baseline", range(8))
def test_a_missing_baseline_neither_starves_nor_favours_a_workload(without_baseline: int) -> None:
    """Of three alike each gets a fair share, whichever of them have a baseline."""
    shares = [
        WorkloadShare(name, 4, 1e6, math.inf if without_baseline >> index & 1 else 1.2e-3)
        for index, name in enumerate("abc")
    ]
    budget = Budget(shares, BudgetRules(30 * BATCH_SIZE))
    while step := budget.next_round():
        for key, count in step.items():
            done = budget.spent_on(key)
            budget.record(key, [1e-3 / (1 + 0.1 * min(done + n, 40)) for n in range(count)])
    assert all(7 * BATCH_SIZE <= budget.spent_on(name) <= 13 * BATCH_SIZE for name in "abc")


# ---------------------------------------------------------------- bans

BANNED = trial(1, seconds=1e-6)
BAN = Ban(BANNED.id, "wrong numbers", at(9))


def check_banned(root: Path) -> None:
    """The schedule is never chosen, whenever its trial arrives, nor measured again."""
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(KEY)
    assert ledger.bans == {BANNED.id: BAN}
    ledger.extend([BANNED])
    assert BANNED.id not in [known.id for known in ledger.valid()]
    assert not ledger.append(BANNED)


@pytest.mark.parametrize("best", [None, 1])
@pytest.mark.parametrize("knows_trial", [True, False])
def test_a_ban_travels_in_packs_and_stores(
    knows_trial: bool, best: int | None, tmp_path: Path
) -> None:
    """Also to a ledger that has the trial already, and with the best trials alone."""
    origin = tmp_path / "origin" / "ledger"
    fill(origin, [0, 2])
    Ledger.open(origin, TARGET, "0", DEVICE).workload(KEY).extend([BANNED])
    Ledger.open(origin, TARGET, "0", DEVICE).workload(KEY).add([BAN])
    export_pack(tmp_path / "x.jsonl", origin, best=best)
    for name in ("pack", "store"):
        copy = tmp_path / name / "ledger"
        if knows_trial:
            Ledger.open(copy, TARGET, "0", DEVICE).workload(KEY).extend([BANNED])
        if name == "pack":
            import_pack(tmp_path / "x.jsonl", copy, HERE)
        else:
            merge_ledger(origin, copy, HERE)
        check_banned(copy)


def test_a_ban_reaches_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the trial was shared before anybody knew that it is wrong."""
    monkeypatch.setattr("tvmflow.core.packages.identity", lambda name: "0")
    with cache_server() as cache:
        one, two = (RunHost(tmp_path / name, cache.url, writes=True) for name in ("1", "2"))
        ledgers = [
            Ledger.open(Path(host.store.ledger), TARGET, "0", DEVICE).workload(KEY)
            for host in (one, two)
        ]
        for step in range(2):
            ledgers[0].extend([BANNED, trial(0)])
            ledgers[0].add([BAN] if step else [])
            for host, share in ((one, remote_ledger.push_trials), (two, remote_ledger.pull_trials)):
                client = host.remote_client()
                share(client.connection, HERE)
                client.finish()
        ledgers[1].refresh()
        check_banned(Path(two.store.ledger))


def test_a_ban_is_seen_by_processes_that_search_already(tmp_path: Path) -> None:
    """They read what others have written before they choose."""
    first = fill(tmp_path, [0, 2])
    first.extend([BANNED])
    second = WorkloadLedger(first.path)
    assert second.valid()[0].id == BANNED.id
    first.add([BAN])
    second.refresh()
    assert BANNED.id not in [known.id for known in second.valid()]


def test_a_ban_outlives_its_trial(tmp_path: Path) -> None:
    """Whoever prunes the trial does not choose it when it comes back; and a pack of bans alone is a pack."""
    ledger = fill(tmp_path / "here", [0])
    ledger.extend([BANNED])
    ledger.add([BAN])
    ledger.remove([BANNED.id])
    check_banned(tmp_path / "here")
    other = Ledger.open(tmp_path / "here", {**TARGET, "num-cores": 7}, "0", DEVICE)
    other.workload(KEY).add([BAN])
    export_pack(tmp_path / "x.jsonl", tmp_path / "here")
    result = import_pack(tmp_path / "x.jsonl", tmp_path / "there", HERE)
    assert result.complete
    received = Ledger.open(tmp_path / "there", {**TARGET, "num-cores": 7}, "0", DEVICE)
    assert list(received.workload(KEY).bans) == [BANNED.id]
