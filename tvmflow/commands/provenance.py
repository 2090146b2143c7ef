"""`tvmflow inspect`, `verify`, `sign` and `keygen`: what delivered files were made from, and whether they still are that."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.commands.words import say
from tvmflow.errors import EXIT_OK, EXIT_VERIFY, EnvironmentProblem, UsageError
from tvmflow.values import Json

if TYPE_CHECKING:
    # every command line has these words, and few use them
    from tvmflow.provenance.checking import Finding
    from tvmflow.signing import PrivateKey, PublicKey

_SHORT: Final = 12

Function = Callable[[argparse.Namespace], int]


# ---------------------------------------------------------------- one function a command


def inspect(args: argparse.Namespace) -> int:
    """Show what delivered files are and what they were made from, without running them."""
    from tvmflow.provenance import inspecting
    from tvmflow.provenance.documents import Unreadable

    trusted, given = _trusted(args), _given(args)
    for path in [file for each in args.files for file in _delivered(each)]:
        try:
            about = inspecting.inspect(path, trusted, given)
        except inspecting.NotOurs as stranger:
            raise UsageError(
                str(stranger),
                fix="give a file that `tvmflow run` delivered, and its statement with --provenance",
            ) from None
        except Unreadable as damage:
            raise UsageError(f"{path}: {damage}", fix="copy or deliver it again") from None
        except OSError as error:
            raise _unreadable(path, error) from error
        say(*([json.dumps(about)] if args.json else inspecting.lines(about)))
    return EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Check that delivered files are what their statements say, and who says so; 3 when one is not."""
    from tvmflow.provenance import checking

    trusted, given = _trusted(args), _given(args)
    findings = [
        found
        for path in map(_existing, args.files)
        for found in checking.check(path, trusted, given)
    ]
    bad = sum(not each.good for each in findings)
    if args.json:
        say(json.dumps({"good": not bad, "files": [_finding_json(each) for each in findings]}))
    else:
        width = max(len(str(each.path)) for each in findings)
        say(*(_finding_line(each, width) for each in findings))
        say(f"{len(findings) - bad} of {len(findings)} are good")
    return EXIT_VERIFY if bad else EXIT_OK


def sign(args: argparse.Namespace) -> int:
    """Add a signature to the statements beside delivered files."""
    from tvmflow import signing
    from tvmflow.provenance import writing
    from tvmflow.provenance.documents import Unreadable

    key = _signing_key(args)
    for path in [file for each in args.files for file in _statements(each)]:
        try:
            writing.sign(path, key)
        except (Unreadable, signing.NotSigned) as damage:
            raise UsageError(
                f"{path} holds no statement that could be signed: {damage}",
                fix="run the recipe again; that writes it anew",
            ) from None
        say(f"{path}: signed by {key.public.id[:_SHORT]}")
    return EXIT_OK


def keygen(args: argparse.Namespace) -> int:
    """Make a key to sign with, and its public half beside it for those who are to trust it."""
    from tvmflow import signing

    public = signing.generate(args.file)
    say(
        f"{args.file}: the private key; nobody else is to have it",
        f"{public.name}: the public key, for those who check",
        f"id {public.id}",
        f"sign with it:  export {signing.KEY_VARIABLE}={args.file.absolute()}",
        f"trust it:      export {signing.TRUSTED_VARIABLE}={Path(public.name).absolute()}",
    )
    return EXIT_OK


# ---------------------------------------------------------------- words


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the four commands to the command line."""

    def command(function: Function) -> argparse.ArgumentParser:
        text = (function.__doc__ or "").strip()
        added = commands.add_parser(
            function.__name__, help=text, description=text, allow_abbrev=False
        )
        added.set_defaults(command=function)
        return added

    def about_files(added: argparse.ArgumentParser, what: str) -> None:
        added.add_argument("files", nargs="+", type=Path, metavar="FILE", help=what)

    def about_statements(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--trusted",
            action="append",
            default=[],
            type=Path,
            metavar="KEYS",
            help="believe only what one of these keys signed: a .pub file or a folder of them "
            "($TVMFLOW_TRUSTED_KEYS; may be repeated)",
        )
        added.add_argument(
            "--provenance",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help="statements (.intoto.jsonl) to go by, instead of those beside the files",
        )
        added.add_argument(
            "--json", action="store_true", help="the same as JSON, one object a line"
        )

    added = command(inspect)
    about_files(added, "a delivered file, or a folder of them")
    about_statements(added)
    added = command(verify)
    about_files(added, "a delivered file, or a folder of them")
    about_statements(added)
    added = command(sign)
    about_files(added, "a statement (.intoto.jsonl), or a folder in which there are any")
    added.add_argument(
        "--key", type=Path, metavar="FILE", help="the private key ($TVMFLOW_SIGNING_KEY)"
    )
    added = command(keygen)
    added.add_argument("file", type=Path, metavar="FILE", help="where the private key is to be")


def _trusted(args: argparse.Namespace) -> tuple[PublicKey, ...]:
    from tvmflow import signing

    if not args.trusted:
        return signing.trusted_keys()
    return tuple(key for place in args.trusted for key in signing.load_public(place))


def _signing_key(args: argparse.Namespace) -> PrivateKey:
    from tvmflow import signing

    key = signing.load_private(args.key) if args.key else signing.own_key()
    if key is None:
        raise UsageError(
            "there is no key to sign with",
            fix=f"name one with --key or ${signing.KEY_VARIABLE}; `tvmflow keygen FILE` makes one",
        )
    return key


def _given(args: argparse.Namespace) -> tuple[Path, ...]:
    return tuple(_existing(path) for path in args.provenance)


def _existing(path: Path) -> Path:
    if not path.exists() and not path.is_symlink():
        raise UsageError(f"there is no file {path}", fix="`tvmflow run RECIPE` delivers files")
    return path


def _delivered(path: Path) -> list[Path]:
    """The file itself, or the statements in a folder: those are about all that was delivered there."""
    return _statements(path) if _existing(path).is_dir() else [path]


def _statements(path: Path) -> list[Path]:
    from tvmflow.provenance.beside import STATEMENT_SUFFIX

    if not _existing(path).is_dir():
        return [path]
    found = sorted(path.rglob(f"*{STATEMENT_SUFFIX}"))
    if not found:
        raise UsageError(
            f"{path} holds no statement of provenance (*{STATEMENT_SUFFIX})",
            fix="name the folder of a target, such as dist/digits/host",
        )
    return found


def _unreadable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}")


# ---------------------------------------------------------------- lines


def _finding_line(finding: Finding, width: int) -> str:
    return f"{'ok ' if finding.good else 'BAD'}  {finding.path!s:<{width}}  {finding.words}"


def _finding_json(finding: Finding) -> Json:
    said = finding.said_by
    return {
        "path": str(finding.path),
        "good": finding.good,
        "words": finding.words,
        "statement": str(said.path) if said else None,
        "signed_by": list(said.named) if said else [],
        "trusted": [key.id for key in said.trusted] if said else [],
    }
