"""Listing, sharing, pruning and checking trials: none are lost, and foreign ones are rejected with a reason."""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import DEVICE, TARGET, sealed, trial
from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import UsageError
from tvmflow.tuning.ledger import (
    Ledger,
    MachineClass,
    WorkloadDescription,
    WorkloadLedger,
    target_key,
)
from tvmflow.tuning.ledger_folders import (
    PruneCriteria,
    check_ledger,
    find_workload_trials,
    format_trace,
    list_target_folders,
    prune,
    summarize_target,
    summarize_workloads,
)
from tvmflow.tuning.packs import export_pack, import_pack, merge_ledger
from tvmflow.tuning.trials import Failure, Trial, record_to_json, to_line, trial_id

HERE = MachineClass("0", DEVICE)
OTHER_CPU = MachineClass("0", {"kind": "cpu", "class": "other"})
OTHER_TVM = MachineClass("1", DEVICE)
ONE, TWO = hashlib.sha256(b"one").hexdigest(), hashlib.sha256(b"two").hexdigest()
DESCRIPTION = WorkloadDescription("fused_conv2d_relu", 12.0, ("float32[1×3×8×8]",))


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
    Ledger.open(root, TARGET, "0", DEVICE).describe(ONE, DESCRIPTION)
    return root


def contents(root: Path) -> dict[tuple[str, str], set[str]]:
    """The ids of all trials, by target and workload."""
    return {
        (folder.key, key): {entry.id for entry in WorkloadLedger(path).trials.values()}
        for folder in list_target_folders(root)
        for key, path in folder.workload_files()
    }


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def ids(*numbers: int) -> set[str]:
    return {trial(number).id for number in numbers}


# ---------------------------------------------------------------- ls and show


def test_a_target_is_summarized(root: Path) -> None:
    """Trials and failures are counted and dated, and the target is described."""
    fill(root, [trial(9, when="2024-03-01T00:00:00.000+00:00")], TWO)
    [summary] = map(summarize_target, list_target_folders(root))
    assert (summary.workloads, summary.trials, summary.failed) == (2, 6, 1)
    assert (summary.first[:10], summary.last[:10]) == ("2024-01-01", "2024-03-01")
    assert summary.text == f"llvm {TARGET['mtriple']}, 2 threads, TVM 0, any"
    assert summary.bytes == sum(path.stat().st_size for path in root.rglob("*")) - sum(
        path.stat().st_size for path in root.rglob("*") if path.is_dir()
    )


def test_each_workload_is_listed_with_best_time_and_description(root: Path) -> None:
    """The median of the fastest trial and its spread; names come from the description."""
    [folder] = list_target_folders(root)
    result = {entry.key: entry for entry in summarize_workloads(folder)}
    best = WorkloadLedger(folder.path / f"{ONE}.jsonl").valid()[0]
    assert (result[ONE].best_s, result[ONE].spread) == (best.seconds, best.spread)
    assert (result[ONE].description, result[TWO].description) == (
        DESCRIPTION,
        WorkloadDescription(),
    )


def test_lines_in_another_layout_are_counted_as_they_are_parsed(root: Path) -> None:
    """Another layout of the same JSON, marks, blanks, a newer version's record, and damage."""
    [folder] = list_target_folders(root)
    path = folder.path / f"{TWO}.jsonl"
    WorkloadLedger(path).mark_exhausted("evolutionary/0")
    with path.open("a") as stream:
        stream.write(json.dumps(record_to_json(trial(5)), indent=None) + "\n")
        stream.write(json.dumps(record_to_json(failed(6))) + "\n")
        stream.write('     \n{"v":99,"x":1}\nnonsense\n')
    result = {entry.key: entry for entry in summarize_workloads(folder)}[TWO]
    assert (result.trials, result.failed, result.unreadable) == (4, 1, 1)


def test_the_memory_of_a_summary_does_not_grow_with_the_ledger(tmp_path: Path) -> None:
    """Ten times the records, the same peak: they are counted a line at a time."""
    padding = [["x" * 5_000]]
    big = trial(1, trace=padding, id=trial_id(padding))
    line = to_line(big)
    peaks = []
    for copies in (20, 200):
        ledger = Ledger.open(tmp_path / str(copies), TARGET, "0", DEVICE)
        for number in range(10):
            key = hashlib.sha256(bytes([number])).hexdigest()
            (ledger.folder / f"{key}.jsonl").write_bytes(line * copies)
        [folder] = list_target_folders(tmp_path / str(copies))
        tracemalloc.start()
        assert summarize_target(folder).trials == 10 * copies
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 300_000


