"""Files that recipes name by address: their digests, and their content in the downloads folder.

A request is sent only for what the store does not know: files are kept by digest, and a commit never changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.bill_of_materials import license_expression
from tvmflow.core.codec import from_json
from tvmflow.core.documents import Unreadable
from tvmflow.core.errors import DownloadError, RecipeError, merge_recipe_errors
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import InputFile
from tvmflow.store.addresses import (
    BUCKETS,
    HUB,
    OCI,
    HubFile,
    InvalidAddress,
    OciReference,
    check_address,
    parse_hub_file,
    parse_oci_reference,
    scheme_of,
    without_secrets,
)
from tvmflow.store.downloads import (
    HubEntry,
    HubError,
    OnProgress,
    Snapshot,
    download,
    endpoint,
    find_location,
    gated_error,
    list_files,
    read_snapshot,
)
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore
from tvmflow.store.oci import MANIFEST, Manifest, OciError, Repository, describe, parse_manifest
from tvmflow.store.remote.bucket import INSTALL

_log = logging.getLogger(__name__)

# The prefixes of notes about Hub commits and about OCI artifacts.
_NOTE: Final = "hub-"
_ARTIFACT_NOTE: Final = "oci-"
# Names that need no quotes in a YAML mapping in braces.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][\w./-]*")


def fetch_file(
    file: InputFile,
    store: LocalStore,
    *,
    on_progress: OnProgress | None = None,
    limit_s: float = math.inf,
) -> str:
    """Return the local path of a file from outside the store; a file with an address is downloaded first."""
    if not file.url:
        return file.path
    folder = Path(store.downloads)
    for path in list_files(folder, file.url, file.sha256):
        store.make_way(str(path))
    try:
        return str(
            download(file.url, file.sha256, folder, on_progress=on_progress, limit_s=limit_s)
        )
    except DownloadError as error:
        raise DownloadError(f"{file.where}: {error.message}", fix=error.fix) from error


class UnpinnedFiles(RecipeError):
    """Files at addresses that the recipe does not pin; the remedy contains their current digests."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self.files = tuple(files)
        problems = [
            f"{file.where}: {without_secrets(file.url)} needs its sha256, so that the model cannot change: "
            f"now it is {file.sha256}"
            for file in files
        ]
        super().__init__(problems, fix=f"write {pins_text(pins_of(files))} below `model`")


def pins_of(files: Iterable[InputFile]) -> dict[str, str | dict[str, str]]:
    """Return the fields below `model` that pin these files."""
    further = {}
    pins: dict[str, str | dict[str, str]] = {}
    for file in files:
        field, _, name = file.sha256_field.partition(".")
        if name:
            further[name] = file.sha256
            pins[field] = further
        else:
            pins[field] = file.sha256
    return pins


def pins_text(pins: Mapping[str, str | Mapping[str, str]]) -> str:
    """Return recipe fields as text to write, each in backquotes."""
    texts = []
    for field, value in pins.items():
        if not isinstance(value, str):
            names = [name if _PLAIN_NAME.fullmatch(name) else json.dumps(name) for name in value]
            items = (f"{n}: {digest}" for n, digest in zip(names, value.values(), strict=True))
            value = f"{{{', '.join(items)}}}"
        texts.append(f"`{field}: {value}`")
    return " and ".join(texts)


