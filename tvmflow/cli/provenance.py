"""`tvmflow inspect`, `verify`, `sign`, `keygen`, `push` and `pull`: deliveries and their provenance."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import JSON_HELP, JSON_LINES_HELP, StoreOptions, with_disk_errors
from tvmflow.cli.options import Options, argument, flag, option, size
from tvmflow.cli.output import print_json, print_lines, print_notes, print_outcome
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, EnvironmentProblem, UsageError
from tvmflow.core.formatting import count_text, size_text
from tvmflow.core.types import STATEMENT_SUFFIX

if TYPE_CHECKING:
    from tvmflow.core import signing
    from tvmflow.core.types import Json
    from tvmflow.runtime.statements import Finding
    from tvmflow.store.addresses import OciReference

_TRUSTED_HELP: Final = (
    "accept only what one of these keys signed: a .pub file or a folder of them "
    "($TVMFLOW_TRUSTED_KEYS; may be repeated)"
)
_DELIVERED: Final = "a delivered file, or a folder of delivered files"


class StatementOptions(Options):
    """The statements and keys that delivered files are compared with."""

    trusted: tuple[Path, ...] = option("KEYS", _TRUSTED_HELP, default=())
    provenance: tuple[Path, ...] = option(
        "FILE", "use these statements (.intoto.jsonl) instead of those beside the files", default=()
    )

    max_size: int | None = option(
        "SIZE",
        "read no bundle that is larger, and no archive that unpacks to more (8GiB)",
        type=size,
    )


class InspectOptions(Options):
    """Show the kind and provenance of delivered files.

    No file is run.

    Examples:
        tvmflow inspect dist/net/host/net.tvmflow
        # also every package that it was built with
        tvmflow inspect dist/net/host/net.tvmflow --json
    """

    files: tuple[Path, ...] = argument("FILE", _DELIVERED, "+")
    statements: StatementOptions
    json: bool = flag(JSON_LINES_HELP)


class VerifyOptions(Options):
    """Check delivered files against statements and signatures.

    The exit code is 3 when a file is not as it was delivered.

    Examples:
        tvmflow verify dist/net/host
        # and accept only files signed with one of these keys
        tvmflow verify dist/net/host --trusted keys/
    """

    files: tuple[Path, ...] = argument("FILE", _DELIVERED, "+")
    statements: StatementOptions
    json: bool = flag(JSON_HELP)
    verbosity: int


class SignOptions(Options):
    """Add a signature to the statements beside delivered files.

    Examples:
        tvmflow sign dist/net/host --key release.key
    """

    files: tuple[Path, ...] = argument(
        "FILE", "a statement (.intoto.jsonl), or a folder with statements", "+"
    )
    key: Path | None = option("FILE", "the private key ($TVMFLOW_SIGNING_KEY)")
    verbosity: int


class KeygenOptions(Options):
    """Create a key pair: to sign with, and to verify with.

    The public key, for verification, is written beside the private key.

    Examples:
        # writes release.key and release.key.pub
        tvmflow keygen release.key
    """

    file: Path = argument("FILE", "the private key to create")
    verbosity: int


def _read_evidence(
    options: StatementOptions,
) -> tuple[tuple[signing.PublicKey, ...], tuple[Path, ...], int]:
    """Return the trusted keys, the statements and the size limit for checks of delivered files."""
    from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES

    keys, statements = _load_trusted_keys(options.trusted), map(_existing, options.provenance)
    max_bytes = DEFAULT_MAX_BYTES if options.max_size is None else options.max_size
    return keys, tuple(statements), max_bytes


def inspect(options: InspectOptions) -> int:
    from tvmflow.core.documents import Unreadable
    from tvmflow.provenance import UnknownFile, format_inspection, inspect_file

    evidence = _read_evidence(options.statements)
    for path in [path for file in options.files for path in _find_statements(file)]:
        try:
            about = inspect_file(path, *evidence)
        except UnknownFile as error:
            fix = "give a file that `tvmflow run` delivered, and its statement with --provenance"
            raise UsageError(str(error), fix=fix) from None
        except Unreadable as error:
            raise UsageError(f"{path}: {error}", fix="copy or deliver it again") from None
        except OSError as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}") from error
        if options.json:
            print_json(about)
        else:
            print_lines(*format_inspection(about))
    return EXIT_OK


def verify(options: VerifyOptions) -> int:
    from tvmflow.core.logs import explain_wait
    from tvmflow.provenance import check_delivered

    evidence, paths = _read_evidence(options.statements), map(_existing, options.files)
    with explain_wait("reading the delivered files: as long as your disk takes"):
        findings = [finding for path in paths for finding in check_delivered(path, *evidence)]
    bad = sum(not finding.good for finding in findings)
    value = {"good": not bad, "files": [_finding_to_json(finding) for finding in findings]}
    code = EXIT_VERIFY if bad else EXIT_OK
    return print_outcome(value, _format_findings(findings), code, options)


def sign(options: SignOptions) -> int:
    from tvmflow.core import signing
    from tvmflow.core.documents import Unreadable
    from tvmflow.provenance import sign_statements

    key = signing.load_private_key(options.key) if options.key else signing.load_signing_key()
    if key is None:
        fix = f"name one with --key or ${signing.KEY_VARIABLE}; `tvmflow keygen FILE` creates one"
        raise UsageError("there is no key to sign with", fix=fix)
    for path in [path for file in options.files for path in _find_statements(file)]:
        try:
            sign_statements(path, key)
        except (Unreadable, signing.InvalidEnvelope) as error:
            text = f"{path} holds no statement that can be signed: {error}"
            fix = "run the recipe again to write a new statement"
            raise UsageError(text, fix=fix) from None
        print_notes(options, f"{path}: signed by {key.public.id[: signing.SHORT_ID]}")
    return EXIT_OK


def keygen(options: KeygenOptions) -> int:
    from tvmflow.core import signing

    public = signing.generate_key(options.file)
    print_notes(
        options,
        f"{options.file}: the private key; keep it secret",
        f"{public.name}: the public key, for verification",
        f"id {public.id}",
        f"sign with it:  export {signing.KEY_VARIABLE}={options.file.absolute()}",
        f"trust it:      export {signing.TRUSTED_VARIABLE}={Path(public.name).absolute()}",
    )
    return EXIT_OK


def _load_trusted_keys(paths: Sequence[Path]) -> tuple[signing.PublicKey, ...]:
    from tvmflow.core import signing

    named = tuple(key for path in paths for key in signing.load_public_keys(path))
    return named if paths else signing.load_trusted_keys()


def _existing(path: Path) -> Path:
    from tvmflow.core import file_kinds as kinds

    if not path.exists() and not path.is_symlink():
        raise UsageError(f"there is no file {path}", fix="`tvmflow run RECIPE` delivers files")
    # A statement may be about any file except models, recipes and pipelines.
    delivered = (kinds.DELIVERED, kinds.BUNDLE, kinds.LOCK, kinds.TRIALS)
    kinds.check_kind(path, *delivered, kinds.ARRAYS, kinds.IMAGES, kinds.OTHER)
    return path


def _find_statements(path: Path) -> list[Path]:
    """Return the file itself, or the statements in a folder, which cover all files there."""
    if not _existing(path).is_dir():
        return [path]
    statements = sorted(path.rglob(f"*{STATEMENT_SUFFIX}"))
    if not statements:
        fix = "name the folder of a target, such as dist/digits/host"
        raise UsageError(f"{path} holds no statement of provenance (*{STATEMENT_SUFFIX})", fix=fix)
    return statements


def _format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(str(finding.path)) for finding in findings)
    signatures = {finding.source.signature for finding in findings if finding.source}
    # common facts of all files are shown once
    common = f", {signatures.pop()}" if len(signatures) == 1 and len(findings) > 1 else ""
    for finding in findings:
        mark = "ok " if finding.good else "BAD"
        message = finding.message.removesuffix(common) if finding.source else finding.message
        yield f"{mark}  {finding.path!s:<{width}}  {message}"
    yield f"{sum(finding.good for finding in findings)} of {len(findings)} are good{common}"


def _finding_to_json(finding: Finding) -> Json:
    statement = finding.source
    return {
        "path": str(finding.path),
        "good": finding.good,
        "message": finding.message,
        "statement": str(statement.path) if statement else None,
        "signed_by": list(statement.key_ids) if statement else [],
        "trusted": [key.id for key in statement.trusted] if statement else [],
    }


# ---------------------------------------------------------------- push and pull


class _RegistryOptions(StoreOptions):
    """The options of commands that use a registry."""

    plain_http: bool = flag(
        "reach the registry without encryption and credentials, as this machine always is "
        "($TVMFLOW_PLAIN_HTTP names hosts)"
    )


class PushOptions(_RegistryOptions):
    """Push a delivery or a release to an OCI registry.

    Files that the registry has are not sent again. Statements and bills of materials refer to the
    artifact. Credentials are those of `docker login`, or $TVMFLOW_TOKEN_<HOST>.

    Examples:
        tvmflow push oci://ghcr.io/ann/digits:1.2.0 releases/release-1.2.0
        # one target
        tvmflow push oci://localhost:5000/digits:host dist/digits/host
    """

    address: str = argument("ADDRESS", "oci://HOST/NAME:TAG")
    folder: Path = argument("FOLDER", "the folder of a release, or of delivered files")


class PullOptions(_RegistryOptions):
    """Fetch a delivery or a release from an OCI registry.

    The folder is complete or not created; an interrupted pull continues where it stopped. If there
    are trusted keys, the exit code is 3 for a file that none of them signed.

    Examples:
        tvmflow pull oci://ghcr.io/ann/digits:1.2.0
        # only files signed with one of these keys
        tvmflow pull oci://ghcr.io/ann/digits@sha256:2c26… --to models/digits --trusted keys/
    """

    address: str = argument("ADDRESS", "oci://HOST/NAME:TAG, or …@sha256:DIGEST")
    to: Path | None = option("DIR", "the folder to make (the last part of NAME)")
    trusted: tuple[Path, ...] = option("KEYS", _TRUSTED_HELP, default=())


@with_disk_errors
def push(options: PushOptions) -> int:
    from tvmflow.core.logs import explain_wait
    from tvmflow.release import push_artifact

    reference = _parse(options.address, is_plain=options.plain_http)
    if reference.digest or not reference.tag:
        fix = f"write {reference._replace(tag='TAG', digest='').address}"
        raise UsageError(f"{options.address}: an artifact is pushed to a tag", fix=fix)
    if not options.folder.is_dir():
        fix = "name the folder of a release or a target, such as dist/digits/host"
        raise UsageError(f"there is no folder {options.folder}", fix=fix)
    with explain_wait(f"sending files to {reference.host}: as long as your network takes"):
        pushed = push_artifact(options.folder, reference, options.store.open())
    files = f"{count_text(pushed.files, 'file')} ({size_text(pushed.size)})"
    sent = f"{count_text(pushed.sent_files, 'file')} sent ({size_text(pushed.sent)})"
    about = count_text(pushed.statements, "statement") if pushed.statements else "no statement"
    lines = [
        f"pushed {reference.address}: {files}, {sent if pushed.sent else 'nothing to send'}",
        f"  as     {pushed.address}",
        f"  about  {about} of provenance",
    ]
    value = {"event": "pushed", "tag": reference.tag, **pushed._asdict()}
    return print_outcome(value, lines, EXIT_OK, options)


@with_disk_errors
def pull(options: PullOptions) -> int:
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.release import pull_artifact

    reference = _parse(options.address, is_plain=options.plain_http)
    if not reference.version:
        reference = reference._replace(tag="latest")
    trusted = _load_trusted_keys(options.trusted)
    folder = options.to or Path(reference.name.rpartition("/")[2])
    progress = DownloadLine() if sys.stderr.isatty() else None
    pulled = pull_artifact(reference, folder, options.store.open(), trusted, progress)
    verb = "pulled" if pulled.is_new else "already there:"
    lines = [
        f"{verb} {folder}: {count_text(pulled.files, 'file')} ({size_text(pulled.size)})",
        f"  from     {pulled.address}",
        f"  checked  {pulled.signature or 'digests only: no trusted keys are given'}",
    ]
    value = {"event": "pulled", "folder": str(folder), **pulled._asdict()}
    return print_outcome(value, lines, EXIT_OK, options)


def _parse(address: str, *, is_plain: bool) -> OciReference:
    from tvmflow.store import addresses
    from tvmflow.store.oci import PLAIN_HTTP_VARIABLE

    try:
        if addresses.scheme_of(address) != addresses.OCI:
            raise addresses.InvalidAddress("an address in a registry begins with oci://")
        reference = addresses.parse_oci_reference(address)
    except addresses.InvalidAddress as error:
        raise UsageError(f"{addresses.without_secrets(address)}: {error}") from None
    if is_plain:
        others = os.environ.get(PLAIN_HTTP_VARIABLE, "")
        os.environ[PLAIN_HTTP_VARIABLE] = f"{others} {reference.host}"
    return reference


COMMANDS: Final = {
    "inspect": inspect,
    "verify": verify,
    "sign": sign,
    "keygen": keygen,
    "push": push,
    "pull": pull,
}
