"""Checks delivered files against statements of provenance: who says so, what they say, and whether it is so."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow import signing
from tvmflow.provenance import statement
from tvmflow.provenance.beside import STATEMENT_SUFFIX
from tvmflow.provenance.contents import BUNDLE, look_inside
from tvmflow.provenance.documents import Unreadable, at, read_file, read_json, shown
from tvmflow.provenance.statement import Statement
from tvmflow.signing import NotSigned, PublicKey
from tvmflow.stores.local import hash_file
from tvmflow.values import Json

_SHORT: Final = 12
_MOST_SHOWN: Final = 300


class Provenance(NamedTuple):
    """A statement in a file, and who signed it: the ids of those it names, and those of them who are trusted.

    `problem` says why it is not to be believed; its statement may then still be shown.
    """

    path: Path
    statement: Statement | None
    named: tuple[str, ...]
    trusted: tuple[PublicKey, ...]
    problem: str = ""

    @property
    def signature(self) -> str:
        """In words, for people."""
        if self.trusted:
            return (
                f"signed by {', '.join(f'{key.name} ({key.id[:_SHORT]})' for key in self.trusted)}"
            )
        if self.named:
            names = ", ".join(shown(name)[1 : _SHORT + 1] for name in self.named)
            return f"signed by {names}: not checked, for no trusted keys were given"
        return "not signed"


class Finding(NamedTuple):
    """What was found out about one file: `good` or not, and why in `words`."""

    path: Path
    good: bool
    words: str
    said_by: Provenance | None = None


# ---------------------------------------------------------------- statements


def read_statements(path: Path, trusted: Sequence[PublicKey]) -> list[Provenance]:
    """What is in a file of envelopes, one a line; with `trusted` keys, only those are believed that one signed."""
    try:
        lines = [line for line in read_file(path).splitlines() if line.strip()]
    except Unreadable as error:
        return [_unusable(path, str(error))]
    if not lines:
        return [_unusable(path, "it is empty")]
    return [_read(path, line, trusted) for line in lines]


def _unusable(path: Path, why: str) -> Provenance:
    # it may quote what somebody wrote there
    return Provenance(path, None, (), (), why[:_MOST_SHOWN])


def _read(path: Path, line: bytes, trusted: Sequence[PublicKey]) -> Provenance:
    try:
        envelope = read_json(line)
        text = signing.unseal(envelope, statement.PAYLOAD_TYPE)
        found = Provenance(path, statement.read(text), _named(envelope), ())
    except (Unreadable, NotSigned) as error:
        return _unusable(path, str(error))
    if not trusted:
        return found
    try:
        _, signers = signing.unseal_trusted(envelope, statement.PAYLOAD_TYPE, trusted)
    except NotSigned as error:
        return found._replace(problem=str(error))
    return found._replace(trusted=signers)


def _named(envelope: Json) -> tuple[str, ...]:
    return tuple(at(each, "keyid", of=str) for each in at(envelope, "signatures", of=list))


def statements_for(path: Path) -> list[Path]:
    """The files of statements in the folder of a file, or in the nearest one above that has any."""
    for folder in path.absolute().parents:
        found = sorted(folder.glob(f"*{STATEMENT_SUFFIX}"))
        if found:
            return found
    return []


# ---------------------------------------------------------------- files


def check_file(path: Path, said: Sequence[Provenance]) -> Finding:
    """Whether a file is what a statement says. Reads it as a whole, and what a bundle says of itself."""
    if not said:
        return Finding(path, False, "no statement of provenance is beside it or in a folder above")
    believed = [each for each in said if not each.problem]
    if not believed:
        first = said[0]
        return Finding(path, False, f"{first.path.name} is not believed: {first.problem}", first)
    if path.is_symlink() or not path.is_file():
        return Finding(path, False, "it is no plain file, and nothing else was delivered")
    try:
        digest = hash_file(str(path))
    except OSError as error:
        return Finding(path, False, f"it cannot be read: {error.strerror}")
    findings = [_compare(path, digest, each) for each in believed]
    # one that lies above the file and names it must not be contradicted by another one there
    against = [
        finding
        for finding, each in zip(findings, believed, strict=True)
        if not finding.good and each.statement and _below(path, each) in each.statement.subjects
    ]
    good = [each for each in findings if each.good]
    finding = (against or good or [_most_telling(findings)])[0]
    problems = list(_inner_problems(path, finding)) if finding.good else []
    return finding._replace(good=False, words=problems[0]) if problems else finding


def _most_telling(findings: Sequence[Finding]) -> Finding:
    named = [each for each in findings if each.said_by is not None]
    return (named or findings)[0]


def _compare(path: Path, digest: str, said: Provenance) -> Finding:
    assert said.statement is not None
    subjects = said.statement.subjects
    known_as = said.statement.names.get(digest, "")
    # a file that was taken elsewhere has kept its last name at most
    own = next((each for each in (_below(path, said), path.name) if each in subjects), None)
    if own is not None and subjects[own] == digest:
        return Finding(path, True, f"as delivered, {said.signature}", said)
    if own is not None and known_as:
        words = f"it is {shown(known_as)} under the name of {shown(own)}"
        return Finding(path, False, words, said)
    if own is not None:
        words = (
            f"it is not the file that was delivered: its sha256 is {digest[:_SHORT]}…, "
            f"and {said.path.name} says {subjects[own][:_SHORT]}…"
        )
        return Finding(path, False, words, said)
    if known_as:
        return Finding(path, True, f"delivered as {known_as}, {said.signature}", said)
    return Finding(path, False, f"{said.path.name} says nothing of it")


def _below(path: Path, said: Provenance) -> str:
    """The file's name in the folder of the statement; empty for one that is elsewhere."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    here = Path(os.path.abspath(said.path.parent))  # noqa: PTH100
    return absolute.relative_to(here).as_posix() if absolute.is_relative_to(here) else ""


