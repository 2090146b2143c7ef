"""What can be done with the ledger by hand: look at trials, forget some, check all of them.

Looking takes no lock, writes nothing and holds one line, or one workload, at a time. How big
the ledger is, is not how much memory a question about it takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow import tools
from tvmflow.errors import UsageError
from tvmflow.targets.host import read_host
from tvmflow.tuning.ledger import Ledger, Mark, Trial, key_of, read_line
from tvmflow.values import Json

_TARGET: Final = re.compile(r"[0-9a-f]{32}")
WORKLOAD: Final = re.compile(r"[0-9a-f]{64}")


class Here(NamedTuple):
    """This machine as trials know it: the build of TVM that is installed, and the class of its CPU."""

    tvm: str
    device: dict[str, str]


def this_machine() -> Here:
    """Which trials this machine would make."""
    return Here(tools.identity("apache-tvm"), {"kind": "cpu", "class": read_host().model})


# ---------------------------------------------------------------- folders and files


class Folder(NamedTuple):
    """The trials on one target. `about` is empty, and `wrong` says why, when its description cannot be trusted."""

    path: Path
    about: Json
    wrong: str

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.path, self.about)

    def workloads(self, prefixes: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
        """Key and file of each workload that has one; those alone whose key starts with one of `prefixes`."""
        for path in sorted(self.path.glob("*.jsonl")):
            key = path.name.removesuffix(".jsonl")
            if WORKLOAD.fullmatch(key) and key.startswith(tuple(prefixes) or ""):
                yield key, path


def folders(root: Path, prefixes: Sequence[str] = ()) -> list[Folder]:
    """The targets that a ledger has trials for, or those of them whose key starts with one of `prefixes`.

    Raises UsageError for a prefix that no target has.
    """
    there = sorted(root.iterdir()) if root.is_dir() else []
    found = [_folder(path) for path in there if _TARGET.fullmatch(path.name) and path.is_dir()]
    for prefix in prefixes:
        if not any(each.key.startswith(prefix) for each in found):
            raise UsageError(
                f"no target in {root} has a key that starts with '{prefix}'",
                fix="`tvmflow records ls` shows the keys",
            )
    return [each for each in found if each.key.startswith(tuple(prefixes) or "")]


def _folder(path: Path) -> Folder:
    try:
        about = json.loads((path / "about.json").read_bytes())
        wrong = "" if key_of(about) == path.name else "it is about another target"
    except FileNotFoundError:
        about, wrong = {}, "it is missing"
    except ValueError as damage:
        about, wrong = {}, f"it cannot be read: {damage}"
    return Folder(path, {} if wrong else about, wrong)


def in_words(about: Json) -> str:
    """A target for people: kind, CPU, cores, build of TVM, class of device."""
    if not about:
        return "not known: about.json is missing or damaged"
    target, device = about["target"], about["device"]
    chip = target.get("mcpu") or target.get("mtriple") or target.get("arch") or ""
    words = [" ".join(str(word) for word in (target.get("kind", ""), chip) if word)]
    words += [str(feature) for feature in target.get("mattr", ())]
    words += [f"{target['num-cores']} cores"] if "num-cores" in target else []
    words.append(f"TVM {about['tvm']}")
    words.append(str(device.get("class") or device.get("kind", "")))
    return ", ".join(words)


class Read(NamedTuple):
    """The usable trials of one file, in its order, and what is wrong with the other lines, each with its place."""

    trials: list[Trial]
    problems: list[str]


def read_trials(path: Path) -> Read:
    """All trials in a workload's file, which may be another's, be in use, or allow no writing."""
    trials: dict[str, Trial] = {}
    problems = []
    for number, line in enumerate(_lines(path), 1):
        try:
            found = read_line(line)
        except ValueError as damage:
            # a last line without an end is one that is being written
            if line.endswith(b"\n"):
                problems.append(f"{path}:{number}: {damage}")
            continue
        if isinstance(found, Trial):
            trials.setdefault(found.id, found)
    return Read(list(trials.values()), problems)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            yield from stream
    except FileNotFoundError:
        # cleaned away while we looked at others
        return


def best_first(trials: Sequence[Trial]) -> list[Trial]:
    """Fastest first, failures last; equal ones in the order of their ids."""
    return sorted(trials, key=lambda trial: (trial.seconds, trial.id))


# ---------------------------------------------------------------- ls

# How records are written (see `ledger.canonical`): enough to count them without parsing their traces.
_TIMED: Final = b'{"failure":null,'
_FAILED: Final = b'{"failure":{'
_WHEN: Final = re.compile(rb'"v":1,"when":"([0-9T:.+-]+)"\}\n?$')
_TIMES: Final = re.compile(rb'"run_secs":\[([0-9.,e+-]+)\]')
_TAIL: Final = 80


class WorkloadSummary(NamedTuple):
    """One workload: `best_s` and `spread` are of its fastest trial, `last` is when the latest was measured."""

    key: str
    about: Json
    trials: int
    failed: int
    unreadable: int
    best_s: float | None
    spread: float
    first: str
    last: str


class TargetSummary(NamedTuple):
    """One target: how much there is, from when to when (ISO 8601), and how many lines were set aside."""

    key: str
    about: Json
    words: str
    workloads: int
    trials: int
    failed: int
    unreadable: int
    set_aside: int
    first: str
    last: str
    bytes: int


def summarise(folder: Folder) -> TargetSummary:
    """Count a target's trials, a line at a time."""
    workloads = trials = failed = unreadable = 0
    first = last = ""
    for each in workload_summaries(folder, times=False):
        workloads += each.trials > 0
        trials += each.trials
        failed += each.failed
        unreadable += each.unreadable
        first = min(filter(None, (first, each.first)), default="")
        last = max(last, each.last)
    files = [path for path in folder.path.glob("*") if path.is_file()]
    aside = [path for path in files if path.name.endswith(".quarantine.jsonl")]
    return TargetSummary(
        key=folder.key,
        about=folder.about,
        words=in_words(folder.about),
        workloads=workloads,
        trials=trials,
        failed=failed,
        unreadable=unreadable,
        set_aside=sum(1 for path in aside for _ in _lines(path)),
        first=first,
        last=last,
        bytes=sum(_size(path) for path in files),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def workload_summaries(folder: Folder, *, times: bool = True) -> Iterator[WorkloadSummary]:
    """One summary a workload; without `times` it does not look for the best."""
    for key, path in folder.workloads():
        tally = _Tally(times)
        for line in _lines(path):
            tally.count(line)
        yield WorkloadSummary(
            key=key,
            about=folder.ledger.description(key) if times else {},
            trials=tally.trials,
            failed=tally.failed,
            unreadable=tally.unreadable,
            best_s=tally.best[0] if tally.best else None,
            spread=tally.best[1] if tally.best else 0.0,
            first=tally.first,
            last=tally.last,
        )


class _Tally:
    """Counts the lines of a file. One that is not as we write them is read in full."""

    def __init__(self, times: bool) -> None:
        self._times = times
        self.trials = self.failed = self.unreadable = 0
        self.first = self.last = ""
        self.best: tuple[float, float] | None = None

    def count(self, line: bytes) -> None:
        when = _WHEN.search(line[-_TAIL:])
        failed = line.startswith(_FAILED)
        if when is None or not (failed or line.startswith(_TIMED)):
            self._count_parsed(line)
            return
        found = _TIMES.search(line) if self._times and not failed else None
        times = tuple(float(word) for word in found[1].split(b",")) if found else ()
        self._add(failed, when[1].decode(), times)

    def _count_parsed(self, line: bytes) -> None:
        try:
            found = read_line(line)
        except ValueError:
            self.unreadable += 1
            return
        if found is not None and not isinstance(found, Mark):
            self._add(found.failure is not None, found.when, found.run_secs)

    def _add(self, failed: bool, when: str, times: tuple[float, ...]) -> None:
        self.trials += 1
        self.failed += failed
        self.first = min(filter(None, (self.first, when)), default="")
        self.last = max(self.last, when)
        if times:
            ordered = sorted(times)
            half = len(ordered) // 2
            middle = (ordered[half] + ordered[~half]) / 2
            if self.best is None or middle < self.best[0]:
                self.best = middle, (ordered[-1] - ordered[0]) / middle


# ---------------------------------------------------------------- show


class Shown(NamedTuple):
    """All trials of one workload on one target, best first."""

    target: str
    words: str
    key: str
    about: Json
    trials: list[Trial]
    problems: list[str]


def show(root: Path, key: str, targets: Sequence[str] = ()) -> list[Shown]:
    """The trials of the workload whose key starts with `key`, for each target that has some.

    Raises UsageError when there is none, or more than one such workload.
    """
    found = [
        (folder, name, path)
        for folder in folders(root, targets)
        for name, path in folder.workloads([key])
    ]
    names = sorted({name for _, name, _ in found})
    if len(names) != 1:
        raise UsageError(
            f"the keys of {len(names)} workloads start with '{key}'"
            + (f": {', '.join(name[:12] for name in names[:5])}" if names else ""),
            fix="`tvmflow records ls --workloads` shows the keys",
        )
    shown = []
    for folder, name, path in found:
        read = read_trials(path)
        about = folder.ledger.description(name)
        shown.append(
            Shown(
                folder.key,
                in_words(folder.about),
                name,
                about,
                best_first(read.trials),
                read.problems,
            )
        )
    return shown


def trace_lines(trace: Json) -> list[str]:
    """A trace, an instruction a line: `v1, v2 = SamplePerfectTile(l0, n=2, 64) -> [4, 16]`.

    After the arrow is what was decided. TVM names neither operands nor attributes, and nor do we.
    """
    try:
        instructions, decisions = trace
        decided = {index: f" -> {json.dumps(decision)}" for index, decision in decisions}
        return [
            f"{', '.join(results)}{' = ' if results else ''}{kind}"
            f"({', '.join(map(_word, (*operands, *attributes)))}){decided.get(index, '')}"
            for index, (kind, operands, attributes, results) in enumerate(instructions)
        ]
    except (ValueError, TypeError):
        # a record that came from elsewhere and is no trace of TVM's: as it is
        return [json.dumps(trace)]


def _word(value: Json) -> str:
    """A variable or an attribute by its name; operands that are strings are quoted in the trace already."""
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------- prune


class Doomed(NamedTuple):
    """Which trials are to go: those that fit everything that is asked for.

    `keep_best` spares that many of each workload's fastest, and all failures; `failed` takes
    failures alone; with both, failures and what is not among the best. `older_than` is in
    days. `tvm_other` takes what another build of TVM measured.
    """

    keep_best: int | None = None
    failed: bool = False
    older_than: float | None = None
    tvm_other: bool = False


class Pruned(NamedTuple):
    """What goes from one workload, or went. `skipped` says why nothing did."""

    target: str
    words: str
    key: str
    about: Json
    trials: int
    failed: int
    of: int
    skipped: str


def prune(
    root: Path, doomed: Doomed, here: Here, *, targets: Sequence[str] = (), do: bool
) -> list[Pruned]:
    """What would go from each workload that loses something; with `do`, it does.

    What was forgotten may be measured again. A workload that is being tuned is left alone.
    Raises UsageError when nothing says what should go.
    """
    if doomed == Doomed():
        raise UsageError(
            "nothing says which trials should go",
            fix="give --keep-best N, --failed, --older-than DAYS or --tvm-other",
        )
    pruned = []
    for folder in folders(root, targets):
        if doomed.tvm_other and (not folder.about or folder.about["tvm"] == here.tvm):
            continue
        for key, path in folder.workloads():
            trials = read_trials(path).trials
            goes = _chosen(trials, doomed)
            if not goes:
                continue
            skipped = _remove(folder, key, goes) if do else ""
            failed = sum(1 for trial in goes if trial.failure)
            about = folder.ledger.description(key)
            words = in_words(folder.about)
            pruned.append(
                Pruned(folder.key, words, key, about, len(goes), failed, len(trials), skipped)
            )
    return pruned


def _chosen(trials: Sequence[Trial], doomed: Doomed) -> list[Trial]:
    spared: set[str] = set()
    if doomed.keep_best is not None:
        timed = best_first([trial for trial in trials if trial.run_secs])
        spared = {trial.id for trial in timed[: doomed.keep_best]}
    everything = doomed.keep_best is None and not doomed.failed
    return [
        trial
        for trial in trials
        if (everything or (doomed.failed if trial.failure else doomed.keep_best is not None))
        and trial.id not in spared
        and (doomed.older_than is None or _age_days(trial.when) > doomed.older_than)
    ]


def _age_days(when: str) -> float:
    """How old a record is; one whose time cannot be read is as if it were new."""
    try:
        made = datetime.fromisoformat(when)
    except ValueError:
        return 0.0
    made = made if made.tzinfo else made.replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - made).total_seconds() / 86_400


