"""Checks delivered files against statements of provenance and their signatures."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import signing
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text
from tvmflow.core.signing import InvalidEnvelope, PublicKey
from tvmflow.provenance.contents import BUNDLE, find_bundle
from tvmflow.provenance.delivered import STATEMENT_SUFFIX
from tvmflow.provenance.documents import Unreadable, get_field, quote, read_file, read_json
from tvmflow.provenance.statement import PAYLOAD_TYPE, Statement, parse_statement

_SHORT_ID: Final = 12
_MAX_PROBLEM: Final = 300
_log = logging.getLogger(__name__)


class SignedStatement(NamedTuple):
    """A statement in a file, with its signers.

    Attributes:
        path: The file.
        statement: The statement; None when it cannot be read.
        key_ids: The ids of the keys that it names as its signers; nothing proves them.
        trusted: The trusted keys whose signatures are valid.
        problem: The reason why it must not be believed; otherwise empty.
    """

    path: Path
    statement: Statement | None
    key_ids: tuple[str, ...]
    trusted: tuple[PublicKey, ...]
    problem: str = ""

    @property
    def signature(self) -> str:
        """The signers, for people."""
        if self.trusted:
            keys = ", ".join(f"{key.name} ({key.id[:_SHORT_ID]})" for key in self.trusted)
            return f"signed by {keys}"
        if self.key_ids:
            ids = ", ".join(quote(key_id)[1 : _SHORT_ID + 1] for key_id in self.key_ids)
            return f"signed by {ids}: not checked, because no trusted keys are given"
        return "not signed"


class Finding(NamedTuple):
    """The result of the check of one file.

    Attributes:
        path: The file.
        good: It is what a statement says.
        message: The reason.
        source: The statement that decided it; None when there is none.
    """

    path: Path
    good: bool
    message: str
    source: SignedStatement | None = None


# ---------------------------------------------------------------- statements


def read_statements(path: Path, trusted: Sequence[PublicKey]) -> list[SignedStatement]:
    """Return the statements in a file of envelopes, one a line.

    Args:
        path: The file.
        trusted: Keys of which one must have signed a statement; none to believe all.
    """
    try:
        lines = [line for line in read_file(path).splitlines() if line.strip()]
    except Unreadable as error:
        return [_unusable(path, str(error))]
    if not lines:
        return [_unusable(path, "it is empty")]
    return [_read_statement(path, line, trusted) for line in lines]


def _unusable(path: Path, reason: str) -> SignedStatement:
    # The reason may quote what somebody wrote there.
    return SignedStatement(path, None, (), (), reason[:_MAX_PROBLEM])


def _read_statement(path: Path, line: bytes, trusted: Sequence[PublicKey]) -> SignedStatement:
    try:
        envelope = read_json(line)
        statement = parse_statement(signing.open_envelope(envelope, PAYLOAD_TYPE))
    except (Unreadable, InvalidEnvelope) as error:
        return _unusable(path, str(error))
    signatures = get_field(envelope, "signatures", of=list)
    key_ids = tuple(get_field(entry, "keyid", of=str) for entry in signatures)
    signed = SignedStatement(path, statement, key_ids, ())
    if not trusted:
        return signed
    try:
        _, signers = signing.verify_envelope(envelope, PAYLOAD_TYPE, trusted)
    except InvalidEnvelope as error:
        return signed._replace(problem=str(error))
    return signed._replace(trusted=signers)


def find_statements(path: Path) -> list[Path]:
    """Return the statement files in the folder of a file, or in the nearest one above that has any."""
    for folder in path.absolute().parents:
        files = sorted(folder.glob(f"*{STATEMENT_SUFFIX}"))
        if files:
            return files
    return []


# ---------------------------------------------------------------- files


def check_file(path: Path, statements: Sequence[SignedStatement]) -> Finding:
    """Compare a file with statements, and a bundle also with its own manifest."""
    if not statements:
        return Finding(path, False, "no statement of provenance is beside it or in a folder above")
    believed = sorted((signed for signed in statements if not signed.problem), key=_is_measured)
    if not believed:
        first = statements[0]
        return Finding(path, False, f"{first.path.name} is not believed: {first.problem}", first)
    if path.is_symlink() or not path.is_file():
        return Finding(path, False, "it is no regular file, and nothing else was delivered")
    try:
        digest = hash_file(str(path))
    except OSError as error:
        return Finding(path, False, f"it cannot be read: {error.strerror}")
    finding = _decide([_compare(path, digest, signed) for signed in believed], path, believed)
    problems = list(_bundle_problems(path, finding)) if finding.good else []
    return finding._replace(good=False, message=problems[0]) if problems else finding


def _is_measured(signed: SignedStatement) -> bool:
    """Return whether a statement is about measurements; the other one says what a file was made from."""
    return signed.statement is not None and signed.statement.is_of_measurements


def _decide(
    findings: Sequence[Finding], path: Path, statements: Sequence[SignedStatement]
) -> Finding:
    """Return the finding that counts of those with several statements."""
    # A statement that names the file by its place must not be contradicted by another one.
    contradictions = [
        finding
        for finding, signed in zip(findings, statements, strict=True)
        if not finding.good
        and signed.statement
        and _relative_name(path, signed) in signed.statement.subjects
    ]
    good = [finding for finding in findings if finding.good]
    with_source = [finding for finding in findings if finding.source is not None]
    return (contradictions or good or with_source or findings)[0]


def _compare(path: Path, digest: str, signed: SignedStatement) -> Finding:
    """Compare a file with one statement that can be read."""
    assert signed.statement is not None
    subjects = signed.statement.subjects
    known_as = signed.statement.names.get(digest, "")
    # A file that was moved has kept at most the last part of its name.
    names = (_relative_name(path, signed), path.name)
    name = next((candidate for candidate in names if candidate in subjects), None)
    if name is not None and subjects[name] == digest:
        return Finding(path, True, f"as delivered, {signed.signature}", signed)
    if name is not None and known_as:
        message = f"it is {quote(known_as)} under the name of {quote(name)}"
        return Finding(path, False, message, signed)
    if name is not None:
        message = (
            f"it is not the file that was delivered: its sha256 is {digest[:_SHORT_ID]}…, "
            f"but {signed.path.name} has {subjects[name][:_SHORT_ID]}…"
        )
        return Finding(path, False, message, signed)
    if known_as:
        return Finding(path, True, f"delivered as {known_as}, {signed.signature}", signed)
    return Finding(path, False, f"{signed.path.name} does not name it")


def _relative_name(path: Path, signed: SignedStatement) -> str:
    """Return the name of a file in the folder of a statement; empty when it is elsewhere."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    folder = Path(os.path.abspath(signed.path.parent))  # noqa: PTH100
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else ""


