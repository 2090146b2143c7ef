"""Trials that travel: one file for many targets and workloads, and what a ledger takes from it.

The file is JSON lines, gzipped or not: a header (format, version, digest, the targets with
counts), then for each workload a line that names it and a line for each trial. Equal content
has equal bytes. A ledger takes a target's trials only if it could have measured them itself,
and of those only the ones that it does not have.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from tvmflow.errors import StoreError, UsageError
from tvmflow.tuning.ledger import Ledger, Trial, canonical, key_of, read_line
from tvmflow.tuning.records import (
    WORKLOAD,
    Folder,
    Here,
    best_first,
    folders,
    in_words,
    read_trials,
)
from tvmflow.values import Json

FORMAT: Final = "tvmflow records"
VERSION: Final = 1
_GZIP: Final = b"\x1f\x8b"
# How the line of a workload begins, and that of a trial never does (see `canonical`).
_NAMES_WORKLOAD: Final = b'{"about":'
# A header names targets, a few hundred bytes each; a file without line ends is none of ours.
_LONGEST_HEADER: Final = 16 << 20

Packing = IO[bytes] | gzip.GzipFile
"""A file of trials that is open for reading."""


class Packed(NamedTuple):
    """What an export holds. `problems` are lines of the ledger that could not be read, with their places."""

    digest: str
    targets: int
    workloads: int
    trials: int
    failed: int
    bytes: int
    problems: list[str]


# ---------------------------------------------------------------- export


def export_pack(
    path: Path,
    root: Path,
    *,
    targets: Sequence[str] = (),
    workloads: Sequence[str] = (),
    best: int | None = None,
) -> Packed:
    """Write the trials of a ledger into one file, gzipped when its name ends in `.gz`.

    `targets` and `workloads` are the beginnings of keys, all when empty. `best` takes that
    many of each workload's fastest instead of all trials. The file appears whole or not at
    all. Raises UsageError when there is nothing to export, StoreError when it cannot be written.
    """
    problems: list[str] = []
    counts: dict[str, dict[str, Any]] = {}
    try:
        with tempfile.TemporaryFile(dir=path.parent) as body:
            for folder in folders(root, targets):
                if not folder.wrong:
                    count = _write_target(body, folder, workloads, best, problems)
                    if count["trials"]:
                        counts[folder.key] = {"about": folder.about, **count}
                else:
                    problems.append(f"{folder.path / 'about.json'}: {folder.wrong}; left out")
            if not counts:
                raise UsageError(
                    f"no trial in {root} fits what is to be exported",
                    fix="`tvmflow records ls --workloads` shows what there is",
                )
            header = _header(counts)
            header["digest"] = _digest(header, body)
            size = _write_file(path, canonical(header) + b"\n", body)
    except OSError as refused:
        raise StoreError(
            f"{path} cannot be written: {refused.strerror or refused}",
            fix="give a file in a folder that exists and has space",
        ) from refused
    return Packed(
        digest=header["digest"],
        targets=len(counts),
        workloads=header["workloads"],
        trials=header["trials"],
        failed=header["failed"],
        bytes=size,
        problems=problems,
    )


def _header(counts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    sums = {
        name: sum(each[name] for each in counts.values())
        for name in ("workloads", "trials", "failed")
    }
    return {"format": FORMAT, "version": VERSION, "targets": dict(counts), **sums}


def _write_target(
    body: IO[bytes],
    folder: Folder,
    workloads: Sequence[str],
    best: int | None,
    problems: list[str],
) -> dict[str, int]:
    count = {"workloads": 0, "trials": 0, "failed": 0}
    for key, path in folder.workloads(workloads):
        read = read_trials(path)
        problems += read.problems
        trials = read.trials
        if best is not None:
            trials = best_first([trial for trial in trials if trial.run_secs])[:best]
        if not trials:
            continue
        about = _for_people(folder.ledger.description(key))
        body.write(canonical({"target": folder.key, "workload": key, "about": about}) + b"\n")
        # the order of measuring, which a search looks at, whatever order they came into this ledger
        for trial in sorted(trials, key=lambda trial: (trial.when, trial.id)):
            body.write(canonical(trial.to_json()) + b"\n")
        count["workloads"] += 1
        count["trials"] += len(trials)
        count["failed"] += sum(1 for trial in trials if trial.failure)
    return count


def _digest(header: Mapping[str, Any], body: IO[bytes]) -> str:
    """The sha256 (hex) of a file's content: of the header without the digest, and all lines after it."""
    rest = {name: value for name, value in header.items() if name != "digest"}
    digest = hashlib.sha256(canonical(rest) + b"\n")
    body.seek(0)
    while chunk := body.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _write_file(path: Path, header: bytes, body: IO[bytes]) -> int:
    body.seek(0)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", delete=False) as raw:
        try:
            if path.suffix == ".gz":
                # neither the time nor the name of the temporary file belongs to the content
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                    packed.write(header)
                    shutil.copyfileobj(body, packed)
            else:
                raw.write(header)
                shutil.copyfileobj(body, raw)
            raw.flush()
            os.fchmod(raw.fileno(), 0o644)
            os.fsync(raw.fileno())
            Path(raw.name).replace(path)
        except BaseException:
            Path(raw.name).unlink(missing_ok=True)
            raise
    return path.stat().st_size