def test_one_workload_is_shown_best_first(root: Path) -> None:
    """The beginning of its key is enough; failures come last."""
    [shown] = find_workload_trials(root, ONE[:6])
    assert [entry.id for entry in shown.trials] == [trial(2).id, trial(1).id, trial(3).id]
    assert (shown.key, shown.description, shown.problems) == (ONE, DESCRIPTION, [])


@pytest.mark.parametrize(
    ("key", "problem"),
    [("", "beginning of the keys of"), ("not-a-key", "no workload has a key that begins with")],
)
def test_a_key_prefix_without_exactly_one_workload_is_an_error(
    root: Path, key: str, problem: str
) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError, match=problem):
        find_workload_trials(root, key)


def test_a_trace_reads_as_a_program() -> None:
    """One instruction a line, with its decision."""
    trace = [
        [
            ["GetSBlock", [], ["b0", "main"], ["b0"]],
            ["GetLoops", ["b0"], [], ["l1", "l2"]],
            ["SamplePerfectTile", ["l1"], [2, 64], ["v3", "v4"]],
            ["Annotate", ["b0", '"SSR"'], ["tiling"], []],
        ],
        [[2, [4, 16]]],
    ]
    assert format_trace(trace) == [
        "b0 = GetSBlock(b0, main)",
        "l1, l2 = GetLoops(b0)",
        "v3, v4 = SamplePerfectTile(l1, 2, 64) -> [4, 16]",
        'Annotate(b0, "SSR", tiling)',
    ]
    assert format_trace({"no": "trace"}) == ['{"no": "trace"}']


# ---------------------------------------------------------------- export and import


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_exported_trials_are_imported_once(root: Path, tmp_path: Path, name: str) -> None:
    """All trials with all fields, and the descriptions; the second import finds nothing new."""
    packed = export_pack(tmp_path / name, root)
    assert (packed.targets, packed.workloads, packed.trials, packed.failed) == (1, 2, 5, 1)
    for new, known in ((5, 0), (0, 5)):
        outcome = import_pack(tmp_path / name, tmp_path / "there", HERE)
        [imported] = outcome.targets
        assert (imported.new, imported.known, imported.invalid, imported.workloads) == (
            new,
            known,
            0,
            2,
        )
        assert outcome.complete
    assert contents(tmp_path / "there") == contents(root)
    [folder] = list_target_folders(tmp_path / "there")
    same = [trial(1, seconds=3.0), trial(2, seconds=1.0), failed(3)]
    result = folder.ledger.workload(ONE).trials
    assert result == {entry.id: entry for entry in same}
    assert folder.ledger.description(ONE) == DESCRIPTION


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_equal_content_gives_equal_bytes(tmp_path: Path, name: str) -> None:
    """The order of writing, outdated marks, and the name and time of the export do not change the file."""
    fill(tmp_path / "a", [trial(1)]).mark_exhausted("evolutionary/0")
    fill(tmp_path / "a", [trial(2), trial(3)])
    fill(tmp_path / "b", [trial(3), trial(2), trial(1)])
    for side in "ab":
        (tmp_path / f"out-{side}").mkdir()
        export_pack(tmp_path / f"out-{side}" / name, tmp_path / side)
    first, second = ((tmp_path / f"out-{side}" / name).read_bytes() for side in "ab")
    assert first == second
    assert [path.name for path in (tmp_path / "out-a").iterdir()] == [name]


