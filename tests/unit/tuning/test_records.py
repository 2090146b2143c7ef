"""What people do with the ledger by hand: nothing is lost, nothing foreign comes in, and it is said why."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.errors import UsageError
from tvmflow.tuning import pack, records
from tvmflow.tuning.ledger import (
    Failure,
    Ledger,
    Trial,
    WorkloadLedger,
    canonical,
    target_key,
    trial_id,
)
from tvmflow.tuning.records import Doomed, Here

HERE = Here("0", DEVICE)
OTHER_CPU = Here("0", {"kind": "cpu", "class": "other"})
OTHER_TVM = Here("1", DEVICE)
ONE, TWO = hashlib.sha256(b"one").hexdigest(), hashlib.sha256(b"two").hexdigest()
ABOUT = {"name": "fused_conv2d_relu", "flops": 12.0, "buffers": ["float32[1×3×8×8]"]}


def failed(number: int) -> Trial:
    return trial(number, run_secs=(), failure=Failure("build", "timeout", "took too long"))


def fill(
    root: Path, trials: Iterable[Trial], key: str = ONE, target: Mapping[str, Any] = TARGET
) -> WorkloadLedger:
    """A ledger under `root` with these trials of one workload."""
    ledger = Ledger.open(root, target, "0", DEVICE).workload(key)
    ledger.extend(trials)
    return ledger


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A ledger with three trials of one workload, one of which failed, and two of another."""
    root = tmp_path / "store" / "ledger"
    fill(root, [trial(1, seconds=3.0), trial(2, seconds=1.0), failed(3)])
    fill(root, [trial(1), trial(4)], TWO)
    Ledger.open(root, TARGET, "0", DEVICE).describe(ONE, ABOUT)
    return root


def contents(root: Path) -> dict[tuple[str, str], set[str]]:
    """The ids of all trials, by target and workload."""
    return {
        (folder.key, key): {each.id for each in WorkloadLedger(path).trials.values()}
        for folder in records.folders(root)
        for key, path in folder.workloads()
    }


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ids(*numbers: int) -> set[str]:
    return {trial(number).id for number in numbers}


# ---------------------------------------------------------------- ls and show


def test_a_target_is_summed_up(root: Path) -> None:
    """Trials and failures are counted and dated, and the target is told in words."""
    fill(root, [trial(9, when="2024-03-01T00:00:00.000+00:00")], TWO)
    [summary] = map(records.summarise, records.folders(root))
    assert (summary.workloads, summary.trials, summary.failed) == (2, 6, 1)
    assert (summary.first[:10], summary.last[:10]) == ("2024-01-01", "2024-03-01")
    assert summary.words == f"llvm {TARGET['mtriple']}, 2 cores, TVM 0, any"
    assert summary.bytes == sum(path.stat().st_size for path in root.rglob("*")) - sum(
        path.stat().st_size for path in root.rglob("*") if path.is_dir()
    )


def test_the_best_of_each_workload_is_shown_with_what_it_is(root: Path) -> None:
    """The median of the fastest trial and its spread; names come from the description."""
    [folder] = records.folders(root)
    found = {each.key: each for each in records.workload_summaries(folder)}
    best = WorkloadLedger(folder.path / f"{ONE}.jsonl").valid()[0]
    assert (found[ONE].best_s, found[ONE].spread) == (best.seconds, best.spread)
    assert (found[ONE].about, found[TWO].about) == (ABOUT, {})


def test_lines_that_others_wrote_are_counted_as_they_are_read(root: Path) -> None:
    """Another layout of the same JSON, marks, blanks, a newer version's record, and damage."""
    [folder] = records.folders(root)
    path = folder.path / f"{TWO}.jsonl"
    WorkloadLedger(path).mark_exhausted("evolutionary/0")
    with path.open("a") as stream:
        stream.write(json.dumps(trial(5).to_json(), indent=None) + "\n")
        stream.write(json.dumps(failed(6).to_json()) + "\n")
        stream.write('     \n{"v":99,"x":1}\nnonsense\n')
    found = {each.key: each for each in records.workload_summaries(folder)}[TWO]
    assert (found.trials, found.failed, found.unreadable) == (4, 1, 1)