# ---------------------------------------------------------------- what a ledger takes


class Offer(NamedTuple):
    """The trials of one workload that a ledger may take. `bad` says what is wrong with others, and where."""

    target: str
    workload: str
    about: Json
    trials: list[Trial]
    bad: list[str]


class Taken(NamedTuple):
    """What came of one target: refused, for a reason in words, or so many new, known and bad trials."""

    target: str
    words: str
    refused: str
    workloads: int = 0
    new: int = 0
    known: int = 0
    bad: int = 0


class Received(NamedTuple):
    """What a ledger took. `problems` are those of single records, each with its place."""

    targets: list[Taken]
    problems: list[str]

    @property
    def complete(self) -> bool:
        """Whether nothing had to be left out."""
        return not self.problems and not any(each.refused for each in self.targets)


def refusal(root: Path, about: Json, here: Here) -> str:
    """Why a ledger may not take trials on this target; empty when it may.

    It may if it has some already, or if this machine, with the build of TVM that is installed,
    would make them: the class of the device and the build are the same.
    """
    if about["device"] == here.device and about["tvm"] == here.tvm:
        return ""
    known = folders(root)
    if any(each.key == key_of(about) and not each.wrong for each in known):
        return ""
    # against the target here that is nearest, the differences are fewest
    nearest = min(
        (_differences({**each.about, **here._asdict()}, about) for each in known if not each.wrong),
        key=len,
        default=_differences({"target": about["target"], **here._asdict()}, about),
    )
    return "; ".join(nearest)


def _differences(ours: Json, theirs: Json) -> list[str]:
    """`TVM build: 1 here, 2 there` for each thing in which two targets differ."""
    names = {"tvm": "TVM build", "device.class": "device class", "device.kind": "device kind"}
    here, there = dict(_leaves(ours)), dict(_leaves(theirs))
    return [
        f"{names.get(name, name)}: {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name) and name != "version"
    ]