def test_an_export_can_be_filtered(root: Path, tmp_path: Path) -> None:
    """By best trials, by workloads, by targets."""
    fill(root, [trial(7)], target={**TARGET, "num-cores": 8})
    out = tmp_path / "x.jsonl"
    target_prefixes = [target_key(TARGET, "0", DEVICE)[:8]]
    best = export_pack(out, root, targets=target_prefixes, best=1)
    assert (best.targets, best.workloads, best.trials, best.failed) == (1, 2, 2, 0)
    import_pack(out, tmp_path / "there", HERE)
    assert {frozenset(result) for result in contents(tmp_path / "there").values()} == {
        frozenset(ids(2)),
        frozenset(ids(min(1, 4, key=lambda number: trial(number).id))),
    }
    assert export_pack(out, root, workloads=[TWO[:5]]).trials == 2
    with pytest.raises(UsageError, match="no trial"):
        export_pack(tmp_path / "none.jsonl", root, workloads=["ffffff"])
    assert not (tmp_path / "none.jsonl").exists()
    with pytest.raises(UsageError, match="no target"):
        export_pack(out, root, targets=["nix"])


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_pack_with_a_flipped_bit_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    """Wherever the bit is, the file is named, and the ledger stays unchanged."""
    good, bad = tmp_path / name, tmp_path / f"bad-{name}"
    export_pack(good, root)
    data = good.read_bytes()
    other_root = tmp_path / "there"
    # the first bytes of gzip hold flags and the name of a system, which are not content
    for offset in range(10 if name.endswith(".gz") else 0, len(data), 23):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        bad.write_bytes(flipped)
        with pytest.raises(UsageError, match=f"bad-{name}"):
            import_pack(bad, other_root, HERE)
    for end in (0, 1, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:end])
        with pytest.raises(UsageError, match=f"bad-{name}"):
            import_pack(bad, other_root, HERE)
    assert not other_root.exists()


@pytest.mark.parametrize(
    ("machine_class", "message"),
    [
        (OTHER_CPU, "device class: other here, any there"),
        (OTHER_TVM, "TVM build: 1 here, 0 there"),
    ],
)
def test_trials_of_another_machine_are_rejected_with_the_difference(
    root: Path, tmp_path: Path, machine_class: MachineClass, message: str
) -> None:
    """Only what differs is named, and nothing is written."""
    out, other_root = tmp_path / "x.jsonl", tmp_path / "there"
    export_pack(out, root)
    with pytest.raises(UsageError) as refused:
        import_pack(out, other_root, machine_class)
    assert refused.value.message.splitlines()[1:] == [
        f"  {target_key(TARGET, '0', DEVICE)[:12]}: {message}"
    ]
    assert not other_root.exists()


def test_differences_are_to_the_nearest_target_of_the_ledger(root: Path, tmp_path: Path) -> None:
    """With a similar target in the ledger, the setting that differs is named too."""
    out, other_root = tmp_path / "x.jsonl", tmp_path / "there"
    fill(other_root, [trial(1)], target={**TARGET, "mcpu": "znver5"})
    export_pack(out, root)
    with pytest.raises(UsageError, match=r"target\.mcpu: znver5 here, none there"):
        import_pack(out, other_root, OTHER_CPU)


def test_a_target_with_trials_in_the_ledger_is_accepted_from_any_machine(
    root: Path, tmp_path: Path
) -> None:
    """A store that collects the trials of a board accepts more of them."""
    out, other_root = tmp_path / "x.jsonl", tmp_path / "there"
    fill(other_root, [trial(1), trial(8)])
    export_pack(out, root)
    [imported] = import_pack(out, other_root, OTHER_CPU).targets
    assert (imported.new, imported.known) == (4, 1)


def forge(path: Path, change: dict[bytes, bytes], *more: bytes) -> None:
    """Change a pack, add lines to it, and correct its digest and counts."""
    data = path.read_bytes()
    for old, new in change.items():
        assert data.count(old), old
        data = data.replace(old, new)
    path.write_bytes(sealed(data + b"".join(more)))


def test_invalid_records_are_rejected_one_by_one(root: Path, tmp_path: Path) -> None:
    """The others are imported; each invalid one is counted and reported with its line and reason."""
    out, other_root = tmp_path / "x.jsonl", tmp_path / "there"
    export_pack(out, root, workloads=[ONE])
    negative = canonical({**record_to_json(trial(5)), "run_secs": [-1.0]})
    foreign = canonical(record_to_json(trial(6, tvm="9")))
    newer = canonical({**record_to_json(trial(7)), "v": 99})
    wrong = canonical({**record_to_json(trial(8)), "id": trial(1).id})
    forge(out, {}, *(line + b"\n" for line in (negative, foreign, newer, wrong, b"{}", b"?")))
    outcome = import_pack(out, other_root, HERE)
    [imported] = outcome.targets
    assert (imported.new, imported.known, imported.invalid) == (3, 0, 6)
    assert not outcome.complete
    assert len(outcome.problems) == 6
    wrong_time = "the field 'run_secs.0' is wrong: input should be greater than 0"
    assert f"{out}:6: workload {ONE[:12]}: {wrong_time}" in outcome.problems
    assert any("measured with TVM 9" in problem for problem in outcome.problems)
    assert contents(other_root) == {(target_key(TARGET, "0", DEVICE), ONE): ids(1, 2, 3)}


