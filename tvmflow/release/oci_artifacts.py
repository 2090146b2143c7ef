"""Deliveries and releases as artifacts in an OCI registry.

A folder is a ModelPack artifact with a layer for each file. Signed statements and bills of materials are OCI referrers,
so that a later signature does not change the artifact's digest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.canonical_json import canonical
from tvmflow.core.disk_errors import disk_errors, make_folder
from tvmflow.core.documents import get_field
from tvmflow.core.errors import DownloadError, UsageError, VerifyFailed
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import limit_lines, names_text, quoted
from tvmflow.core.named_files import find_invalid_name
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX
from tvmflow.provenance import BOM_SUFFIX, check_delivered
from tvmflow.runtime.statements import PAYLOAD_TYPE, SignedStatement, read_statements
from tvmflow.store.addresses import OciReference
from tvmflow.store.downloads import OnProgress, download
from tvmflow.store.local import LocalStore
from tvmflow.store.oci import (
    EMPTY,
    MANIFEST,
    Descriptor,
    Manifest,
    Repository,
    describe,
    make_manifest,
    title_annotations,
)

_MODEL: Final = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG: Final = "application/vnd.cncf.model.config.v1+json"
_LAYER: Final = "application/vnd.cncf.model.{}.v1.raw"
# Suffix of the files in a referrer -> media type.
_REFERRERS: Final = {STATEMENT_SUFFIX: PAYLOAD_TYPE, BOM_SUFFIX: "application/vnd.cyclonedx+json"}
# ModelPack's layer kind -> suffixes; all other files are weights.
_KINDS: Final = {
    "code": (".h", ".hpp", ".c", ".cpp", ".cmake", ".js", ".ts", ".py", ".java", "CMakeLists.txt"),
    "doc": (".md", ".html", ".svg"),
    "weight.config": (".json", ".yaml", ".toml", ".txt", "SHA256SUMS"),
}
_SIGNED_BY: Final = "vnd.tvmflow.signed-by"
_IMAGE: Final = "org.opencontainers.image"
_MAX_NOTED: Final = 5_000
_SHOWN_PROBLEMS: Final = 3


class Pushed(NamedTuple):
    """A pushed artifact: address with digest, and numbers of files and bytes."""

    address: str
    files: int
    size: int
    sent_files: int
    sent: int
    statements: int


class Pulled(NamedTuple):
    """A pulled artifact: address with digest; `is_new` is false if the folder had its files already."""

    address: str
    files: int
    size: int
    is_new: bool
    signature: str = ""


# ---------------------------------------------------------------- push


def push_artifact(folder: Path, reference: OciReference, store: LocalStore) -> Pushed:
    """Push the files of a folder that a registry lacks, and set the tag.

    Raises:
        UsageError: if registries would not accept the folder's content.
        VerifyFailed: if a file differs from its statement.
        OciError: if the registry refuses the artifact.
    """
    layers: list[Descriptor] = []
    referrers: dict[str, list[Descriptor]] = {}
    for name in _list_files(folder):
        kind = next((kind for kind, ends in _KINDS.items() if name.endswith(ends)), "weight")
        end = next((end for end in _REFERRERS if name.endswith(end)), "")
        media_type, path = _REFERRERS.get(end, _LAYER.format(kind)), folder / name
        file = Descriptor(
            media_type, f"sha256:{hash_file(path)}", path.stat().st_size, title_annotations(name)
        )
        (referrers.setdefault(media_type, []) if end else layers).append(file)
    statements = [folder / file.title for file in referrers.get(PAYLOAD_TYPE, ())]
    if statements:
        _check(folder, (), f"{folder} is not as it was delivered", f"`tvmflow verify {folder}`")
    signed = [entry for path in statements for entry in read_statements(path, ())]
    annotations = _annotate(folder, signed)
    config = canonical(
        {
            "descriptor": {"name": annotations[f"{_IMAGE}.title"]},
            "config": {"format": "tvmflow"},
            "modelfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    content = make_manifest(_MODEL, layers, annotations, describe(config, _CONFIG))
    subject = describe(content, MANIFEST)
    repository = Repository(reference)
    # Digest -> repository of this registry to which the file was pushed from here.
    note = f"oci-{reference.host}"
    known: dict[str, str] = json.loads(store.notes.read("facts", note) or "{}")
    sent: list[int] = []
    files = [*layers, *(file for attached in referrers.values() for file in attached)]
    try:
        for file in files:
            other = known.get(file.digest, reference.name)
            mount_from = other if other != reference.name else ""
            sent.append(repository.put_blob(file, folder / file.title, mount_from))
            known[file.digest] = reference.name
        repository.put_blob(describe(config, _CONFIG), config)
        repository.put_blob(EMPTY, b"{}")
        repository.put_manifest(content, subject.digest)
        keys = sorted({key for entry in signed for key in entry.key_ids})
        for media_type, attached in referrers.items():
            notes = {_SIGNED_BY: " ".join(keys)} if keys and media_type == PAYLOAD_TYPE else {}
            referrer = make_manifest(media_type, attached, notes, subject=subject)
            listed = describe(referrer, MANIFEST, notes)._replace(artifact_type=media_type)
            repository.put_referrer(subject.digest, referrer, listed)
        repository.put_manifest(content, reference.tag)
    finally:
        repository.close()
        store.notes.keep(json.dumps(dict(list(known.items())[-_MAX_NOTED:])), "facts", note)
    return Pushed(
        address=reference._replace(tag="", digest=subject.digest).address,
        files=len(files),
        size=sum(file.size for file in files),
        sent_files=sum(size > 0 for size in sent),
        sent=sum(sent),
        statements=len(statements),
    )


def _list_files(folder: Path) -> list[str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is not a regular file", fix="remove it")
    if (name := find_invalid_name(names)) is not None:
        text = f"{folder} has a file with a name that not all systems allow: {quoted(name)}"
        raise UsageError(text, fix="rename it")
    if not any(not name.endswith(tuple(_REFERRERS)) for name in names):
        raise UsageError(f"{folder} has no files", fix="name what `tvmflow run` delivered")
    return names


def _annotate(folder: Path, signed: Sequence[SignedStatement]) -> dict[str, str]:
    texts = {"title": folder.absolute().name}
    for statement in (entry.statement for entry in signed if entry.statement):
        for source in statement.dependencies("repository"):
            texts["revision"] = get_field(source, "digest", "gitCommit", of=str)
        if license_ := get_field(statement.settings, "export", "license", of=str):
            texts["licenses"] = license_
        if version := statement.version:
            texts["version"] = version
    return {f"{_IMAGE}.{name}": text for name, text in texts.items() if text}


# ---------------------------------------------------------------- pull


def pull_artifact(
    reference: OciReference,
    folder: Path,
    store: LocalStore,
    trusted: Sequence[PublicKey],
    on_progress: OnProgress | None = None,
) -> Pulled:
    """Pull an artifact's files and statements atomically into a new folder.

    The store keeps downloads, so that an interrupted pull can continue. A trusted key must have signed the statements;
    without trusted keys, no signature is checked.

    Raises:
        UsageError: if the folder has files of another kind.
        VerifyFailed: if no trusted key signed the files.
        DownloadError: if a file cannot be fetched, or differs from the manifest.
    """
    repository = Repository(reference)
    try:
        manifest = repository.find_manifest(reference.version)
        files = list(_list_layers(repository, manifest))
    finally:
        repository.close()
    if (name := find_invalid_name(file.title for file in files)) is not None:
        raise DownloadError(f"{reference.address}: it has a file with the name {quoted(name)}")
    pinned = reference._replace(tag="", digest=manifest.digest, path="")
    refused = f"{reference.address} is refused"
    fix = "ask its publisher, or trust the key that signed it if it is theirs"
    pulled = Pulled(
        address=pinned.address,
        files=len(files),
        size=sum(file.size for file in files),
        is_new=not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
    )
    if not pulled.is_new:
        _check_same(folder, files)
        signature = _check(folder, trusted, refused, fix) if trusted else ""
        return pulled._replace(signature=signature)
    make_folder(folder.absolute().parent)
    part = folder.absolute().parent / f".{folder.absolute().name}.{os.getpid()}.part"
    try:
        for file in files:
            url, kept = pinned._replace(path=file.title).address, Path(store.downloads)
            got = download(url, file.sha256, kept, on_progress=on_progress, max_bytes=file.size)
            if (size := got.stat().st_size) != file.size:
                raise DownloadError(f"{url} has {size} bytes, and its manifest says {file.size}")
            with disk_errors(str(folder), needed=file.size):
                (part / file.title).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(got, part / file.title)
        signature = _check(part, trusted, refused, fix) if trusted else ""
        with disk_errors(str(folder)):
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return pulled._replace(signature=signature)


def _list_layers(repository: Repository, manifest: Manifest) -> Iterator[Descriptor]:
    yield from manifest.layers
    listed = repository.list_referrers(manifest.digest)
    for kind in _REFERRERS.values():
        found = [entry for entry in reversed(listed) if entry.artifact_type == kind]
        if found:
            # The last of the referrers with the most signatures.
            best = max(found, key=lambda one: len(one.annotations.get(_SIGNED_BY, "").split()))
            attached = repository.find_manifest(best.digest)
            yield from attached.layers if attached.subject == manifest.digest else ()


def _check_same(folder: Path, files: Sequence[Descriptor]) -> None:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if names != {file.title for file in files} or any(
        hash_file(folder / file.title) != file.sha256 for file in files
    ):
        fix = "name another folder with --to, or remove it"
        raise UsageError(f"{folder} exists with other files", fix=fix)


def _check(folder: Path, trusted: Sequence[PublicKey], about: str, fix: str) -> str:
    """Check files and their paths against statements, and return the signers.

    Paths matter: signed content could be harmful elsewhere, for example as a module that Python imports.
    """
    findings = list(check_delivered(folder, trusted))
    bad = [
        finding._replace(message=f"its path is not in its statement: {finding.message}")
        if finding.good
        else finding
        for finding in findings
        if not finding.good or finding.is_renamed
    ]
    # An untrusted statement is the cause of the problems with all of its files.
    causes = [finding for finding in bad if finding.path.name.endswith(STATEMENT_SUFFIX)] or bad
    problems = [f"{finding.path.relative_to(folder)}: {finding.message}" for finding in causes]
    if problems:
        raise VerifyFailed(f"{about}: {'; '.join(limit_lines(problems, _SHOWN_PROBLEMS))}", fix=fix)
    signed = [finding.source for finding in findings if finding.source]
    # Statements do not name the folders of deliveries, which the publisher chose, so they are shown.
    folders = sorted({entry.path.parent.relative_to(folder).as_posix() for entry in signed} - {"."})
    where = f", in {names_text(folders)}" if folders else ""
    return ", ".join(sorted({entry.signature for entry in signed})) + where
