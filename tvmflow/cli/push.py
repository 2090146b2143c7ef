"""`tvmflow push` and `pull`: deliveries and releases in OCI registries."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import StoreOptions, with_disk_errors
from tvmflow.cli.options import argument, flag, option
from tvmflow.cli.output import print_outcome
from tvmflow.cli.provenance import TRUSTED_HELP
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.formatting import count_text, size_text

if TYPE_CHECKING:
    from tvmflow.store.addresses import OciReference


class _RegistryOptions(StoreOptions):
    """The options of commands that use a registry."""

    plain_http: bool = flag(
        "reach the registry without encryption and credentials, as this machine always is "
        "($TVMFLOW_PLAIN_HTTP names hosts)"
    )


class PushOptions(_RegistryOptions):
    """Bring a delivery or a release to an OCI registry.

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

    The folder is complete or not made; an interrupted pull goes on where it was. With keys to trust,
    the exit code is 3 for what none of them signed.

    Examples:
        tvmflow pull oci://ghcr.io/ann/digits:1.2.0
        # what one of these keys signed, and never anything else
        tvmflow pull oci://ghcr.io/ann/digits@sha256:2c26… --to models/digits --trusted keys/
    """

    address: str = argument("ADDRESS", "oci://HOST/NAME:TAG, or …@sha256:DIGEST")
    to: Path | None = option("DIR", "the folder to make (the last part of NAME)")
    trusted: tuple[Path, ...] = option("KEYS", TRUSTED_HELP, default=())


@with_disk_errors
def push(options: PushOptions) -> int:
    from tvmflow.core.slow_steps import explain_wait
    from tvmflow.release.oci_artifacts import push as push_folder

    reference = _parse(options.address, is_plain=options.plain_http)
    if reference.digest or not reference.tag:
        fix = f"write {reference._replace(tag='TAG', digest='').address}"
        raise UsageError(f"{options.address}: an artifact is pushed to a tag", fix=fix)
    if not options.folder.is_dir():
        fix = "name the folder of a release or a target, such as dist/digits/host"
        raise UsageError(f"there is no folder {options.folder}", fix=fix)
    with explain_wait(f"sending files to {reference.host}: as long as your network takes"):
        pushed = push_folder(options.folder, reference, options.store.open())
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
    from tvmflow.core import signing
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.release.oci_artifacts import pull as pull_folder

    reference = _parse(options.address, is_plain=options.plain_http)
    if not reference.version:
        reference = reference._replace(tag="latest")
    named = tuple(key for path in options.trusted for key in signing.load_public_keys(path))
    trusted = named if options.trusted else signing.load_trusted_keys()
    folder = options.to or Path(reference.name.rpartition("/")[2])
    progress = DownloadLine() if sys.stderr.isatty() else None
    pulled = pull_folder(reference, folder, options.store.open(), trusted, progress)
    verb = "pulled" if pulled.is_new else "already there:"
    lines = [
        f"{verb} {folder}: {count_text(pulled.files, 'file')} ({size_text(pulled.size)})",
        f"  from     {pulled.address}",
        f"  checked  {pulled.signature or 'digests only: no trusted keys are given'}",
    ]
    value = {"event": "pulled", "folder": str(folder), **pulled._asdict()}
    return print_outcome(value, lines, EXIT_OK, options)


def _parse(address: str, *, is_plain: bool) -> OciReference:
    from tvmflow.store.addresses import (
        OCI,
        InvalidAddress,
        parse_oci_reference,
        scheme_of,
        without_secrets,
    )
    from tvmflow.store.oci import PLAIN_HTTP_VARIABLE

    try:
        if scheme_of(address) != OCI:
            raise InvalidAddress("an address in a registry begins with oci://")
        reference = parse_oci_reference(address)
    except InvalidAddress as error:
        raise UsageError(f"{without_secrets(address)}: {error}") from None
    if is_plain:
        others = os.environ.get(PLAIN_HTTP_VARIABLE, "")
        os.environ[PLAIN_HTTP_VARIABLE] = f"{others} {reference.host}"
    return reference


COMMANDS: Final = {"push": push, "pull": pull}