def _inner_problems(path: Path, finding: Finding) -> Iterator[str]:
    """What a bundle says of itself that is not so, or not what its statement says."""
    try:
        inside = look_inside(path) if path.suffix == BUNDLE else None
    except Unreadable as error:
        yield str(error)
        return
    if inside is None:
        return
    yield from inside.problems
    assert finding.said_by is not None and finding.said_by.statement is not None
    used = {
        (at(each, "name", of=str).rpartition("/")[2], at(each, "digest", "sha256", of=str))
        for each in finding.said_by.statement.dependencies("result")
    }
    for bundle in (inside, *inside.parts.values()):
        for name, digest in bundle.models():
            if (name, digest) not in used:
                yield f"its manifest names another {name} than {finding.said_by.path.name} does"


# ---------------------------------------------------------------- folders


def check(
    path: Path, trusted: Sequence[PublicKey], given: Sequence[Path] = ()
) -> Iterator[Finding]:
    """A finding for a file, or for every file in a folder and every one that is missing there.

    Statements are those in `given`, or else those beside each file or in folders above it.
    """
    known: dict[Path, list[Provenance]] = {}

    def said_of(file: Path) -> list[Provenance]:
        places = list(given) or statements_for(file)
        for place in places:
            if place not in known:
                known[place] = read_statements(place, trusted)
        return [each for place in places for each in known[place]]

    if not path.is_dir():
        yield from (
            _check_statement(path, trusted)
            if _is_statement(path)
            else [check_file(path, said_of(path))]
        )
        return
    files = list(_files(path))
    if not files:
        yield Finding(path, False, "there is nothing in it")
    for file in files:
        if _is_statement(file):
            yield from _check_statement(file, trusted)
        else:
            yield check_file(file, said_of(file))


def _is_statement(path: Path) -> bool:
    return path.name.endswith(STATEMENT_SUFFIX)


def _files(folder: Path) -> Iterator[Path]:
    """All that is in a folder and is no folder; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders.sort()
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def _check_statement(path: Path, trusted: Sequence[PublicKey]) -> Iterator[Finding]:
    """A statement is good when it is believed and all the files are there that it is about."""
    for said in read_statements(path, trusted):
        if said.problem or said.statement is None:
            yield Finding(path, False, said.problem, said)
            continue
        missing = [name for name in said.statement.subjects if not (path.parent / name).is_file()]
        yield Finding(path, True, f"{len(said.statement.subjects)} files, {said.signature}", said)
        for name in missing:
            yield Finding(
                path.parent / name, False, f"it is missing: {path.name} speaks of it", said
            )
