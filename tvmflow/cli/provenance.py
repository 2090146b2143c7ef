"""`tvmflow inspect`, `verify`, `sign` and `keygen`: the provenance of delivered files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, JSON_LINES_HELP
from tvmflow.cli.options import argument, flag, option, size
from tvmflow.cli.output import print_json, print_lines, print_result
from tvmflow.core import signing
from tvmflow.core.documents import Unreadable
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, EnvironmentProblem, UsageError
from tvmflow.core.types import STATEMENT_SUFFIX, Json
from tvmflow.provenance import inspect as inspection
from tvmflow.provenance import write
from tvmflow.provenance.check import check_delivered
from tvmflow.provenance.inspection_text import format_inspection
from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES
from tvmflow.runtime.statements import Finding

_SHORT_ID: Final = 12
_DELIVERED: Final = "a delivered file, or a folder of delivered files"


@dataclass(frozen=True, kw_only=True)
class StatementOptions:
    """The statements and keys that delivered files are compared with."""

    trusted: tuple[Path, ...] = option(
        "KEYS",
        "accept only what one of these keys signed: a .pub file or a folder of them "
        "($TVMFLOW_TRUSTED_KEYS; may be repeated)",
        default=(),
    )
    provenance: tuple[Path, ...] = option(
        "FILE",
        "use these statements (.intoto.jsonl) instead of those beside the files",
        default=(),
    )

    max_size: int = option(
        "SIZE",
        "read no bundle that is larger, and no archive that unpacks to more (8GiB)",
        default=DEFAULT_MAX_BYTES,
        type=size,
    )

    def trusted_keys(self) -> tuple[signing.PublicKey, ...]:
        """Return the keys of `--trusted`, else those that the environment names."""
        if not self.trusted:
            return signing.load_trusted_keys()
        return tuple(key for path in self.trusted for key in signing.load_public_keys(path))

    def statement_paths(self) -> tuple[Path, ...]:
        """Return the files of `--provenance`, which take the place of those beside the delivered files."""
        return tuple(_existing(path) for path in self.provenance)


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `tvmflow inspect`."""

    files: tuple[Path, ...] = argument("FILE", _DELIVERED, "+")
    statements: StatementOptions
    json: bool = flag(JSON_LINES_HELP)


def inspect(options: InspectOptions) -> int:
    """Show what delivered files are and what they were made from, without running them."""
    keys, statements = options.statements.trusted_keys(), options.statements.statement_paths()
    for path in [path for file in options.files for path in _find_delivered(file)]:
        try:
            about = inspection.inspect_file(path, keys, statements, options.statements.max_size)
        except inspection.UnknownFile as error:
            raise UsageError(
                str(error),
                fix="give a file that `tvmflow run` delivered, and its statement with --provenance",
            ) from None
        except Unreadable as error:
            raise UsageError(f"{path}: {error}", fix="copy or deliver it again") from None
        except OSError as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}") from error
        if options.json:
            print_json(about)
        else:
            print_lines(*format_inspection(about))
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `tvmflow verify`."""

    files: tuple[Path, ...] = argument("FILE", _DELIVERED, "+")
    statements: StatementOptions
    json: bool = flag(JSON_HELP)


def verify(options: VerifyOptions) -> int:
    """Check delivered files against their statements and signatures; exit code 3 when one differs."""
    keys, statements = options.statements.trusted_keys(), options.statements.statement_paths()
    findings = [
        finding
        for path in map(_existing, options.files)
        for finding in check_delivered(path, keys, statements, options.statements.max_size)
    ]
    bad = sum(not finding.good for finding in findings)
    value = {"good": not bad, "files": [_finding_to_json(finding) for finding in findings]}
    print_result(value, _format_findings(findings), as_json=options.json)
    return EXIT_VERIFY if bad else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class SignOptions:
    """The options of `tvmflow sign`."""

    files: tuple[Path, ...] = argument(
        "FILE", "a statement (.intoto.jsonl), or a folder with statements", "+"
    )
    key: Path | None = option("FILE", "the private key ($TVMFLOW_SIGNING_KEY)")


def sign(options: SignOptions) -> int:
    """Add a signature to the statements beside delivered files."""
    key = _load_signing_key(options.key)
    for path in [path for file in options.files for path in _find_statements(file)]:
        try:
            write.sign_statements(path, key)
        except (Unreadable, signing.InvalidEnvelope) as error:
            raise UsageError(
                f"{path} holds no statement that can be signed: {error}",
                fix="run the recipe again to write a new statement",
            ) from None
        print_lines(f"{path}: signed by {key.public.id[:_SHORT_ID]}")
    return EXIT_OK


@dataclass(frozen=True, kw_only=True)
class KeygenOptions:
    """The options of `tvmflow keygen`."""

    file: Path = argument("FILE", "the private key to create")


def keygen(options: KeygenOptions) -> int:
    """Create a key pair: a private key to sign with, and beside it the public key for those who verify."""
    public = signing.generate_key(options.file)
    print_lines(
        f"{options.file}: the private key; keep it secret",
        f"{public.name}: the public key, for those who verify",
        f"id {public.id}",
        f"sign with it:  export {signing.KEY_VARIABLE}={options.file.absolute()}",
        f"trust it:      export {signing.TRUSTED_VARIABLE}={Path(public.name).absolute()}",
    )
    return EXIT_OK


# ---------------------------------------------------------------- keys and files


def _load_signing_key(path: Path | None) -> signing.PrivateKey:
    key = signing.load_private_key(path) if path else signing.load_signing_key()
    if key is None:
        raise UsageError(
            "there is no key to sign with",
            fix=f"name one with --key or ${signing.KEY_VARIABLE}; `tvmflow keygen FILE` creates one",
        )
    return key


def _existing(path: Path) -> Path:
    if not path.exists() and not path.is_symlink():
        raise UsageError(f"there is no file {path}", fix="`tvmflow run RECIPE` delivers files")
    return path


def _find_delivered(path: Path) -> list[Path]:
    """Return the file itself, or the statements in a folder, which are about all files delivered there."""
    return _find_statements(path) if _existing(path).is_dir() else [path]


def _find_statements(path: Path) -> list[Path]:
    if not _existing(path).is_dir():
        return [path]
    statements = sorted(path.rglob(f"*{STATEMENT_SUFFIX}"))
    if not statements:
        raise UsageError(
            f"{path} holds no statement of provenance (*{STATEMENT_SUFFIX})",
            fix="name the folder of a target, such as dist/digits/host",
        )
    return statements


# ---------------------------------------------------------------- output


def _format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(str(finding.path)) for finding in findings)
    for finding in findings:
        mark = "ok " if finding.good else "BAD"
        yield f"{mark}  {finding.path!s:<{width}}  {finding.message}"
    yield f"{sum(finding.good for finding in findings)} of {len(findings)} are good"


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


COMMANDS: Final = {"inspect": inspect, "verify": verify, "sign": sign, "keygen": keygen}