def test_looking_takes_no_memory_for_what_it_looks_at(tmp_path: Path) -> None:
    """Ten times the records, the same peak: they are counted a line at a time."""
    padding = [["x" * 5_000]]
    big = trial(1, trace=padding, id=trial_id(padding))
    line = canonical(big.to_json()) + b"\n"
    peaks = []
    for copies in (20, 200):
        ledger = Ledger.open(tmp_path / str(copies), TARGET, "0", DEVICE)
        for number in range(10):
            key = hashlib.sha256(bytes([number])).hexdigest()
            (ledger.folder / f"{key}.jsonl").write_bytes(line * copies)
        [folder] = records.folders(tmp_path / str(copies))
        tracemalloc.start()
        assert records.summarise(folder).trials == 10 * copies
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 300_000


def test_one_workload_is_shown_best_first(root: Path) -> None:
    """The start of its key is enough; failures come last."""
    [shown] = records.show(root, ONE[:6])
    assert [each.id for each in shown.trials] == [trial(2).id, trial(1).id, trial(3).id]
    assert (shown.key, shown.about, shown.problems) == (ONE, ABOUT, [])


@pytest.mark.parametrize("key", ["", "not-a-key"])
def test_a_key_that_means_no_single_workload_is_an_error(root: Path, key: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError, match="workloads start with"):
        records.show(root, key)


def test_a_trace_reads_as_a_program() -> None:
    """An instruction a line, with what was decided."""
    trace = [
        [
            ["GetSBlock", [], ["b0", "main"], ["b0"]],
            ["GetLoops", ["b0"], [], ["l1", "l2"]],
            ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]],
            ["Annotate", ["b0", '"SSR"'], ["tiling"], []],
        ],
        [[2, [4, 16]]],
    ]
    assert records.trace_lines(trace) == [
        "b0 = GetSBlock(b0, main)",
        "l1, l2 = GetLoops(b0)",
        "v3, v4 = SamplePerfectTile(l1, 2, 64) -> [4, 16]",
        'Annotate(b0, "SSR", tiling)',
    ]
    assert records.trace_lines({"no": "trace"}) == ['{"no": "trace"}']


# ---------------------------------------------------------------- export and import


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_what_was_exported_is_imported_once(root: Path, tmp_path: Path, name: str) -> None:
    """All trials with all their fields, and the descriptions; the second time everything is known."""
    packed = pack.export_pack(tmp_path / name, root)
    assert (packed.targets, packed.workloads, packed.trials, packed.failed) == (1, 2, 5, 1)
    for new, known in ((5, 0), (0, 5)):
        received = pack.import_pack(tmp_path / name, tmp_path / "there", HERE)
        [taken] = received.targets
        assert (taken.new, taken.known, taken.bad, taken.workloads) == (new, known, 0, 2)
        assert received.complete
    assert contents(tmp_path / "there") == contents(root)
    [folder] = records.folders(tmp_path / "there")
    same = [trial(1, seconds=3.0), trial(2, seconds=1.0), failed(3)]
    found = folder.ledger.workload(ONE).trials
    assert found == {each.id: each for each in same}
    assert folder.ledger.description(ONE) == ABOUT


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_equal_content_gives_equal_bytes(tmp_path: Path, name: str) -> None:
    """Neither the order of writing, nor marks, nor the name or time of the export are in the file."""
    dated = [trial(n, when=f"2024-01-0{n}T00:00:00.000+00:00") for n in (1, 2, 3)]
    fill(tmp_path / "a", dated).mark_exhausted("evolutionary/0")
    fill(tmp_path / "b", reversed(dated))
    for side in "ab":
        (tmp_path / f"out-{side}").mkdir()
        pack.export_pack(tmp_path / f"out-{side}" / name, tmp_path / side)
    first, second = ((tmp_path / f"out-{side}" / name).read_bytes() for side in "ab")
    assert first == second
    assert [path.name for path in (tmp_path / "out-a").iterdir()] == [name]


