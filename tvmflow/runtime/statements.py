"""Provenance statements: reading them, checking their signatures, and comparing files with them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Final, NamedTuple, TypeAlias

from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical
from tvmflow.core.documents import Unreadable, get_field, quote, read_file, read_json
from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.signing import SHORT_ID, InvalidEnvelope, PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX, Json
from tvmflow.runtime.bundles import open_file

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:tvmflow:build:v1"
"""The build type of a target's statement; docs/provenance.md describes parameters and dependencies."""
RELEASE_TYPE: Final = "urn:tvmflow:release:v1"
"""The build type of a statement about the folder of a release."""
MEASUREMENTS_TYPE: Final = "urn:tvmflow:measurements:v1"
"""The build type of a statement about measurements of a target's files, or of a release."""

VERIFICATION: Final = "verification"
KERNELS: Final = "kernels"

_DEFINITION: Final = ("predicate", "buildDefinition")
_BYPRODUCTS: Final = ("predicate", "runDetails", "byproducts")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_PROBLEM: Final = 300


class Statement(NamedTuple):
    """A statement that was read from a file.

    `subjects` maps each file that it describes, by name in the statement's folder, to its sha256. `names` maps each
    sha256 to the first file that has it. The rest of `body` is unchecked.
    """

    subjects: Mapping[str, str]
    names: Mapping[str, str]
    body: Mapping[str, Json]

    @property
    def about(self) -> str:
        """What the statement is about, in words: a recipe for a target, or a release with its version."""
        release = self._parameter("release")
        return f"{release} {self.version}" if release else f"{self.recipe} for {self.target}"

    @property
    def version(self) -> str:
        """The version of a release; empty for a target."""
        return self._parameter("version")

    @property
    def recipe(self) -> str:
        """The recipe; empty for a release."""
        return self._parameter("recipe")

    @property
    def target(self) -> str:
        """The target; empty for a release."""
        return self._parameter("target")

    @property
    def settings(self) -> Mapping[str, Json]:
        """The settings of each stage."""
        return get_field(self.body, *_DEFINITION, "externalParameters", "settings", of=dict)

    @property
    def text_digest(self) -> str:
        """The sha256 (hex) of the statement as canonical JSON, which is how tvmflow writes statements."""
        return hashlib.sha256(canonical(self.body)).hexdigest()

    @property
    def is_of_measurements(self) -> bool:
        """True if it has measurements of its subjects in place of their provenance."""
        return get_field(self.body, *_DEFINITION, "buildType", of=str) == MEASUREMENTS_TYPE

    @property
    def measured_files(self) -> list[str]:
        """The measured files of a release, in a statement about measurements."""
        names = get_field(self.body, *_DEFINITION, "externalParameters", "measured", of=list)
        return [name for name in names if isinstance(name, str)]

    def _parameter(self, name: str) -> str:
        return get_field(self.body, *_DEFINITION, "externalParameters", name, of=str)

    def dependencies(self, kind: str) -> list[Mapping[str, Json]]:
        """Return the dependencies of a kind: `source`, `tool`, `result` or `statement`."""
        entries = get_field(self.body, *_DEFINITION, "resolvedDependencies", of=list)
        return [
            entry for entry in entries if get_field(entry, "annotations", "kind", of=str) == kind
        ]

    def byproduct(self, name: str) -> Mapping[str, Json]:
        """Return the annotations of a by-product; empty when it is not there."""
        for entry in get_field(self.body, *_BYPRODUCTS, of=list):
            if get_field(entry, "name", of=str) == name:
                return get_field(entry, "annotations", of=dict)
        return {}

    @property
    def verdict(self) -> Mapping[str, Json]:
        """The verdict of `verify`; empty when it did not run."""
        return get_field(self.byproduct(VERIFICATION), "verdict", of=dict)

    @property
    def kernels(self) -> list[Mapping[str, Json]]:
        """The kernels, as `list_kernels` returns them."""
        entries = get_field(self.byproduct(KERNELS), "kernels", of=list)
        return [entry for entry in entries if isinstance(entry, dict)]