def _leaves(value: Json, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, str(value)
        return
    for name, entry in value.items():
        yield from _leaves(entry, f"{path}.{name}" if path else name)


def _receive(
    root: Path, source: str, abouts: Mapping[str, Json], offers: Iterable[Offer], here: Here
) -> Received:
    """Add what is new to the ledger. `abouts` are the offered targets by key, each checked to be that key's."""
    taken = {
        key: Taken(key, in_words(about), refusal(root, about, here))
        for key, about in abouts.items()
    }
    if all(each.refused for each in taken.values()):
        told = [f"  {key[:12]}: {each.refused}" for key, each in taken.items()]
        raise UsageError(
            "\n".join([f"{source} has no trials that this machine could have measured", *told]),
            fix="tune here, or take them to where they were measured: "
            "times of another device or build of TVM would mislead the search",
        )
    problems: list[str] = []
    ledgers: dict[str, Ledger] = {}
    for offer in offers:
        so_far = taken[offer.target]
        if so_far.refused:
            continue
        about = abouts[offer.target]
        if offer.target not in ledgers:
            ledgers[offer.target] = Ledger.open(
                root, about["target"], about["tvm"], about["device"]
            )
        ledger = ledgers[offer.target]
        good = [trial for trial in offer.trials if trial.tvm == about["tvm"]]
        bad = offer.bad + [
            f"workload {offer.workload[:12]}, trial {trial.id[:12]}: "
            f"measured with TVM {trial.tvm}, and its target says {about['tvm']}"
            for trial in offer.trials
            if trial.tvm != about["tvm"]
        ]
        new = 0
        if good:
            new = ledger.workload(offer.workload).extend(good)
            if described := _for_people(offer.about):
                ledger.describe(offer.workload, described)
        taken[offer.target] = so_far._replace(
            workloads=so_far.workloads + 1,
            new=so_far.new + new,
            known=so_far.known + len(good) - new,
            bad=so_far.bad + len(bad),
        )
        problems += bad
    return Received(list(taken.values()), problems)


def _for_people(about: Json) -> Json:
    """Of a description, what is only shown. What a search relies on is found out where it searches."""
    name, flops, buffers = (about.get(field) for field in ("name", "flops", "buffers"))
    kept: dict[str, Any] = {"name": name if isinstance(name, str) else ""}
    if isinstance(buffers, list) and all(isinstance(each, str) for each in buffers):
        kept["buffers"] = buffers
    if isinstance(flops, int | float) and 0 <= flops < float("inf"):
        kept["flops"] = flops
    return kept if about else {}


# ---------------------------------------------------------------- import


def import_pack(path: Path, root: Path, here: Here) -> Received:
    """Add to a ledger what a file from `export_pack` has and it lacks.

    The whole file is checked before the first trial is taken. Raises UsageError for a file
    that is damaged or no export, and for one with nothing that this ledger may take; then
    nothing was changed.
    """
    with _open(path) as stream:
        abouts = _check(path, stream)
        # the same open file, whatever is put in its place meanwhile
        stream.seek(0)
        return _receive(root, str(path), abouts, _offers(path, stream), here)


def _check(path: Path, stream: Packing) -> dict[str, Json]:
    """The targets in a file that is found to be whole, by key."""
    strange = 0
    try:
        header = _read_header(path, stream.readline(_LONGEST_HEADER))
        rest = {name: value for name, value in header.items() if name != "digest"}
        digest = hashlib.sha256(canonical(rest) + b"\n")
        for number, line in enumerate(stream, 2):
            digest.update(line)
            if line.startswith(_NAMES_WORKLOAD) and not _is_offer(line, header["targets"]):
                strange = strange or number
    except (EOFError, zlib.error, gzip.BadGzipFile) as damage:
        raise _damaged(path, f"it cannot be unpacked ({damage})") from damage
    if digest.hexdigest() != header["digest"]:
        raise _damaged(path, f"its digest is {digest.hexdigest()}, and it says {header['digest']}")
    if strange:
        raise _damaged(path, f"line {strange} names no workload of a target in it")
    return {key: each["about"] for key, each in header["targets"].items()}


def _read_header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT or not isinstance(header["digest"], str):
            raise ValueError("another format")
        if int(header["version"]) > VERSION:
            raise UsageError(
                f"{path} is in version {header['version']} of the format, which is newer than this tvmflow",
                fix="update tvmflow",
            )
        strange = [key for key, each in header["targets"].items() if key_of(each["about"]) != key]
    except (ValueError, KeyError, TypeError, AttributeError) as shape:
        raise UsageError(
            f"{path} is no file of trials, or its first line is damaged",
            fix="give one that `tvmflow records export` wrote",
        ) from shape
    if strange:
        raise _damaged(path, f"target {strange[0][:12]} is not what it is called")
    return dict(header)


def _damaged(path: Path, how: str) -> UsageError:
    return UsageError(
        f"{path} is damaged: {how}; nothing was imported", fix="copy it or export it again"
    )


def _open(path: Path) -> Packing:
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == _GZIP
        return gzip.open(path, "rb") if packed else path.open("rb")
    except FileNotFoundError as missing:
        raise UsageError(f"there is no file {path}") from missing
    except OSError as refused:
        raise StoreError(f"{path} cannot be read: {refused.strerror or refused}") from refused


def _is_offer(line: bytes, targets: Mapping[str, Any]) -> bool:
    """Whether a line names a workload, by a key that can be a file's name, of one of the targets."""
    try:
        named = json.loads(line)
        return (
            named["target"] in targets
            and WORKLOAD.fullmatch(named["workload"]) is not None
            and isinstance(named["about"], dict)
        )
    except (ValueError, KeyError, TypeError):
        return False


def _offers(path: Path, stream: Packing) -> Iterator[Offer]:
    """The workloads in a file that was checked, each with its trials."""
    offer: Offer | None = None
    next(stream)
    for number, line in enumerate(stream, 2):
        if line.startswith(_NAMES_WORKLOAD):
            if offer is not None:
                yield offer
            named = json.loads(line)
            offer = Offer(named["target"], named["workload"], named["about"], [], [])
        elif offer is not None:
            _read_trial(line, f"{path}:{number}", offer)
    if offer is not None:
        yield offer


def _read_trial(line: bytes, place: str, offer: Offer) -> None:
    try:
        found = read_line(line)
    except ValueError as damage:
        offer.bad.append(f"{place}: {damage}")
        return
    if isinstance(found, Trial):
        offer.trials.append(found)
    else:
        offer.bad.append(f"{place}: it is no trial that this tvmflow can read")


# ---------------------------------------------------------------- merge


def merge(source: Path, root: Path, here: Here) -> Received:
    """Add to a ledger what another one has and it lacks; `source` is a store or the ledger in it.

    The other is only read. Raises UsageError when it is none, or has nothing that this one may take.
    """
    theirs = source / "ledger" if (source / "ledger").is_dir() else source
    there = folders(theirs)
    if not there:
        raise UsageError(
            f"{source} is no store and no ledger: it holds no trials",
            fix="give the folder that --store names there",
        )
    if theirs.resolve() == root.resolve():
        raise UsageError(f"{source} is this store's own ledger", fix="give another store")
    offers = (
        Offer(folder.key, key, folder.ledger.description(key), read.trials, read.problems)
        for folder in there
        if not folder.wrong
        for key, path in folder.workloads()
        for read in [read_trials(path)]
    )
    abouts = {folder.key: folder.about for folder in there if not folder.wrong}
    received = _receive(root, str(source), abouts, offers, here)
    wrong = [
        Taken(folder.key, in_words({}), f"about.json: {folder.wrong}")
        for folder in there
        if folder.wrong
    ]
    return received._replace(targets=received.targets + wrong)
