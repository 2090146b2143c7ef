"""Options and help: `tvmflow provenance`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, JSON_LINES_HELP
from tvmflow.cli.options import Options, argument, flag, option, size

_DELIVERED: Final = "a delivered file, or a folder of delivered files"


class StatementOptions(Options):
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

    max_size: int | None = option(
        "SIZE",
        "read no bundle that is larger, and no archive that unpacks to more (8GiB)",
        type=size,
    )


class InspectOptions(Options):
    """Show what delivered files are and what they were made from.

    No file is run.

    Examples:
        tvmflow inspect dist/net/host/net.tvmflow
        # every package that it was made with
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
        # and accept only what one of these keys signed
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

    The public key for those who verify is beside the private one.

    Examples:
        # writes release.key and release.key.pub
        tvmflow keygen release.key
    """

    file: Path = argument("FILE", "the private key to create")
    verbosity: int


COMMANDS: Final = {
    "inspect": InspectOptions,
    "verify": VerifyOptions,
    "sign": SignOptions,
    "keygen": KeygenOptions,
}