def test_an_export_can_be_narrowed(root: Path, tmp_path: Path) -> None:
    """To the best of each workload, to workloads, to targets."""
    fill(root, [trial(7)], target={**TARGET, "num-cores": 8})
    out = tmp_path / "x.jsonl"
    one_target = [target_key(TARGET, "0", DEVICE)[:8]]
    best = pack.export_pack(out, root, targets=one_target, best=1)
    assert (best.targets, best.workloads, best.trials, best.failed) == (1, 2, 2, 0)
    pack.import_pack(out, tmp_path / "there", HERE)
    assert {frozenset(found) for found in contents(tmp_path / "there").values()} == {
        frozenset(ids(2)),
        frozenset(ids(min(1, 4, key=lambda number: trial(number).id))),
    }
    assert pack.export_pack(out, root, workloads=[TWO[:5]]).trials == 2
    with pytest.raises(UsageError, match="no trial"):
        pack.export_pack(tmp_path / "none.jsonl", root, workloads=["ffffff"])
    assert not (tmp_path / "none.jsonl").exists()
    with pytest.raises(UsageError, match="no target"):
        pack.export_pack(out, root, targets=["nix"])


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_no_flipped_bit_gets_in(root: Path, tmp_path: Path, name: str) -> None:
    """Wherever one is, the file is refused, by name, and the ledger is as it was."""
    good, bad = tmp_path / name, tmp_path / f"bad-{name}"
    pack.export_pack(good, root)
    data = good.read_bytes()
    there = tmp_path / "there"
    # the first bytes of gzip hold flags and the name of a system, which are not content
    for place in range(10 if name.endswith(".gz") else 0, len(data), 23):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        bad.write_bytes(flipped)
        with pytest.raises(UsageError, match=f"bad-{name}"):
            pack.import_pack(bad, there, HERE)
    for end in (0, 1, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:end])
        with pytest.raises(UsageError, match=f"bad-{name}"):
            pack.import_pack(bad, there, HERE)
    assert not there.exists()


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (OTHER_CPU, "device class: other here, any there"),
        (OTHER_TVM, "TVM build: 1 here, 0 there"),
    ],
)
def test_trials_of_another_machine_are_refused_in_words(
    root: Path, tmp_path: Path, here: Here, words: str
) -> None:
    """What differs is named, and nothing else; nothing is written."""
    out, there = tmp_path / "x.jsonl", tmp_path / "there"
    pack.export_pack(out, root)
    with pytest.raises(UsageError) as refused:
        pack.import_pack(out, there, here)
    assert refused.value.message.splitlines()[1:] == [
        f"  {target_key(TARGET, '0', DEVICE)[:12]}: {words}"
    ]
    assert not there.exists()


def test_differences_are_to_the_nearest_target_here(root: Path, tmp_path: Path) -> None:
    """With targets of the same kind here, the setting that differs is named too."""
    out, there = tmp_path / "x.jsonl", tmp_path / "there"
    fill(there, [trial(1)], target={**TARGET, "mcpu": "znver5"})
    pack.export_pack(out, root)
    with pytest.raises(UsageError, match=r"target\.mcpu: znver5 here, none there"):
        pack.import_pack(out, there, OTHER_CPU)


def test_a_target_that_has_trials_here_takes_more_from_anywhere(root: Path, tmp_path: Path) -> None:
    """A store with the trials of a board takes more of them on the machine that collects them."""
    out, there = tmp_path / "x.jsonl", tmp_path / "there"
    fill(there, [trial(1), trial(8)])
    pack.export_pack(out, root)
    [taken] = pack.import_pack(out, there, OTHER_CPU).targets
    assert (taken.new, taken.known) == (4, 1)


def forge(path: Path, change: dict[bytes, bytes], *more: bytes) -> None:
    """Change a file of trials, add lines to it, and give it the digest that it then must have."""
    data = path.read_bytes()
    for old, new in change.items():
        assert data.count(old), old
        data = data.replace(old, new)
    first, _, body = data.partition(b"\n")
    header = json.loads(first)
    del header["digest"]
    body += b"".join(more)
    header["digest"] = hashlib.sha256(canonical(header) + b"\n" + body).hexdigest()
    path.write_bytes(canonical(header) + b"\n" + body)