def _bundle_problems(path: Path, finding: Finding) -> Iterator[str]:
    """Yield the differences of a bundle from its own manifest and from its statement."""
    try:
        content = find_bundle(path) if path.suffix == BUNDLE else None
    except Unreadable as error:
        yield str(error)
        return
    if content is None:
        return
    yield from content.problems
    assert finding.source is not None and finding.source.statement is not None
    if _is_measured(finding.source):
        return
    results = finding.source.statement.dependencies("result")
    names = [get_field(entry, "name", of=str).rpartition("/")[2] for entry in results]
    digests = [get_field(entry, "digest", "sha256", of=str) for entry in results]
    used = set(zip(names, digests, strict=True))
    for bundle in (content, *content.parts.values()):
        for name, digest in bundle.model_files():
            if (name, digest) not in used:
                yield f"its manifest names another {name} than {finding.source.path.name} does"


# ---------------------------------------------------------------- folders


def check_delivered(
    path: Path, trusted: Sequence[PublicKey], statements: Sequence[Path] = ()
) -> Iterator[Finding]:
    """Yield a finding for a file, or for every file in a folder and every one that is missing.

    Args:
        path: A file or a folder.
        trusted: Keys of which one must have signed; none to believe all statements.
        statements: Files of statements; by default those beside each file or in folders above.
    """
    read_once = functools.cache(functools.partial(read_statements, trusted=tuple(trusted)))
    files = list(_list_files(path)) if path.is_dir() else [path]
    if not files:
        yield Finding(path, False, "the folder is empty")
    for file in files:
        if file.name.endswith(STATEMENT_SUFFIX):
            yield from _check_statements(file, trusted)
        else:
            sources = statements or find_statements(file)
            yield check_file(file, [signed for source in sources for signed in read_once(source)])


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder but folders; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders.sort()
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def _check_statements(path: Path, trusted: Sequence[PublicKey]) -> Iterator[Finding]:
    """Yield whether each statement in a file is believed, and which of its files are missing."""
    for signed in read_statements(path, trusted):
        if signed.problem or signed.statement is None:
            _log.debug("%s: %s", path, signed.problem)
            yield Finding(path, False, signed.problem, signed)
            continue
        subjects = signed.statement.subjects
        message = f"{count_text(len(subjects), 'file')}, {signed.signature}"
        yield Finding(path, True, message, signed)
        for name in subjects:
            file = path.parent / name
            if not file.is_file():
                yield Finding(file, False, f"it is missing, but {path.name} names it", signed)