class SourceFiles:
    """The files that a recipe names by address."""

    def __init__(self, store: LocalStore, on_progress: OnProgress | None = None) -> None:
        self._store = store
        self._on_progress = on_progress
        self._digests = FileDigests(store)

    def resolve(self, file: InputFile) -> InputFile:
        """Return a file with the digest that the store keeps it by; a local file is unchanged."""
        if not file.url:
            return file
        try:
            check_address(file.url)
        except InvalidAddress as error:
            raise RecipeError(f"{file.where}: {error}") from None
        scheme = scheme_of(file.url)
        if scheme in (HUB, OCI):
            return self._resolve_on_hub(file) if scheme == HUB else self._resolve_in_registry(file)
        path = self._find_path(file.sha256)
        if scheme in BUCKETS and not path:
            _require_obstore(file)
        if not file.sha256:
            raise self._unpinned_error(file)
        return file._replace(path=path)

    def pin(self, address: str) -> str:
        """Pin an address: replace its branch or tag by the current commit or digest; else return it unchanged."""
        if scheme_of(address) == OCI:
            reference = parse_oci_reference(address)
            return address if reference.digest else _pinned(reference).address
        if scheme_of(address) != HUB:
            return address
        try:
            file = parse_hub_file(address)
            if file.is_pinned:
                return file.address
            commit = read_snapshot(file.repository, file.revision).commit
        except HubError as error:
            raise _hub_failure(error, address) from None
        return file._replace(revision=commit).address

    def resolve_all(self, files: Iterable[InputFile]) -> tuple[InputFile, ...]:
        """Return files, each resolved as by `resolve`."""
        resolved: list[InputFile] = []
        unpinned: list[InputFile] = []
        errors: list[RecipeError] = []
        for file in files:
            try:
                resolved.append(self.resolve(file))
            except UnpinnedFiles as error:
                unpinned += error.files
            except RecipeError as error:
                errors.append(error)
        if unpinned:
            errors.append(UnpinnedFiles(unpinned))
        if errors:
            raise errors[0] if len(errors) == 1 else merge_recipe_errors(errors)
        return tuple(resolved)

    def check_complete(self, named: Sequence[InputFile], unnamed: Sequence[InputFile]) -> None:
        """Check that a model has no file that its recipe does not name; its main file comes first in `named`."""
        if not unnamed:
            return
        pinned = [file for file in named[1:] if file.sha256_field.startswith("files.")]
        for file in unnamed:
            try:
                pinned.append(self.resolve(file))
            except UnpinnedFiles as error:
                pinned += error.files
        names = names_text([file.sha256_field.removeprefix("files.") for file in unnamed])
        raise RecipeError(
            f"{named[0].where}: {without_secrets(named[0].url)} has weights in further files, which the recipe does "
            f"not name: {names}",
            fix=f"write {pins_text(pins_of(pinned))} below `model`",
        )

    def fetch(self, file: InputFile) -> InputFile:
        """Return a resolved file with its local path, downloading it if necessary."""
        if file.path:
            return file
        path = fetch_file(file, self._store, on_progress=self._on_progress)
        return file._replace(path=path)

    def _find_path(self, sha256: str) -> str:
        path = f"{self._store.downloads}/{sha256}"
        try:
            return path if sha256 and self._digests.digest(path) == sha256 else ""
        except OSError:
            return ""

    def _unpinned_error(self, file: InputFile) -> RecipeError:
        text = f"{file.where}: {without_secrets(file.url)} needs its sha256, so that the model cannot change"
        try:
            path = self._download_unpinned(file)
        except DownloadError as error:
            return RecipeError(f"{text}; {error.message}", fix=error.fix)
        return UnpinnedFiles([file._replace(path=str(path), sha256=path.name)])

    def _download_unpinned(self, file: InputFile) -> Path:
        """Download a file whose digest is unknown; return its path, whose name is the digest."""
        return Path(
            fetch_file(file._replace(sha256=""), self._store, on_progress=self._on_progress)
        )

    def _resolve_on_hub(self, file: InputFile) -> InputFile:
        hub_file = parse_hub_file(file.url)
        try:
            if not hub_file.is_pinned:
                raise _revision_error(hub_file)
            file = file._replace(url=hub_file.address, path=self._find_path(file.sha256))
            return file if file.path else self._find_digest(file, hub_file)
        except HubError as error:
            raise _hub_failure(error, f"{file.where}: {hub_file.address}") from None

    def _find_digest(self, file: InputFile, hub_file: HubFile) -> InputFile:
        snapshot = self._snapshot(hub_file)
        entry = snapshot.find(hub_file)
        if file.sha256 and entry.sha256 not in ("", file.sha256):
            raise RecipeError(
                f"{file.sha256_where or file.where}: {hub_file.address} has the digest {entry.sha256}, "
                f"not {file.sha256}",
                fix="write its digest into the recipe if this is the right file, or leave it out: "
                "the commit pins it",
            )
        digest = file.sha256 or entry.sha256
        path = self._find_path(digest)
        credential = find_location(hub_file)[1]
        if snapshot.is_gated and not credential and not path:
            raise gated_error(hub_file, credential)
        if not digest:
            digest = self._digest_small_file(file, hub_file, snapshot)
            path = self._find_path(digest)
        return file._replace(sha256=digest, path=path)

    def _digest_small_file(self, file: InputFile, hub_file: HubFile, snapshot: Snapshot) -> str:
        """Return and note the sha256 of a file for which the Hub has only git's digest."""
        downloaded = self._download_unpinned(file)
        digest, content = downloaded.name, downloaded.read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        entry = snapshot.files[hub_file.path]
        if blob.hexdigest() != entry.blob:
            text = f"it has git's digest {blob.hexdigest()}, and the commit says {entry.blob}"
            raise HubError(
                text, fix="run again; if it stays so, the server of $HF_ENDPOINT is wrong"
            )
        files = {**snapshot.files, hub_file.path: HubEntry(digest, entry.blob)}
        note_snapshot(hub_file, snapshot._replace(files=files), self._store)
        return digest

    def _snapshot(self, file: HubFile) -> Snapshot:
        known = find_snapshot(file, self._store)
        if known is not None:
            return known
        _log.debug("%s@%s is looked up on %s", file.repository, file.revision, endpoint())
        snapshot = read_snapshot(file.repository, file.revision)
        note_snapshot(file, snapshot, self._store)
        if snapshot.license and not license_expression(snapshot.license):
            _log.warning(
                "%s: the license on the Hub, %s, is not an SPDX expression: bills of materials have it as a name, "
                "unless the recipe has `license:`",
                file.repository,
                quoted(snapshot.license),
            )
        return snapshot

    def _resolve_in_registry(self, file: InputFile) -> InputFile:
        """Return an artifact's file with the digest that the pinned manifest lists for it."""
        reference = parse_oci_reference(file.url)
        try:
            if not reference.digest:
                text = f"{file.where}: {file.url}: it names no digest, and a tag may be moved"
                raise RecipeError(text, fix=f"write {_pinned(reference).address}")
            layer = self._find_artifact(reference).select(reference.path)
        except OciError as error:
            raise DownloadError(f"{file.where}: {error.message}", fix=error.fix) from None
        except Unreadable as error:
            raise RecipeError(f"{file.where}: {reference.address}: {error}") from None
        if file.sha256 not in ("", layer.sha256):
            where = file.sha256_where or file.where
            text = f"{where}: {reference.address} has the digest {layer.sha256}, not {file.sha256}"
            raise RecipeError(
                text, fix="leave the digest out: the digest of the artifact pins the file"
            )
        path = self._find_path(layer.sha256)
        return file._replace(url=reference.address, sha256=layer.sha256, path=path)

    def _find_artifact(self, reference: OciReference) -> Manifest:
        note = f"{_ARTIFACT_NOTE}{reference.digest}"
        known = (self._store.notes.read("facts", note) or "").encode()
        if describe(known, MANIFEST).digest == reference.digest:
            return parse_manifest(known)
        found = Repository(reference).find_manifest(reference.digest)
        self._store.notes.write(found.content.decode(), "facts", note)
        return found