def test_only_the_fields_for_people_are_imported_of_a_description(
    root: Path, tmp_path: Path
) -> None:
    """A search relies on its own description, which replaces an imported one."""
    out, other_root = tmp_path / "x.jsonl", tmp_path / "there"
    export_pack(out, root)
    forge(out, {b'"flops":12.0': b'"flops":"x","unknown":"f"'})
    import_pack(out, other_root, HERE)
    [folder] = list_target_folders(other_root)
    assert folder.ledger.description(ONE) == DESCRIPTION._replace(flops=None)
    folder.ledger.describe(ONE, WorkloadDescription("mine"), "the kernel")
    assert folder.ledger.description(ONE) == WorkloadDescription("mine")


def test_a_key_that_is_a_path_is_refused(root: Path, tmp_path: Path) -> None:
    """A pack cannot name a file outside of the ledger."""
    out = tmp_path / "x.jsonl"
    export_pack(out, root)
    forge(out, {TWO.encode(): b"../../../" + TWO[9:].encode()})
    with pytest.raises(UsageError, match="names no workload"):
        import_pack(out, tmp_path / "there", HERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "x.jsonl"]


def test_a_target_whose_key_does_not_match_is_refused(root: Path, tmp_path: Path) -> None:
    """Trials of one CPU are not imported under the key of another."""
    out = tmp_path / "x.jsonl"
    export_pack(out, root)
    forge(out, {b'"num-cores":2': b'"num-cores":3'})
    with pytest.raises(UsageError, match="does not have that key"):
        import_pack(out, tmp_path / "there", HERE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trial pack"),
        (b"recipe: 1\n", "is not a trial pack"),
        (gzip.compress(b"[1, 2]\n", mtime=0), "is not a trial pack"),
        (b'{"format":"tvmflow records","version":3,"digest":"x"}\n', "newer than this tvmflow"),
    ],
)
def test_another_file_is_not_imported(tmp_path: Path, content: bytes, message: str) -> None:
    """The message says that the file is not a pack."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        import_pack(tmp_path / "x", tmp_path / "there", HERE)


@contextmanager
def _busy(function: Callable[..., None], *calls: tuple[Any, ...]) -> Iterator[Callable[[], bool]]:
    """Run processes while the block runs; give a function that says whether any is alive. All must succeed."""
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


# A writer pauses so long after each trial that the other processes get their turns.
PAUSE_S = 0.005


def _append_many(root: Path) -> None:
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(ONE)
    for number in range(100, 600):
        ledger.append(trial(number))
        time.sleep(PAUSE_S)


@pytest.mark.slow
def test_importing_while_others_write_loses_nothing(tmp_path: Path) -> None:
    """Two tunings while packs are imported: each trial is in the ledger once."""
    other_root = tmp_path / "there"
    parts = [tmp_path / f"{number}.jsonl" for number in range(40)]
    for number, part in enumerate(parts):
        fill(tmp_path / str(number), map(trial, range(3 * number, 3 * number + 6)))
        export_pack(part, tmp_path / str(number))
    with _busy(_append_many, (other_root,), (other_root,)) as meanwhile:
        during = [meanwhile() for part in parts if import_pack(part, other_root, HERE).complete]
    assert len(during) == len(parts) and sum(during) > 5
    [(_, result)] = contents(other_root).items()
    assert result == ids(*range(600))
    [(_, path)] = list_target_folders(other_root)[0].workload_files()
    assert path.read_bytes().count(b"run_secs") == 600
    assert check_ledger(other_root).findings == []


# ---------------------------------------------------------------- merge


@pytest.mark.parametrize("source", ["store", "store/ledger"])
def test_another_store_is_merged_and_not_changed(root: Path, tmp_path: Path, source: str) -> None:
    """Accepted targets are imported, others are reported with the reason; the source is only read."""
    foreign = Ledger.open(root, TARGET, "9", DEVICE)
    foreign.workload(ONE).append(trial(1, tvm="9"))
    (root / ("f" * 32)).mkdir()
    path = root / target_key(TARGET, "0", DEVICE) / f"{TWO}.jsonl"
    path.write_bytes(path.read_bytes() + b"damage\n" + b'{"torn')
    before = tree(root)
    other_root = tmp_path / "there"
    fill(other_root, [trial(1)])
    outcome = merge_ledger(tmp_path / source, other_root, HERE)
    imported = {entry.target: entry for entry in outcome.targets}
    fits = imported[target_key(TARGET, "0", DEVICE)]
    assert (fits.new, fits.known, fits.invalid) == (4, 1, 1)
    assert imported[foreign.folder.name].rejection == "TVM build: 0 here, 9 there"
    assert imported["f" * 32].rejection == "about.json: it is missing"
    assert [problem.partition(f"{TWO}.jsonl:")[2][:2] for problem in outcome.problems] == ["4:"]
    assert not outcome.complete
    assert tree(root) == before
    assert len(contents(other_root)) == 2


def test_merging_a_ledger_into_itself_or_from_nothing_is_an_error(
    root: Path, tmp_path: Path
) -> None:
    """Both are reported as mistakes."""
    with pytest.raises(UsageError, match="this store's own"):
        merge_ledger(root.parent, root, HERE)
    with pytest.raises(UsageError, match="neither a store nor a ledger"):
        merge_ledger(tmp_path / "nowhere", root, HERE)


# ---------------------------------------------------------------- prune


def ago(days: float) -> str:
    return (datetime.now(timezone.utc) - timedelta(days=days)).isoformat(timespec="milliseconds")


@pytest.mark.parametrize(
    ("criteria", "stay"),
    [
        (PruneCriteria(keep_best=1), {1, 4, 5}),
        (PruneCriteria(keep_best=2), {1, 2, 4, 5}),
        (PruneCriteria(failed=True), {1, 2, 3}),
        (PruneCriteria(keep_best=1, failed=True), {1}),
        (PruneCriteria(older_than_days=5), {1, 4}),
        (PruneCriteria(older_than_days=5, failed=True), {1, 2, 3, 4}),
        (PruneCriteria(older_than_days=15, keep_best=1), {1, 2, 4, 5}),
        (PruneCriteria(other_tvm=True), {1, 2, 3, 4, 5}),
    ],
)
def test_exactly_the_selected_trials_are_removed(
    tmp_path: Path, criteria: PruneCriteria, stay: set[int]
) -> None:
    """Trials 1 to 3 are ever slower and older, 4 and 5 failed; a dry run comes first."""
    everything = [trial(n, seconds=float(n), when=ago(10.0 * (n - 1))) for n in (1, 2, 3)]
    everything += [failed(n)._replace(when=ago(10.0 * (n - 4))) for n in (4, 5)]
    fill(tmp_path, everything)
    before = tree(tmp_path)
    planned = prune(tmp_path, criteria, HERE, dry_run=True)
    assert tree(tmp_path) == before
    assert prune(tmp_path, criteria, HERE, dry_run=False) == planned
    assert sum(entry.trials for entry in planned) == 5 - len(stay)
    assert list(contents(tmp_path).values()) == [ids(*stay)]
    assert prune(tmp_path, criteria, HERE, dry_run=False) == []


def test_all_trials_of_other_tvm_builds_are_removed(root: Path) -> None:
    """Only those of the build that is installed stay."""
    pruned = prune(root, PruneCriteria(other_tvm=True), OTHER_TVM, dry_run=False)
    assert sum(entry.trials for entry in pruned) == 5
    assert summarize_target(list_target_folders(root)[0]).trials == 0


def test_a_workload_that_is_being_tuned_is_skipped(root: Path) -> None:
    """It is reported, and the others are pruned."""
    [folder] = list_target_folders(root)
    with folder.ledger.workload(TWO).exclusive_search():
        pruned = prune(root, PruneCriteria(keep_best=1), HERE, dry_run=False)
    assert {entry.key: entry.skip_reason for entry in pruned} == {ONE: "", TWO: "it is being tuned"}
    assert {key: len(result) for (_, key), result in contents(root).items()} == {ONE: 2, TWO: 2}


def test_pruning_without_criteria_is_an_error(root: Path) -> None:
    """A short command does not remove everything."""
    with pytest.raises(UsageError, match="no criterion says which"):
        prune(root, PruneCriteria(), HERE, dry_run=False)


def _append_and_fail(root: Path, first: int) -> None:
    ledger = Ledger.open(root, TARGET, "0", DEVICE).workload(ONE)
    for number in range(first, first + 100):
        ledger.append(trial(number) if number % 2 else failed(number))
        time.sleep(PAUSE_S)


def test_pruning_while_others_write_loses_nothing(tmp_path: Path) -> None:
    """The file is replaced again and again; every trial that worked stays."""
    with _busy(_append_and_fail, (tmp_path, 0), (tmp_path, 100)) as meanwhile:
        replaced = 0
        while meanwhile():
            replaced += len(prune(tmp_path, PruneCriteria(failed=True), HERE, dry_run=False))
    assert replaced > 5
    prune(tmp_path, PruneCriteria(failed=True), HERE, dry_run=False)
    [result] = contents(tmp_path).values()
    assert result == ids(*range(1, 200, 2))
    assert check_ledger(tmp_path).findings == []


# ---------------------------------------------------------------- verify


def test_an_undamaged_ledger_is_clean(root: Path) -> None:
    """Nothing is found, and nothing is changed."""
    before = tree(root)
    result = check_ledger(root)
    assert (result.targets, result.workloads, result.trials) == (1, 2, 5)
    assert result.clean and result.findings == []
    assert tree(root) == before


def test_damage_is_reported_with_its_line_and_repaired(root: Path) -> None:
    """A damaged line, a duplicate, a wrong id and a trial of another build are quarantined; an incomplete line is removed."""
    [folder] = list_target_folders(root)
    path = folder.path / f"{ONE}.jsonl"
    path.write_bytes(
        path.read_bytes()
        + b"damage\n"
        + canonical(record_to_json(trial(2, seconds=1.0)))
        + b"\n"
        + canonical({**record_to_json(trial(8)), "id": trial(7).id})
        + b"\n"
        + canonical(record_to_json(trial(9, tvm="9")))
        + b"\n"
        + b'{"torn'
    )
    result = check_ledger(root)
    assert not result.clean
    assert (result.trials, result.quarantined) == (5, 4)
    places = sorted(
        int(entry.partition(f"{ONE}.jsonl:")[2].split(":")[0]) for entry in result.findings
    )
    assert places == [5, 6, 7, 8, 9]
    assert summarize_target(folder).quarantined == 4
    again = check_ledger(root)
    assert again.clean and again.findings == []


def test_an_incomplete_last_line_alone_is_removed(root: Path) -> None:
    """It was never a trial, so the ledger is clean."""
    [folder] = list_target_folders(root)
    path = folder.path / f"{ONE}.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    result = check_ledger(root)
    assert result.clean and "incomplete last line" in result.findings[0]


@pytest.mark.parametrize("about", [None, b"{", b"[]", b'{"target": {}, "tvm": "", "device": {}}'])
def test_a_folder_without_a_valid_description_is_reported(root: Path, about: bytes | None) -> None:
    """Its trials are not changed and not exported."""
    [folder] = list_target_folders(root)
    description = folder.path / "about.json"
    description.unlink() if about is None else description.write_bytes(about)
    result = check_ledger(root)
    assert (result.unusable_targets, result.quarantined, result.trials) == (1, 0, 5)
    assert str(description) in result.findings[0]
    assert summarize_target(list_target_folders(root)[0]).text.startswith("not known")
    with pytest.raises(UsageError):
        export_pack(root / "x.jsonl", root)


def test_a_missing_ledger_is_empty(tmp_path: Path) -> None:
    """Reading creates nothing."""
    assert list_target_folders(tmp_path / "none") == []
    assert check_ledger(tmp_path / "none").clean
    assert list(tmp_path.iterdir()) == []