def parse_statement(text: bytes) -> Statement:
    """Parse a statement that tvmflow wrote; Unreadable, with the kind of the text, for any other text."""
    body = read_json(text)
    _require(body, (STATEMENT_TYPE,), "_type")
    _require(body, (PREDICATE_TYPE,), "predicateType")
    _require(body, (BUILD_TYPE, RELEASE_TYPE, MEASUREMENTS_TYPE), *_DEFINITION, "buildType")
    subjects: dict[str, str] = {}
    for entry in get_field(body, "subject", of=list):
        name = get_field(entry, "name", of=str)
        digest = get_field(entry, "digest", "sha256", of=str)
        if not _is_inside(name):
            raise Unreadable(f"it names a file that is not in its folder: {quote(name)}")
        if not _SHA256.fullmatch(digest):
            raise Unreadable(f"it gives no sha256 for {quote(name)}")
        if subjects.setdefault(name, digest) != digest:
            raise Unreadable(f"it gives two digests for {quote(name)}")
    if not subjects:
        raise Unreadable("it is about no file")
    # Reversed, so that the first of several names with one digest is inserted last and stays.
    names = {digest: name for name, digest in reversed(subjects.items())}
    return Statement(subjects, names, body)


def _require(body: Json, expected: tuple[str, ...], *path: str) -> None:
    actual = get_field(body, *path, of=str)
    if actual not in expected:
        raise Unreadable(f"its {path[-1]} is {quote(actual)} and not {' or '.join(expected)}")


def _is_inside(name: str) -> bool:
    """Return whether a name is a normalized relative path without `.` and `..`."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name
    is_normal = bool(name) and str(path) == name and not path.is_absolute()
    return is_plain and is_normal and not {".", ".."} & set(path.parts)


# ---------------------------------------------------------------- signed statements


class SignedStatement(NamedTuple):
    """A statement in a file with its signers, or with a `problem`: why it must not be believed.

    The statement is None if it cannot be read. `key_ids` are the unproven ids that the file names; `trusted` are the
    trusted keys whose signatures are valid.
    """

    path: Path
    statement: Statement | None
    key_ids: tuple[str, ...]
    trusted: tuple[PublicKey, ...]
    problem: str = ""

    @property
    def signature(self) -> str:
        """The signers, in words."""
        if self.trusted:
            keys = ", ".join(f"{key.name} ({key.id[:SHORT_ID]})" for key in self.trusted)
            return f"signed by {keys}"
        if self.key_ids:
            ids = ", ".join(quote(key_id)[1 : SHORT_ID + 1] for key_id in self.key_ids)
            return f"signed by {ids}: not checked, because no trusted keys are given"
        return "not signed"


NO_STATEMENT: Final = "no statement of provenance is beside it or in a folder above"


class Finding(NamedTuple):
    """The result of the check of a file: whether it agrees with a statement, the file `source`.

    `is_renamed` is True if the statement names a file of the same content at another path.
    """

    path: Path
    good: bool
    message: str
    source: SignedStatement | None = None
    is_renamed: bool = False


def read_statements(path: Path, trusted: Sequence[PublicKey]) -> list[SignedStatement]:
    """Return the statements in a file of envelopes, one per line."""
    try:
        lines = [line for line in read_file(path).splitlines() if line.strip()]
    except Unreadable as error:
        return [_unusable(path, str(error))]
    statements = [_read_statement(path, line, trusted) for line in lines]
    return statements or [_unusable(path, "it is empty")]


def _unusable(path: Path, reason: str) -> SignedStatement:
    # The reason may quote untrusted text, so it is cut.
    return SignedStatement(
        path=path, statement=None, key_ids=(), trusted=(), problem=reason[:_MAX_PROBLEM]
    )


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


def compare_file(path: Path, digest: str, statements: Sequence[SignedStatement]) -> Finding:
    """Compare a file, by its digest, with statements."""
    if not statements:
        return Finding(path, False, NO_STATEMENT)
    believed = sorted(
        (signed for signed in statements if not signed.problem),
        key=lambda signed: signed.statement is not None and signed.statement.is_of_measurements,
    )
    if not believed:
        first = statements[0]
        return Finding(path, False, f"{first.path.name} is not believed: {first.problem}", first)
    findings = [_compare(path, digest, signed) for signed in believed]
    # A contradiction by a statement that names the file by its path outweighs statements that agree.
    contradictions = [
        finding
        for finding, signed in zip(findings, believed, strict=True)
        if not finding.good
        and signed.statement
        and _relative_name(path, signed) in signed.statement.subjects
    ]
    good = sorted(
        (finding for finding in findings if finding.good), key=lambda finding: finding.is_renamed
    )
    with_source = [finding for finding in findings if finding.source is not None]
    return (contradictions or good or with_source or findings)[0]


def _compare(path: Path, digest: str, signed: SignedStatement) -> Finding:
    """Compare a file with one readable statement."""
    assert signed.statement is not None
    subjects = signed.statement.subjects
    known_as = signed.statement.names.get(digest, "")
    # A moved file may have kept only the last part of its path.
    relative = _relative_name(path, signed)
    name = next((candidate for candidate in (relative, path.name) if candidate in subjects), None)
    if name is not None and subjects[name] == digest:
        message = f"as delivered, {signed.signature}"
        return Finding(path, True, message, signed, is_renamed=name != relative)
    if name is not None and known_as:
        message = f"it is {quote(known_as)} under the name of {quote(name)}"
        return Finding(path, False, message, signed)
    if name is not None:
        message = (
            f"it is not the file that was delivered: its sha256 is {digest[:SHORT_ID]}…, "
            f"but {signed.path.name} has {subjects[name][:SHORT_ID]}…"
        )
        return Finding(path, False, message, signed)
    if known_as:
        message = f"delivered as {known_as}, {signed.signature}"
        return Finding(path, True, message, signed, is_renamed=True)
    return Finding(path, False, f"{signed.path.name} does not name it")


def _relative_name(path: Path, signed: SignedStatement) -> str:
    """Return the path of a file relative to the folder of a statement; empty if it is elsewhere."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    folder = Path(os.path.abspath(signed.path.parent))  # noqa: PTH100
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else ""