def test_bad_records_are_refused_one_by_one(root: Path, tmp_path: Path) -> None:
    """The others come in; how many did not, where they are and why is told."""
    out, there = tmp_path / "x.jsonl", tmp_path / "there"
    pack.export_pack(out, root, workloads=[ONE])
    negative = canonical({**trial(5).to_json(), "run_secs": [-1.0]})
    foreign = canonical(trial(6, tvm="9").to_json())
    newer = canonical({**trial(7).to_json(), "v": 99})
    wrong = canonical({**trial(8).to_json(), "id": trial(1).id})
    forge(out, {}, *(line + b"\n" for line in (negative, foreign, newer, wrong, b"{}", b"?")))
    received = pack.import_pack(out, there, HERE)
    [taken] = received.targets
    assert (taken.new, taken.known, taken.bad) == (3, 0, 6)
    assert not received.complete
    assert len(received.problems) == 6
    assert f"{out}:6: a time is a positive number of seconds" in received.problems
    assert any("measured with TVM 9" in problem for problem in received.problems)
    assert contents(there) == {(target_key(TARGET, "0", DEVICE), ONE): ids(1, 2, 3)}


def test_only_what_is_shown_of_a_foreign_description_comes_in(root: Path, tmp_path: Path) -> None:
    """A search relies on what it noted itself; a note of its own takes the other's place."""
    out, there = tmp_path / "x.jsonl", tmp_path / "there"
    pack.export_pack(out, root)
    forge(out, {b'"flops":12.0': b'"flops":"x","family":"f"'})
    pack.import_pack(out, there, HERE)
    [folder] = records.folders(there)
    assert folder.ledger.description(ONE) == {name: ABOUT[name] for name in ("name", "buffers")}
    folder.ledger.describe(ONE, {"name": "mine"}, "the kernel")
    assert folder.ledger.description(ONE) == {"name": "mine"}


def test_a_key_that_is_a_path_is_refused(root: Path, tmp_path: Path) -> None:
    """A file from elsewhere names no file here."""
    out = tmp_path / "x.jsonl"
    pack.export_pack(out, root)
    forge(out, {TWO.encode(): b"../../../" + TWO[9:].encode()})
    with pytest.raises(UsageError, match="names no workload"):
        pack.import_pack(out, tmp_path / "there", HERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "x.jsonl"]


