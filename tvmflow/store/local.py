"""The local store: finished results by key, blobs by digest, notes; plain files throughout.

    cas/ab/<sha256>        blobs: the contents of files, read-only, each named by its digest
    actions/ab/<key>       the action record of a finished stage (see `action_records`)
    last/<recipe>/<label>  the key that a recipe's stage had when it was last up to date
    pins/<name>            keys and digests that a lock file or a release needs (see `pins`)
    work/<key>/            a stage that runs, or was killed and will resume (see `disk`)
    spool/<remote>/<key>   a result that has yet to be uploaded to that remote cache
    runs/                  a lease for each active run (see `disk`)
    failures/<recipe>/<label>  how the last attempt of a stage failed
    history/<id>.json      what each run did (see `engine.run_records`)
    logs/ ledger/ locks/ downloads/ stats/ facts/ plans/ delivered/ tmp/ damaged/

The modification time of an action record is when its result was last used: exact during a run, otherwise to the day, so
that looking up a result writes nothing. A file in `cas` or `actions` is always complete: it is written to a temporary
file, flushed, and published by one rename. Locks are the operating system's, and end with their process. There is no
database whose state could need repair.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from typing import Literal, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.disk_errors import disk_errors, is_unwritable, make_folder
from tvmflow.core.errors import StoreError
from tvmflow.core.files import hash_file, protect, read_regular, sync
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Artifact, Json, StageKey, StoredFile
from tvmflow.store import disk
from tvmflow.store.disk import Claim, Notes, StoreFolder, is_damage

_SHOWN_SIGNATURES = 3
SHOWN_DIGITS = 12
"""How many digits of a key's id are shown to people."""