# ---------------------------------------------------------------- files that a trusted key signed for

TrustedKeys: TypeAlias = "str | Path | Sequence[str | Path]"
"""Files of public keys, or folders of them."""

_CHUNK: Final = 1 << 20


@contextlib.contextmanager
def open_trusted_file(
    path: str | Path, trusted_keys: TrustedKeys | None, max_bytes: int
) -> Iterator[IO[bytes]]:
    """Open a file up to a size limit; if `trusted_keys` is given, one of the keys must have signed for it.

    Raises:
        BundleError: when there is no such file, or none of the keys signed for it.
        EnvironmentProblem: when signatures cannot be checked on this machine.
        UsageError: when a file in `trusted_keys` holds no key.
    """
    with open_file(path, max_bytes) as stream:
        if trusted_keys is None:
            yield stream
            return
        trusted = _load_keys(trusted_keys)
        # a private copy is read, because the file could be changed after the check
        with tempfile.TemporaryFile() as copy:
            digest = hashlib.sha256()
            while copy.tell() <= max_bytes and (chunk := stream.read(_CHUNK)):
                digest.update(chunk)
                copy.write(chunk)
            _check_signed(Path(path), digest.hexdigest(), trusted)
            copy.seek(0)
            yield copy


def _load_keys(trusted_keys: TrustedKeys) -> list[signing.PublicKey]:
    paths = [trusted_keys] if isinstance(trusted_keys, str | os.PathLike) else trusted_keys
    try:
        return [key for path in paths for key in signing.load_public_keys(Path(path))]
    except ImportError as error:
        raise EnvironmentProblem(
            f"signatures cannot be checked: {error}", fix="pip install cryptography"
        ) from None


def _check_signed(path: Path, digest: str, trusted: Sequence[signing.PublicKey]) -> None:
    if not trusted:
        raise BundleError(
            f"{path} is not loaded: no key is trusted", fix="name the signer's .pub file"
        )
    signed = [entry for file in find_statements(path) for entry in read_statements(file, trusted)]
    finding = compare_file(path, digest, signed)
    if not finding.good:
        raise BundleError(
            f"{path} is not loaded, because no trusted key signed for it: {finding.message}",
            fix="keep the signed statement (.intoto.jsonl) beside it; `tvmflow sign` signs one",
        )