def _remove(folder: Folder, key: str, trials: Sequence[Trial]) -> str:
    """Why they could not be removed; empty when they were."""
    ledger = folder.ledger.workload(key)
    try:
        with ledger.searching(wait=False):
            ledger.remove(trial.id for trial in trials)
    except BlockingIOError:
        return "it is being tuned"
    return ""


# ---------------------------------------------------------------- verify


class Verified(NamedTuple):
    """All that was read. `findings` are sentences with places; `lost` is how many trials are out of use by them."""

    targets: int
    workloads: int
    trials: int
    findings: list[str]
    lost: int
    wrong: int

    @property
    def clean(self) -> bool:
        """Whether everything that was there can be used (a torn last line never was)."""
        return not self.lost and not self.wrong


def verify(root: Path, targets: Sequence[str] = ()) -> Verified:
    """Read every line of every workload and repair what is damaged, as a tuning would.

    Beyond that it sets aside what another build of TVM measured than its folder is about, and
    names folders whose description is wrong. Those are not touched.
    """
    workloads = trials = lost = wrong = 0
    findings = []
    found = folders(root, targets)
    for folder in found:
        if folder.wrong:
            wrong += 1
            findings.append(
                f"{folder.path / 'about.json'}: {folder.wrong}; "
                "no tuning uses this folder, whose trials cannot be told apart"
            )
        for key, _ in folder.workloads():
            ledger = folder.ledger.workload(key)
            if folder.about:
                build = folder.about["tvm"]
                foreign = [each.id for each in ledger.trials.values() if each.tvm != build]
                ledger.quarantine(foreign, f"it was not measured with TVM {build}")
            workloads += 1
            trials += len(ledger)
            lost += ledger.set_aside
            findings += ledger.repairs
    return Verified(len(found), workloads, trials, findings, lost, wrong)