def test_a_target_that_is_not_what_it_is_called_is_refused(root: Path, tmp_path: Path) -> None:
    """Trials of one CPU do not come in under the name of another."""
    out = tmp_path / "x.jsonl"
    pack.export_pack(out, root)
    forge(out, {b'"num-cores":2': b'"num-cores":3'})
    with pytest.raises(UsageError, match="is not what it is called"):
        pack.import_pack(out, tmp_path / "there", HERE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no file of trials"),
        (b"recipe: 1\n", "is no file of trials"),
        (gzip.compress(b"[1, 2]\n", mtime=0), "is no file of trials"),
        (b'{"format":"tvmflow records","version":2,"digest":"x"}\n', "newer than this tvmflow"),
    ],
)
def test_another_file_is_not_imported(tmp_path: Path, content: bytes, words: str) -> None:
    """It is said what the file is not."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        pack.import_pack(tmp_path / "x", tmp_path / "there", HERE)


@contextmanager
def _busy(function: Callable[..., None], *calls: tuple[Any, ...]) -> Iterator[Callable[[], bool]]:
    """Processes that are at it while this is open; whether they still are. They must end well."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(len(calls) + 1)
    processes = [spawn.Process(target=_begin, args=(ready, function, *call)) for call in calls]
    for process in processes:
        process.start()
    ready.wait(30)
    yield lambda: any(process.is_alive() for process in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _begin(ready: Any, function: Callable[..., None], *call: Any) -> None:
    ready.wait(30)
    function(*call)


def _append_many(root: Path) -> None:
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(ONE)
    for number in range(100, 600):
        ledger.append(trial(number))


def test_importing_while_others_write_loses_nothing(tmp_path: Path) -> None:
    """Two tunings while parts of other ledgers come in: each trial is there once."""
    there = tmp_path / "there"
    parts = [tmp_path / f"{number}.jsonl" for number in range(40)]
    for number, part in enumerate(parts):
        fill(tmp_path / str(number), map(trial, range(3 * number, 3 * number + 6)))
        pack.export_pack(part, tmp_path / str(number))
    with _busy(_append_many, (there,), (there,)) as meanwhile:
        during = [meanwhile() for part in parts if pack.import_pack(part, there, HERE).complete]
    assert len(during) == len(parts) and sum(during) > 5
    [(_, found)] = contents(there).items()
    assert found == ids(*range(600))
    [(_, path)] = records.folders(there)[0].workloads()
    assert len(path.read_bytes().splitlines()) == 600
    assert records.verify(there).findings == []


# ---------------------------------------------------------------- merge


@pytest.mark.parametrize("source", ["store", "store/ledger"])
def test_another_stores_trials_are_merged_and_it_is_left_alone(
    root: Path, tmp_path: Path, source: str
) -> None:
    """What fits comes in; what does not is named with the reason; the source is only read."""
    foreign = Ledger.open(root, TARGET, "9", DEVICE)
    foreign.workload(ONE).append(trial(1, tvm="9"))
    (root / ("f" * 32)).mkdir()
    path = root / target_key(TARGET, "0", DEVICE) / f"{TWO}.jsonl"
    path.write_bytes(path.read_bytes() + b"damage\n" + b'{"torn')
    before = tree(root)
    there = tmp_path / "there"
    fill(there, [trial(1)])
    received = pack.merge(tmp_path / source, there, HERE)
    taken = {each.target: each for each in received.targets}
    fits = taken[target_key(TARGET, "0", DEVICE)]
    assert (fits.new, fits.known, fits.bad) == (4, 1, 1)
    assert taken[foreign.folder.name].refused == "TVM build: 0 here, 9 there"
    assert taken["f" * 32].refused == "about.json: it is missing"
    assert [problem.partition(f"{TWO}.jsonl:")[2][:2] for problem in received.problems] == ["3:"]
    assert not received.complete
    assert tree(root) == before
    assert len(contents(there)) == 2


def test_merging_a_ledger_into_itself_or_from_nothing_is_an_error(
    root: Path, tmp_path: Path
) -> None:
    """Both are slips, and said to be."""
    with pytest.raises(UsageError, match="this store's own"):
        pack.merge(root.parent, root, HERE)
    with pytest.raises(UsageError, match="no store and no ledger"):
        pack.merge(tmp_path / "nowhere", root, HERE)


# ---------------------------------------------------------------- prune


def ago(days: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(days=days)).isoformat(timespec="milliseconds")


@pytest.mark.parametrize(
    ("doomed", "stay"),
    [
        (Doomed(keep_best=1), {1, 4, 5}),
        (Doomed(keep_best=2), {1, 2, 4, 5}),
        (Doomed(failed=True), {1, 2, 3}),
        (Doomed(keep_best=1, failed=True), {1}),
        (Doomed(older_than=5), {1, 4}),
        (Doomed(older_than=5, failed=True), {1, 2, 3, 4}),
        (Doomed(older_than=15, keep_best=1), {1, 2, 4, 5}),
        (Doomed(tvm_other=True), {1, 2, 3, 4, 5}),
    ],
)
def test_what_is_asked_for_goes_and_nothing_else(
    tmp_path: Path, doomed: Doomed, stay: set[int]
) -> None:
    """Trials 1 to 3 are ever slower and older, 4 and 5 failed; first it is only told."""
    everything = [trial(n, seconds=float(n), when=ago(10.0 * (n - 1))) for n in (1, 2, 3)]
    everything += [failed(n)._replace(when=ago(10.0 * (n - 4))) for n in (4, 5)]
    fill(tmp_path, everything)
    before = tree(tmp_path)
    told = records.prune(tmp_path, doomed, HERE, do=False)
    assert tree(tmp_path) == before
    assert records.prune(tmp_path, doomed, HERE, do=True) == told
    assert sum(each.trials for each in told) == 5 - len(stay)
    assert list(contents(tmp_path).values()) == [ids(*stay)]
    assert records.prune(tmp_path, doomed, HERE, do=True) == []


def test_other_builds_trials_go_as_a_whole(root: Path) -> None:
    """Only those of the build that is installed stay."""
    pruned = records.prune(root, Doomed(tvm_other=True), OTHER_TVM, do=True)
    assert sum(each.trials for each in pruned) == 5
    assert records.summarise(records.folders(root)[0]).trials == 0


def test_what_is_being_tuned_is_left_alone(root: Path) -> None:
    """It is said so, and the others are pruned."""
    [folder] = records.folders(root)
    with folder.ledger.workload(TWO).searching():
        pruned = records.prune(root, Doomed(keep_best=1), HERE, do=True)
    assert {each.key: each.skipped for each in pruned} == {ONE: "", TWO: "it is being tuned"}
    assert {key: len(found) for (_, key), found in contents(root).items()} == {ONE: 2, TWO: 2}


def test_pruning_without_saying_what_is_an_error(root: Path) -> None:
    """Nobody loses everything by a short command."""
    with pytest.raises(UsageError, match="nothing says which"):
        records.prune(root, Doomed(), HERE, do=True)


def _append_and_fail(root: Path, first: int) -> None:
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(ONE)
    for number in range(first, first + 100):
        ledger.append(trial(number) if number % 2 else failed(number))


def test_pruning_while_others_write_loses_nothing(tmp_path: Path) -> None:
    """The file is replaced under the writers again and again; every trial that worked is there."""
    with _busy(_append_and_fail, (tmp_path, 0), (tmp_path, 100)) as meanwhile:
        replaced = 0
        while meanwhile():
            replaced += len(records.prune(tmp_path, Doomed(failed=True), HERE, do=True))
    assert replaced > 5
    records.prune(tmp_path, Doomed(failed=True), HERE, do=True)
    [found] = contents(tmp_path).values()
    assert found == ids(*range(1, 200, 2))
    assert records.verify(tmp_path).findings == []


# ---------------------------------------------------------------- verify


def test_a_sound_ledger_is_clean(root: Path) -> None:
    """Nothing is found, and nothing is changed."""
    before = tree(root)
    found = records.verify(root)
    assert (found.targets, found.workloads, found.trials) == (1, 2, 5)
    assert found.clean and found.findings == []
    assert tree(root) == before


def test_damage_is_found_with_its_place_and_repaired(root: Path) -> None:
    """A damaged line, a duplicate, a wrong id and another build's trial go; a torn end never was."""
    [folder] = records.folders(root)
    path = folder.path / f"{ONE}.jsonl"
    path.write_bytes(
        path.read_bytes()
        + b"damage\n"
        + canonical(trial(2).to_json())
        + b"\n"
        + canonical({**trial(8).to_json(), "id": trial(7).id})
        + b"\n"
        + canonical(trial(9, tvm="9").to_json())
        + b"\n"
        + b'{"torn'
    )
    found = records.verify(root)
    assert not found.clean
    assert (found.trials, found.lost) == (5, 4)
    places = sorted(
        int(each.partition(f"{ONE}.jsonl:")[2].split(":")[0]) for each in found.findings
    )
    assert places == [4, 5, 6, 7, 8]
    assert records.summarise(folder).set_aside == 4
    again = records.verify(root)
    assert again.clean and again.findings == []


def test_a_torn_end_alone_is_mended(root: Path) -> None:
    """It was never a trial, so nothing is lost."""
    [folder] = records.folders(root)
    path = folder.path / f"{ONE}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    found = records.verify(root)
    assert found.clean and "torn" in found.findings[0]


@pytest.mark.parametrize("about", [None, b"{", b"[]", b'{"target": {}, "tvm": "", "device": {}}'])
def test_a_folder_that_nobody_can_place_is_named(root: Path, about: bytes | None) -> None:
    """Its trials are not touched, and go nowhere."""
    [folder] = records.folders(root)
    description = folder.path / "about.json"
    description.unlink() if about is None else description.write_bytes(about)
    found = records.verify(root)
    assert (found.wrong, found.lost, found.trials) == (1, 0, 5)
    assert str(description) in found.findings[0]
    assert records.summarise(records.folders(root)[0]).words.startswith("not known")
    with pytest.raises(UsageError):
        pack.export_pack(root / "x.jsonl", root)


def test_a_ledger_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    """Looking creates nothing."""
    assert records.folders(tmp_path / "none") == []
    assert records.verify(tmp_path / "none").clean
    assert list(tmp_path.iterdir()) == []
