"""The local store: finished results by key, file contents by digest, plain files throughout.

    cas/ab/<sha256>        file contents, read-only, each named by its digest
    actions/ab/<key>       a finished stage: digest line, then JSON (files, facts, pre-image)
    last/<recipe>/<label>  the key that a recipe's stage had when it last was up to date
    pins/<name>            keys and digests that a lock file or a release needs
    work/<key>/            a stage that is running or was killed; holds its claim and resumes
    spool/<remote>/<key>   a result that has yet to be sent there
    runs/                  a lease for each run that is under way (see `leases`)
    logs/ ledger/ locks/ downloads/ stats/ facts/ plans/ tmp/ damaged/

An action's modification time says when it was last used: to the run, while one is under
way, and to the day otherwise, so that looking writes nothing. What is under `cas` and `actions` is complete: it is written aside, flushed, and moved into
place by one rename. Locks are the operating system's and die with their process. Nothing
here needs a database, so nothing can leave one behind in a state that must be repaired.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator

from tvmflow.errors import StoreError
from tvmflow.stores import leases
from tvmflow.values import Artifact, Json, StageKey, StoredFile

FORMAT = "tvmflow store 1\n"
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This folder holds results that tvmflow can make again.\n"
)
_CHUNK = 1 << 20
_DAY_NS = 86_400 * 10**9
# How often a note is written again that a run beside us swept away half-written.
_TRIES = 5


# Something else stands where a file or a folder should be.
_IN_THE_WAY = (
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
)


class Damaged(Exception):
    """A stored file is not what its name says; it has been set aside and its stage must run again."""

    def __init__(self, digest: str, path: str) -> None:
        super().__init__(f"{path} does not have the digest {digest[:12]}…")
        self.digest = digest


@contextlib.contextmanager
def disk_errors(root: str) -> Iterator[None]:
    """Turn what a disk can do to us into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"no space left on the disk of {root}",
                fix="free some space, or give another place with --store DIR, and run again; "
                "everything finished so far is kept",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(
                f"{error.filename or root}: {error.strerror}",
                fix="make it writable for this user, or give another place with --store or --dist",
            ) from error
        if error.errno in _IN_THE_WAY:
            raise StoreError(
                f"{error.filename2 or error.filename or root}: {error.strerror}",
                fix="move away what stands there, or give another place with --store or --dist",
            ) from error
        raise


def hash_file(path: str) -> str:
    """sha256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Slot:
    """A claimed stage: `out` is empty, `work` is as the last attempt left it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.out = f"{folder}/out"
        self.work = f"{folder}/work"