def _pinned(reference: OciReference) -> OciReference:
    manifest = Repository(reference).find_manifest(reference.tag or "latest")
    return reference._replace(tag="", digest=manifest.digest)


def note_snapshot(file: HubFile, snapshot: Snapshot, store: LocalStore) -> None:
    """Remember the repository at the file's commit, whose content never changes."""
    store.notes.write(json.dumps(snapshot), "facts", _note_name(file))


def find_snapshot(file: HubFile, store: LocalStore) -> Snapshot | None:
    """Return the repository at the file's commit if it was looked up before; otherwise None."""
    text = store.notes.read("facts", _note_name(file))
    return None if text is None else from_json(Snapshot, json.loads(text))


def copy_snapshots(store: LocalStore, other: LocalStore) -> None:
    """Copy notes about the Hub and registries to another store, which then needs no request."""
    for name in store.notes.list("facts"):
        is_known = name.startswith((_NOTE, _ARTIFACT_NOTE))
        text = store.notes.read("facts", name) if is_known else None
        if text is not None:
            other.notes.write(text, "facts", name)


def _note_name(file: HubFile) -> str:
    subject = f"{endpoint()}/{file.repository}@{file.revision}"
    return f"{_NOTE}{hashlib.sha256(subject.encode()).hexdigest()[:32]}"


def _hub_failure(error: HubError, subject: str) -> RecipeError | DownloadError:
    kind = RecipeError if error.is_mistake else DownloadError
    return kind(f"{subject}: {error}", fix=error.fix)


def _revision_error(file: HubFile) -> HubError:
    """Return the error for a revision that can change, with its current commit."""
    commit = read_snapshot(file.repository, file.revision).commit
    name = f"{quoted(file.revision)} is a branch or a tag, which may change"
    text = name if file.revision else "it names no commit"
    return HubError(text, fix=f"write {file._replace(revision=commit).address}", is_mistake=True)


def _require_obstore(file: InputFile) -> None:
    try:
        import obstore as _  # noqa: F401
    except ImportError as missing:
        text = f"{file.where}: {file.url} needs the package obstore ({missing})"
        raise DownloadError(text, fix=INSTALL) from missing