class Origin(NamedTuple):
    """Where a fetched result comes from: address, all received signatures, and verified signers.

    A signer is written `name (first digits of the key)`.
    """

    address: str
    signatures: tuple[Json, ...] = ()
    signers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The origin and the signers of the result, as one phrase."""
        if self.signers:
            return f"{self.address}, signed by {' and '.join(self.signers)}"
        if unverified := self._key_ids():
            return f"{self.address}, signed by key {' and '.join(unverified)} (not verified)"
        return f"{self.address}, not signed"

    @property
    def signature_lines(self) -> tuple[str, ...]:
        """A line for each key that signed: its first digits, and whether the signature was verified."""
        verified = " ".join(self.signers)
        return tuple(
            key_id if f"({key_id})" in verified else f"{key_id} (not verified)"
            for key_id in dict.fromkeys(self._key_ids())
        )

    def _key_ids(self) -> list[str]:
        # The ids come from another machine, so only hexadecimal digits are kept.
        ids = [str(signature.get("keyid")) for signature in self.signatures[:_SHOWN_SIGNATURES]]
        return [re.sub("[^0-9a-f]", "", key_id)[:SHOWN_DIGITS] for key_id in ids]


class ActionRecord(NamedTuple):
    """A finished stage.

    Facts are small values for people, and never part of a key. `preimage` is the pre-image of the key. `made` is a time
    in UTC (`2024-01-01T00:00:00Z`). A fetched result has an `origin` and no `stage_id`.
    """

    files: tuple[StoredFile, ...]
    facts: dict[str, Json]
    preimage: dict[str, Json]
    seconds: float
    made: str
    stage_id: str = ""
    origin: Origin | None = None


def encode(record: ActionRecord) -> bytes:
    """Return the content of a record's file."""
    value = record._asdict()
    value["for"], origin = value.pop("stage_id"), value.pop("origin")
    if origin is not None:
        value["origin"] = dict(zip(("place", "signatures", "signers"), origin, strict=True))
    body = json.dumps(value).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(
    key: str, content: bytes, preimage: dict[str, Json] | None = None
) -> ActionRecord | None:
    """Return the record in a key's file; None if it is damaged or another key's.

    If the key's pre-image is known, comparing it saves computing a digest.
    """
    checksum, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    try:
        value = json.loads(body)
        if value["preimage"] != preimage and digest_of(value["preimage"]) != key:
            return None
        origin = value.get("origin")
        if origin:
            parts = (tuple(origin.get(name) or ()) for name in ("signatures", "signers"))
            origin = Origin(origin["place"], *parts)
        return ActionRecord(
            files=tuple(StoredFile(*entry) for entry in value["files"]),
            facts=value["facts"],
            preimage=value["preimage"],
            seconds=value["seconds"],
            made=value["made"],
            stage_id=value.get("for", ""),
            origin=origin,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class DamagedBlob(Exception):
    """A blob is missing, or was set aside because its digest is not its name: its stage must run again."""

    def __init__(self, digest: str, path: str) -> None:
        super().__init__(f"{path} does not have the digest {digest[:12]}…")
        self.digest = digest


class BlobStore:
    """The blobs of a store: `cas/ab/<sha256>`."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._verified: set[str] = set()

    def path(self, digest: str) -> str:
        """Return the path of a blob, whether it exists or not."""
        return f"{self._folder.root}/cas/{digest[:2]}/{digest}"

    def verified_path(self, digest: str) -> str:
        """Return a verified blob's path; DamagedBlob if it is missing, or damaged and set aside."""
        path = self.path(digest)
        if digest not in self._verified:
            try:
                actual = hash_file(path)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedBlob(digest, path) from None
            except OSError as error:
                if not is_damage(error, path):
                    raise
                actual = ""
            if actual != digest:
                self._folder.set_aside(path)
                raise DamagedBlob(digest, path)
            self._verified.add(digest)
        return path

    def is_present(self, file: StoredFile) -> bool:
        """Return whether a file's blob exists with the right size; set aside a blob of another size."""
        path = self.path(file.digest)
        try:
            status = os.stat(path)
            if status.st_size == file.size and stat.S_ISREG(status.st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            # A dangling link would keep the next run from writing the file.
            if not os.path.islink(path):
                return False
        except OSError as error:
            if not is_damage(error, path):
                raise
        self._folder.set_aside(path)
        return False

    def add(self, path: str) -> str:
        """Move a file into the store and return its digest."""
        with disk_errors(self._folder.root):
            return self.add_file("", path).digest

    def add_file(self, name: str, path: str) -> StoredFile:
        """Move a file of an artifact into the store, under its digest."""
        sync(path)
        digest, size = hash_file(path), os.stat(path).st_size
        target = self.path(digest)
        self._folder.make_way(target)
        with disk.use_lock(self._folder.root):
            # This also sets the change time, which marks the blob as used.
            protect(path)
            # Replacing an equal file is harmless, and repairs undetected damage.
            os.replace(path, target)
        sync(os.path.dirname(target))
        return StoredFile(name, digest, size)

    def mark_used(self, digest: str) -> bool:
        """Mark a blob as used before a result that refers to it is published; return whether this worked.

        If not, the blob is missing or cannot be marked, and its content must be added again.
        """
        with disk.use_lock(self._folder.root):
            try:
                os.utime(self.path(digest))
            except OSError:
                return False
        return True

    def temporary_path(self) -> str:
        """Return a path for a new file on the store's disk; if it is left there, the next run removes it."""
        with disk_errors(self._folder.root):
            return self._folder.temporary_path()


FORMAT = "tvmflow store 1\n"
_CACHE_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This folder holds results that tvmflow can make again.\n"
)
# Makes git ignore the store, as pytest and mypy do for their caches.
_GIT_IGNORE = "# Made by tvmflow.\n*\n"
_DAY_NS = 86_400 * 10**9
FOLDERS = (
    *("cas", "actions", "last", "pins", "work", "spool", "runs", "logs", "ledger", "locks"),
    *("downloads", "stats", "facts", "plans", "delivered", "locked", "tmp", "damaged"),
    *("history", "failures", "recipes"),
)
"""A store's folders, each created when first needed."""
# Names that only a store contains; and a set that is sufficient evidence of a store.
_RECOGNIZED = frozenset({"cas", "actions", "ledger", "CACHEDIR.TAG"})
_CERTAIN = frozenset({"cas", "actions", "CACHEDIR.TAG"})
FILES = frozenset({"README.md", ".gitignore", "CACHEDIR.TAG", "run.lock", "use.lock", "format"})
"""The files in a store's own folder."""
_OWN_NAMES = frozenset({*FOLDERS, *FILES})
_ANY_FORMAT = r"tvmflow store [0-9]+\n?"
# What a folder may contain before it becomes a store.
_ALLOWED_BEFORE = frozenset({*FILES - {"format"}, "tmp"})


class LocalStore:
    """A store in a folder: results by key, blobs by digest, and `notes` for later runs.

    Several runs may use it at once, and be killed at any moment.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.ledger = f"{root}/ledger"
        self.locks = f"{root}/locks"
        self.downloads = f"{root}/downloads"
        self._folder = StoreFolder(root)
        self._lease = disk.SharedLease(self._folder)
        self.notes = Notes(self._folder)
        self.blobs = BlobStore(self._folder)

        self.moved = self._folder.moved

    @property
    def damage(self) -> list[str]:
        """The paths of damaged files that were set aside through this object."""
        return [path for path, _ in self.moved]

    def check(self) -> Literal["good", "damaged", "absent"]:
        """Return the folder's condition; StoreError for foreign files, or for another version's store."""
        condition = self.condition()
        if os.path.islink(self.root) and not os.path.exists(self.root):
            text = f"{shortest_path(self.root)} is a link to {os.readlink(self.root)}, which does not exist"
            fix = "make that folder, or mount its disk; or choose another store with --store DIR"
            raise StoreError(text, fix=fix)
        names = os.listdir(self.root) if os.path.lexists(self.root) else ()
        others = sorted(set(names) - _ALLOWED_BEFORE)
        if condition == "absent" and others:
            text = f"{shortest_path(self.root)} is not a tvmflow store: it contains {others[0]!r}"
            raise StoreError(text, fix="choose an empty or a new folder with --store DIR")
        return condition

    def create(self) -> None:
        """Make the folder a store unless it is one."""
        with disk_errors(self.root):
            self._create(self.check())

    def create_if_writable(self) -> None:
        """Create the store as `create` does; a read-only store is left unchanged."""
        with disk_errors(self.root):
            condition = self.check()
        try:
            with disk_errors(self.root):
                self._create(condition)
        except StoreError as error:
            if not is_unwritable(error):
                raise

    def _create(self, condition: Literal["good", "damaged", "absent"]) -> None:
        if condition != "absent":
            self._repair_layout(condition)
            return
        make_folder(self.root, fix="choose another folder with --store DIR")
        if not os.path.lexists(f"{self.root}/.gitignore"):
            self.notes.write(_GIT_IGNORE, ".gitignore")
        self.notes.write(_CACHE_TAG, "CACHEDIR.TAG")
        self.notes.write(FORMAT, "format")

    def condition(self) -> Literal["good", "damaged", "absent"]:
        """Return whether the folder is a store; it is `damaged` if its format file is.

        Raises StoreError for a store of another version.
        """
        path, content = f"{self.root}/format", ""
        try:
            content = read_regular(path).decode("ascii", "replace")
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if not is_damage(error, path):
                raise
        if content == FORMAT:
            return "good"
        if re.fullmatch(_ANY_FORMAT, content):
            raise StoreError(
                f"{shortest_path(self.root)} was written by another version of tvmflow ({content.strip()})",
                fix="choose another store with --store DIR, or remove this one "
                "(keep its folder `ledger`: it holds the measured trials)",
            )
        # The remains of a store are recognized, because trials took hours. Another folder must not be recognized.
        names = set(os.listdir(self.root)) if os.path.isdir(self.root) else set()
        is_store = names >= _CERTAIN or (bool(names & _RECOGNIZED) and names <= _OWN_NAMES)
        return "damaged" if is_store else "absent"

    def _repair_layout(self, condition: str) -> None:
        """Restore the folders, locks and format file of the store; set aside what replaced them."""
        for name in FOLDERS:
            if os.path.lexists(f"{self.root}/{name}"):
                self._folder.make_folder(f"{self.root}/{name}")
        for name in ("run.lock", "use.lock"):
            os.close(self._folder.open_lock(f"{self.root}/{name}"))
        if condition == "damaged":
            if os.path.lexists(f"{self.root}/format"):
                self._folder.set_aside(f"{self.root}/format")
            self.notes.write(_CACHE_TAG, "CACHEDIR.TAG")
            self.notes.write(FORMAT, "format")

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file of the store completely or not at all; set aside anything else at its path."""
        with disk_errors(self.root):
            self._folder.write(content, path, flush=False)

    def make_way(self, path: str) -> None:
        """Create the folder of a file in the store; set aside anything else at its path."""
        with disk_errors(self.root):
            self._folder.make_way(path)

    def set_aside(self, path: str) -> str:
        """Move something damaged to `damaged/`; return its new path."""
        return self._folder.set_aside(path)

    def find(self, key: str, preimage: dict[str, Json] | None = None) -> Artifact | None:
        """Return the finished result with this key; None if the store lacks it or one of its files.

        A result found during a run (see `running`) stays until the run ends. Passing the pre-image is faster.
        """
        with contextlib.ExitStack() as stack:
            if self._lease.began_ns is not None:
                stack.enter_context(disk.use_lock(self.root))
            record = self.record(key, preimage, mark_used=True)
            if record is None or not all(map(self.blobs.is_present, record.files)):
                return None
            return Artifact(key, record.files, record.facts)

    def preimage(self, key: str) -> dict[str, Json] | None:
        """Return the pre-image of a finished result's key; None if the store lacks the result."""
        record = self.record(key)
        return record and record.preimage

    def keys(self) -> list[str]:
        """Return the keys of all finished results."""
        names = self.notes.list
        return [key for prefix in names("actions") for key in names("actions", prefix)]

    def action_path(self, key: str) -> str:
        """Return the path of the action record with this key, whether it exists or not."""
        return f"{self.root}/actions/{key[:2]}/{key}"

    def record(
        self, key: str, preimage: dict[str, Json] | None = None, *, mark_used: bool = False
    ) -> ActionRecord | None:
        """Return the action record of a finished result; None when there is none."""
        path = self.action_path(key)
        content = self._folder.read(path)
        if content is None:
            return None
        if mark_used:
            with contextlib.suppress(FileNotFoundError):
                self._mark_used(path, os.stat(path).st_mtime_ns)
        record = decode(key, content, preimage)
        if record is None:
            # A record that is damaged, or copied from another key: using it would be a wrong hit.
            self._folder.set_aside(path)
        return record

    def _mark_used(self, path: str, last_used_ns: int) -> None:
        began_ns, now_ns = self._lease.began_ns, time.time_ns()
        is_ahead = last_used_ns > now_ns + _DAY_NS
        if is_ahead or last_used_ns < (now_ns - _DAY_NS if began_ns is None else began_ns):
            # Another user's file in a shared store, or a disk that cannot be written.
            with contextlib.suppress(OSError):
                os.utime(path)
                self._lease.follow_clock(os.stat(path).st_mtime_ns)

    def running(self) -> contextlib.AbstractContextManager[int]:
        """Mark a run as active while the block runs; yields when it began (ns): later uses count as its own.

        Results are written only inside the block: nobody can clean the store meanwhile, and results found or made stay
        until its end. The first of several runs sweeps what killed processes left. Runs of one object share a lease.
        """
        return self._lease.hold()

    def claim(self, key: str) -> contextlib.AbstractContextManager[Claim]:
        """Wait until no other process works on a key, then hold its claim while the block runs."""
        return disk.claim(self._folder, key)

    def release(self, claim: Claim) -> None:
        """Remove the work folder of a claim after its result was stored."""
        disk.release(self._folder, claim)

    def publish(
        self,
        claim: Claim,
        key: StageKey,
        facts: dict[str, Json],
        seconds: float,
        stage_id: str = "",
    ) -> Artifact:
        """Move a claim's output files into the store, publish the result, and release the claim."""
        self._lease.follow_clock(time.time_ns())
        with disk_errors(self.root):
            files = tuple(self.blobs.add_file(name, path) for name, path in sorted(claim.files()))
            made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            record = ActionRecord(files, facts, key.preimage, seconds, made=made, stage_id=stage_id)
            self.adopt(key.digest, record)
            self.release(claim)
        return Artifact(key.digest, files, facts)

    def adopt(self, key: str, record: ActionRecord) -> None:
        """Publish a result from another store, after its blobs were added."""
        content = encode(record)
        with disk_errors(self.root), disk.use_lock(self.root):
            self._folder.write(content, self.action_path(key), flush=True)

    def last_key(self, recipe: str, label: str) -> str | None:
        """Return the key that a recipe's stage had when it was last up to date; None if unknown."""
        return self.notes.read("last", recipe, label)

    def remember(self, recipe: str, label: str, key: str) -> None:
        """Record that a stage of a recipe is up to date with this key."""
        if self.last_key(recipe, label) != key:
            self.notes.write(key, "last", recipe, label)


# ---------------------------------------------------------------- failures
# How a stage's last attempt failed. A success removes the note.

_FOLDER = "failures"
_VERBS = {
    "blocked": "could not run",
    "crashed": "crashed",
    "failed": "failed",
    "rejected": "was rejected",
    "timeout": "took too long",
}
"""The outcomes that are noted, as parts of a sentence."""


class Failure(NamedTuple):
    """A stage's last attempt, which gave no result: an outcome in `_VERBS`, and the time since 1970.

    The key is empty if unknown; the log is empty if there is none.
    """

    outcome: str
    key: str
    time_s: float
    seconds: float
    message: str
    fix: str = ""
    log: str = ""

    @property
    def text(self) -> str:
        """The outcome as a part of a sentence: `its last attempt …`."""
        return f"its last attempt {_VERBS.get(self.outcome, self.outcome)}"


def remember_failure(store: LocalStore, stage_id: str, failure: Failure) -> None:
    """Note how the last attempt of the stage `RECIPE:LABEL` failed."""
    # Failing to write this note must not hide the stage's failure, which is reported anyway.
    with contextlib.suppress(OSError, StoreError):
        store.notes.write(json.dumps(failure._asdict()), _FOLDER, *_names(stage_id))


def forget_failure(store: LocalStore, stage_id: str) -> None:
    """Remove the note of an earlier failure, after a success."""
    with contextlib.suppress(OSError):
        store.notes.remove(_FOLDER, *_names(stage_id))


def find_failure(store: LocalStore, stage_id: str) -> Failure | None:
    """Return how a stage's last attempt failed; None if it succeeded or no failure is noted."""
    text = store.notes.read(_FOLDER, *_names(stage_id))
    # There may be no note, or one in the format of another version.
    with contextlib.suppress(ValueError):
        failure = from_json(Failure, json.loads(text or ""))
        return failure._replace(log=existing_log(failure.log))
    return None


def _names(stage_id: str) -> tuple[str, str]:
    recipe, _, label = stage_id.partition(":")
    return recipe, label


def existing_log(path: str) -> str:
    """Return a log's path; empty if the file does not exist or is empty."""
    with contextlib.suppress(OSError):
        return path if path and os.path.getsize(path) else ""
    return ""