class LocalStore:
    """A store in a folder. Safe for several runs at once and against a kill at any instant."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ledger = f"{root}/ledger"
        self.locks = f"{root}/locks"
        self.downloads = f"{root}/downloads"
        self.damage: list[str] = []
        self._verified: set[str] = set()
        # when the run began that this store is open for
        self._since: int | None = None
        self._entered = 0
        self._entering = threading.Lock()
        self._held = contextlib.ExitStack()

    # ------------------------------------------------------------ reading

    def find(self, key: str) -> Artifact | None:
        """The finished result with this key, if it is there with all its files.

        Found during a run (see `running`), it stays at least until that ends.
        """
        if self._since is None:
            return self._find(key)
        with leases.briefly(self.root):
            return self._find(key)

    def _find(self, key: str) -> Artifact | None:
        action = self._action(key, used=True)
        if action is None:
            return None
        files = tuple(StoredFile(*entry) for entry in action["files"])
        for file in files:
            try:
                if os.stat(self.blob(file.digest)).st_size == file.size:
                    continue
                self._set_aside(self.blob(file.digest))
            except FileNotFoundError:
                pass
            return None
        return Artifact(key, files, action["facts"])

    def preimage(self, key: str) -> dict[str, Json] | None:
        """What the key of a finished result was made from, if the store still knows."""
        action = self._action(key)
        return None if action is None else action["preimage"]

    def keys(self) -> list[str]:
        """The keys of all finished results."""
        return [key for two in self.notes("actions") for key in self.notes("actions", two)]

    def record(self, key: str) -> dict[str, Json] | None:
        """All that is kept of a finished result: files, facts, pre-image, seconds, when it was made.

        One that came from elsewhere has an `origin` too: the `place`, and the `signatures` it came with.
        """
        return self._action(key)

    def _action(self, key: str, *, used: bool = False) -> dict[str, Json] | None:
        path = self._action_path(key)
        try:
            with open(path, "rb") as stream:
                content = stream.read()
                if used:
                    self._note_use(path, os.fstat(stream.fileno()).st_mtime_ns)
        except FileNotFoundError:
            return None
        check, _, body = content.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != check:
            self._set_aside(path)
            return None
        action: dict[str, Json] = json.loads(body)
        return action

    def _note_use(self, path: str, last_ns: int) -> None:
        since = time.time_ns() - _DAY_NS if self._since is None else self._since
        if last_ns < since:
            # somebody else's file in a shared store, or one on a disk that cannot be written
            with contextlib.suppress(OSError):
                os.utime(path)

    def _action_path(self, key: str) -> str:
        return f"{self.root}/actions/{key[:2]}/{key}"

    def blob(self, digest: str) -> str:
        """Where the content with this digest is, or would be."""
        return f"{self.root}/cas/{digest[:2]}/{digest}"

    def checked_blob(self, digest: str) -> str:
        """The path of a content that was read and found right. Raises Damaged after setting a wrong one aside."""
        path = self.blob(digest)
        if digest not in self._verified:
            try:
                actual = hash_file(path)
            except FileNotFoundError:
                raise Damaged(digest, path) from None
            if actual != digest:
                self._set_aside(path)
                raise Damaged(digest, path)
            self._verified.add(digest)
        return path

    def _set_aside(self, path: str) -> None:
        """Move a damaged file out of the way, for whoever wants to look at it."""
        self.damage.append(path)
        with contextlib.suppress(OSError):
            os.makedirs(f"{self.root}/damaged", exist_ok=True)
            os.replace(path, f"{self.root}/damaged/{os.path.basename(path)}")

    def last_key(self, recipe: str, label: str) -> str | None:
        """The key that this stage of this recipe had when it was last up to date."""
        return self.read_note("last", recipe, label)

    def read_note(self, *path: str) -> str | None:
        """A small file that a run left for later ones; None when there is none."""
        try:
            with open(self._note_path(path), encoding="utf-8") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None

    def _note_path(self, path: tuple[str, ...]) -> str:
        return "/".join((self.root, *(part.replace("/", "+") for part in path)))

    # ------------------------------------------------------------ writing

    def create(self) -> None:
        """Make the folder a store, if it is none yet. Raises StoreError for a folder with other things in it."""
        with disk_errors(self.root):
            known = self.read_note("format")
            if known == FORMAT:
                return
            if known is not None:
                raise StoreError(
                    f"{self.root} was written by another version of tvmflow ({known.strip()})",
                    fix="give another store with --store DIR, or remove this one",
                )
            try:
                os.makedirs(self.root, exist_ok=True)
            except FileNotFoundError as error:
                raise StoreError(
                    f"{self.root} cannot be made: {error.strerror}",
                    fix="give another place with --store DIR",
                ) from error
            strangers = set(os.listdir(self.root)) - {
                "README.md",
                "CACHEDIR.TAG",
                "tmp",
                "run.lock",
                "use.lock",
            }
            if strangers:
                raise StoreError(
                    f"{self.root} is not a tvmflow store: it holds {sorted(strangers)[0]!r}",
                    fix="give an empty or a new folder with --store DIR",
                )
            self.write_note(_TAG, "CACHEDIR.TAG")
            self.write_note(FORMAT, "format")

    def notes(self, *path: str) -> list[str]:
        """The names of the small files in a folder of them."""
        try:
            return sorted(os.listdir(self._note_path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove_note(self, *path: str) -> None:
        """Take a small file away, whether it is there or not."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._note_path(path))

    def write_note(self, text: str, *path: str) -> None:
        """Leave a small file for later runs, whole or not at all."""
        target = self._note_path(path)
        with disk_errors(self.root):
            self._write_aside(text.encode(), target, flush=False)

    def remember(self, recipe: str, label: str, key: str) -> None:
        """This stage of this recipe is up to date with this key."""
        if self.last_key(recipe, label) != key:
            self.write_note(key, "last", recipe, label)

    def _temporary(self) -> str:
        os.makedirs(f"{self.root}/tmp", exist_ok=True)
        return f"{self.root}/tmp/{os.getpid()}-{time.monotonic_ns()}-{os.urandom(4).hex()}"

    def _write_aside(self, data: bytes, target: str, *, flush: bool) -> None:
        for left in reversed(range(_TRIES)):
            aside = self._temporary()
            try:
                with open(aside, "wb") as stream:
                    stream.write(data)
                    if flush:
                        stream.flush()
                        os.fsync(stream.fileno())
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(aside, target)
                break
            except FileNotFoundError:
                # a run that began beside us took it for what a kill left
                if not left:
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
                raise
        if flush:
            _sync(os.path.dirname(target))

    @contextlib.contextmanager
    def running(self) -> Iterator[int]:
        """While this is open, nobody can clean the store, and what is found or made in it stays.

        Whoever writes results into the store does so in here. The first of several runs
        sweeps what kills left. Gives the time from which on use counts as this run's (ns).
        Several at once of this object, one in another or in threads side by side, share what is
        held until the last of them ends.
        """
        with self._entering:
            if not self._entered:
                self._held, self._since = self._hold()
            self._entered += 1
            since = self._since or 0
        try:
            yield since
        finally:
            with self._entering:
                self._entered -= 1
                if not self._entered:
                    self._since = None
                    self._held.close()

    def _hold(self) -> tuple[contextlib.ExitStack, int]:
        """The lock and the lease of a run, and since when."""
        with contextlib.ExitStack() as held:
            with disk_errors(self.root):
                descriptor = os.open(f"{self.root}/run.lock", os.O_RDWR | os.O_CREAT, 0o644)
            held.callback(os.close, descriptor)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._sweep()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with disk_errors(self.root):
                since = held.enter_context(leases.held(self.root))
            return held.pop_all(), since

    def _sweep(self) -> None:
        for folder in (f"{self.root}/tmp", f"{self.root}/runs"):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                with contextlib.suppress(OSError):
                    path = f"{folder}/{name}"
                    if os.path.isdir(path):
                        _remove_tree(path)
                    else:
                        os.unlink(path)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this is open, no run uses the store. Raises StoreError when one does."""
        with disk_errors(self.root):
            descriptor = os.open(f"{self.root}/run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise StoreError(
                f"a run is using the store {self.root}", fix="wait for it to end, then try again"
            ) from None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[Slot]:
        """Wait until no other process works on this key, then hold it."""
        folder = f"{self.root}/work/{key}"
        with disk_errors(self.root):
            descriptor = self._lock_folder(folder)
            slot = Slot(folder)
            _remove_tree(slot.out)
            os.makedirs(slot.out)
            os.makedirs(slot.work, exist_ok=True)
        try:
            yield slot
        finally:
            os.close(descriptor)

    def _lock_folder(self, folder: str) -> int:
        """Lock `folder`, which whoever held it before may have removed while we waited."""
        while True:
            try:
                os.makedirs(folder, exist_ok=True)
                descriptor = os.open(f"{folder}/claim", os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue
            except FileExistsError:
                # the folder went away between the two looks that makedirs takes, or a file stands there
                with contextlib.suppress(FileNotFoundError):
                    if not stat.S_ISDIR(os.lstat(folder).st_mode):
                        raise
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(f"{folder}/claim").st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    def release(self, slot: Slot) -> None:
        """Give up a claimed slot: its result is in the store."""
        # moved away first: whoever waits for this key may fill a folder of the same name at once
        aside = self._temporary()
        with contextlib.suppress(FileNotFoundError):
            os.rename(slot.folder, aside)
        _remove_tree(aside)

    def publish(
        self,
        slot: Slot,
        key: StageKey,
        facts: dict[str, Json],
        seconds: float,
        made_for: str = "",
    ) -> Artifact:
        """Take the files in `slot.out` into the store and make the result visible in one step.

        `made_for` is the id of the stage that first needed it: for people, who may ask what it is.
        """
        with disk_errors(self.root):
            files = tuple(
                self._take_in(name, path) for name, path in sorted(_files_below(slot.out))
            )
            made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._make_known(
                key.digest,
                {
                    "files": files,
                    "facts": facts,
                    "preimage": key.preimage,
                    "seconds": seconds,
                    "made": made,
                    "for": made_for,
                },
            )
            self.release(slot)
        return Artifact(key.digest, files, facts)

    def adopt(self, key: str, record: dict[str, Json]) -> None:
        """Make a result of another store known here (see `record`); its contents have been taken in."""
        with disk_errors(self.root):
            self._make_known(key, record)

    def _make_known(self, key: str, record: dict[str, Json]) -> None:
        body = json.dumps(record).encode()
        content = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        with leases.briefly(self.root):
            self._write_aside(content, self._action_path(key), flush=True)

    def temporary(self) -> str:
        """A path for a new file on the disk of the store; who is killed with it leaves it to the next sweep."""
        with disk_errors(self.root):
            return self._temporary()

    def add_file(self, path: str) -> str:
        """Take one file in (it is moved); its digest."""
        with disk_errors(self.root):
            return self._take_in("", path).digest

    def _take_in(self, name: str, path: str) -> StoredFile:
        _sync(path)
        digest, size = hash_file(path), os.stat(path).st_size
        target = self.blob(digest)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with leases.briefly(self.root):
            # also says that the content is used from now on
            os.chmod(path, 0o444)
            # replacing an equal file is harmless, and mends one that was damaged unnoticed
            os.replace(path, target)
        _sync(os.path.dirname(target))
        return StoredFile(name, digest, size)

    def use_blob(self, digest: str) -> bool:
        """Whether this content is there to stay, at least until the run ends that asks.

        Whoever is about to publish a result that names content which is there already
        asks this first, and takes the content in again if the answer is no.
        """
        with leases.briefly(self.root):
            try:
                os.utime(self.blob(digest))
            except (FileNotFoundError, PermissionError):
                return False
        return True

    # ------------------------------------------------------------ keeping

    def pin(
        self, name: str, keys: Iterable[str], digests: Iterable[str] = (), *, file: str = ""
    ) -> list[str]:
        """Keep these results and contents until the pin is dropped; which of them are not there.

        `name` is a user's word for what needs them; another pin of that name is replaced.
        `file` is the lock file, if it is one's: its absence tells that the pin may go.
        """
        wanted = {"keys": sorted(set(keys)), "digests": sorted(set(digests)), "file": file}
        # first the note, then the uses: a collection that has not read the one sees the others
        self.write_note(json.dumps({"name": name, **wanted}), "pins", name)
        missing = []
        for key in wanted["keys"]:
            with leases.briefly(self.root):
                if self._find(key) is None:
                    missing.append(key)
                else:
                    with contextlib.suppress(OSError):
                        os.utime(self._action_path(key))
        for digest in wanted["digests"]:
            if not self.use_blob(digest) and not os.path.exists(self.blob(digest)):
                missing.append(digest)
        return missing


def _files_below(folder: str) -> Iterator[tuple[str, str]]:
    """`(name with slashes, path)` of every file below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = f"{parent}/{name}"
            yield os.path.relpath(path, folder), path


def _remove_tree(folder: str) -> None:
    # shutil costs the up-to-date path more than the whole of the store
    import shutil

    if os.path.isdir(folder):
        # our own files are read-only, which does not keep their folder from letting them go
        shutil.rmtree(folder, ignore_errors=True)
