"""The folder of a store: its files, notes, leases of runs, and claims of results.

    run.lock      shared by all runs; exclusive for `clean`, and for the run that sweeps leftovers
    runs/<name>   the lease of a run, locked until it ends; its modification time is when the run began,
                  or an earlier time to which the clock was set back since
    use.lock      shared while a result is found, added or published; exclusive while one is removed

Times are those of the store's file system, so that they are comparable with its files' times.
`garbage_collection` explains why nothing that a run needs is removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator

from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import StoreError
from tvmflow.core.file_locks import Locked, lock, open_lock_file
from tvmflow.core.files import flush_file, read_regular, sync, temporary_name

# The errors of reading a folder, a pipe, a loop of links, or a bad sector.
_UNREADABLE = (errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.EIO)
# The maximum number of attempts to write a file whose temporary file other runs delete as a leftover.
_ATTEMPTS = 5


def is_damage(error: OSError, path: str) -> bool:
    """Return whether a read error means damage, rather than a failing system or another user's file."""
    if error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            return os.lstat(path).st_uid == os.geteuid()
    return error.errno in _UNREADABLE


def remove_tree(folder: str) -> None:
    """Remove a folder with everything in it, if it exists."""
    # Importing shutil takes longer than an up-to-date run spends in the store.
    import shutil

    if os.path.isdir(folder):
        # Stored files are read-only, but they can be removed because their folder is writable.
        shutil.rmtree(folder, ignore_errors=True)


class StoreFolder:
    """The folder of a store; `moved` lists each damaged file and where this object moved it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.moved: list[tuple[str, str]] = []

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None if it is missing, or damaged, in which case it is set aside."""
        try:
            return read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if not is_damage(error, path):
                raise
        self.set_aside(path)
        return None

    def make_folder(self, path: str) -> None:
        """Create a folder in the store; anything else at this path is set aside."""
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            names = os.path.relpath(path, self.root).split("/")
            parents = ["/".join((self.root, *names[: end + 1])) for end in range(len(names))]
            for parent in parents:
                if os.path.lexists(parent) and not os.path.isdir(parent):
                    self.set_aside(parent)
            os.makedirs(path, exist_ok=True)

    def make_way(self, path: str) -> None:
        """Create the folder of a file; set aside anything but a regular file at its path."""
        self.make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                self.set_aside(path)

    def open_lock(self, path: str) -> int:
        """Return a descriptor of a lock file in the store, which is created if missing."""
        # Check this only once: the lock's holder may remove the file at any time, which is not damage.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(os.lstat(path).st_mode) and not os.path.isfile(path):
                self.set_aside(path)
        try:
            return open_lock_file(path)
        except PermissionError:
            # Restoring the permissions keeps the file, and so does not release another process's lock.
            if os.lstat(path).st_uid != os.geteuid():
                raise
            with contextlib.suppress(OSError):
                os.chmod(path, 0o644)
        return open_lock_file(path)

    def temporary_path(self) -> str:
        """Return an unused path in `tmp/`, which is on the store's disk.

        Incomplete files stay out of `actions/` and `cas/` this way, and `tmp/` is swept as a whole.
        """
        self.make_folder(f"{self.root}/tmp")
        return f"{self.root}/tmp/{temporary_name()}"

    def write(self, data: bytes, target: str, *, flush: bool) -> None:
        """Write a file completely or not at all; with `flush`, it is on the disk on return."""
        for attempts_left in reversed(range(_ATTEMPTS)):
            temporary = self.temporary_path()
            try:
                with open(temporary, "wb") as stream:
                    stream.write(data)
                    if flush:
                        stream.flush()
                        flush_file(stream.fileno())
                self.make_way(target)
                os.replace(temporary, target)
                break
            except FileNotFoundError:
                # A run that began meanwhile took the file for a killed process's leftover.
                if not attempts_left:
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        if flush:
            sync(os.path.dirname(target))

    def set_aside(self, path: str) -> str:
        """Move something damaged to `damaged/`, where users can examine it; return its new path."""
        folder = f"{self.root}/damaged"
        moved = f"{folder}/{os.path.basename(path)}"
        with contextlib.suppress(OSError):
            if os.path.lexists(folder) and not os.path.isdir(folder):
                displaced = f"{self.root}/{temporary_name()}"
                os.replace(folder, displaced)
                os.makedirs(folder)
                os.replace(displaced, f"{folder}/damaged")
            os.makedirs(folder, exist_ok=True)
            if os.path.lexists(moved):
                moved = f"{moved}.{temporary_name()}"
            os.replace(path, moved)
        self.moved.append((path, moved))
        return moved

    def sweep(self) -> None:
        """Remove what killed processes left in `tmp/` and `runs/`. No run may use the store meanwhile."""
        for folder in (f"{self.root}/tmp", f"{self.root}/runs"):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                path = f"{folder}/{name}"
                remove_tree(path)
                # It is a folder, or another process has removed it.
                with contextlib.suppress(OSError):
                    os.unlink(path)


_HEADER = "tvmflow note "
_SEALED = frozenset({"delivered", "facts", "failures", "last", "pins", "spool", "stats"})


class DamagedNote(ValueError):
    """A note's file does not have the content that was written under its name."""


def seal(text: str, *names: str) -> str:
    """Return the content of a note's file, with a digest that covers the note's name."""
    return f"{_HEADER}{_digest(text, names)}\n{text}" if names[0] in _SEALED else text


def unseal(content: bytes, *names: str) -> str:
    """Return the text in a note's file; DamagedNote if it was not written under this name."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DamagedNote from error
    if names[0] not in _SEALED:
        return text
    header, _, body = text.partition("\n")
    if header != _HEADER + _digest(body, names):
        raise DamagedNote
    return body


def _digest(text: str, names: tuple[str, ...]) -> str:
    path = "/".join(name.replace("/", "+") for name in names)
    return hashlib.sha256(f"{path}\0{text}".encode()).hexdigest()


class Notes:
    """The notes of a store. A note has a path of one or more names; a `/` in a name becomes `+`."""

    def __init__(self, folder: StoreFolder, *prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix

    def below(self, *names: str) -> Notes:
        """Return the notes in a folder of notes."""
        return Notes(self._folder, *self._prefix, *names)

    def read(self, *names: str) -> str | None:
        """Return a note's text; None if there is none, or if it is damaged, in which case it is set aside."""
        content = self._folder.read(self.path(*names))
        if content is not None:
            try:
                return unseal(content, *self._prefix, *names)
            except DamagedNote:
                self._folder.set_aside(self.path(*names))
        return None

    def write(self, text: str, *names: str) -> None:
        """Write a note completely or not at all."""
        with disk_errors(self._folder.root):
            content = seal(text, *self._prefix, *names).encode()
            self._folder.write(content, self.path(*names), flush=False)

    def keep(self, text: str, *names: str) -> None:
        """Write a note that only saves time; does nothing if the store cannot be written."""
        with contextlib.suppress(StoreError):
            self.write(text, *names)

    def list(self, *names: str) -> list[str]:
        """Return the names of the notes in a folder of notes, sorted."""
        try:
            return sorted(os.listdir(self.path(*names)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, *names: str) -> None:
        """Remove a note if it exists."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path(*names))

    def path(self, *names: str) -> str:
        """Return the path of a note, whether it exists or not."""
        parts = (name.replace("/", "+") for name in (*self._prefix, *names))
        return "/".join((self._folder.root, *parts))


# ---------------------------------------------------------------- leases


@contextlib.contextmanager
def use_lock(root: str, *, exclusive: bool = False) -> Iterator[None]:
    """Hold `use.lock` for a moment, shared with other runs or exclusively."""
    # Each call opens the file itself, because threads sharing a descriptor would release each other's lock.
    descriptor = StoreFolder(root).open_lock(f"{root}/use.lock")
    try:
        lock(descriptor, shared=not exclusive)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_lease(root: str) -> Iterator[int]:
    """Hold a run's lease while the block runs; yields the descriptor of its file."""
    while True:
        os.makedirs(f"{root}/runs", exist_ok=True)
        path = f"{root}/runs/{temporary_name()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock(descriptor)
        # Another process may have removed the file as stale before it was locked.
        if is_current(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield descriptor
    finally:
        # Remove the lease before it is unlocked, so that nobody takes it for stale.
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def is_current(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def active_runs(root: str, *, remove_stale: bool = False) -> list[int]:
    """Return when each active run began (ns); `remove_stale` removes leases of killed processes first."""
    folder = f"{root}/runs"
    began = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        path = f"{folder}/{name}"
        # The lease may be gone by now. Anything but a file is not a lease, and the next run removes it.
        if not os.path.isfile(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR if remove_stale else os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            run_began = os.fstat(descriptor).st_mtime_ns
            lock(descriptor, wait=False)
            if remove_stale:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        except Locked:
            began.append(run_began)
        finally:
            os.close(descriptor)
    return began


def exclude_runs(root: str) -> contextlib.AbstractContextManager[None]:
    """Keep every run out of a store while the block runs."""
    return exclude_others(root, "run.lock", f"a run is using the store {root}")


@contextlib.contextmanager
def exclude_others(root: str, name: str, refusal: str) -> Iterator[None]:
    """Hold a lock file in a store; StoreError with the text `refusal` if another process holds it."""
    folder, path = StoreFolder(root), f"{root}/{name}"
    with contextlib.ExitStack() as stack:
        try:
            with disk_errors(root):
                folder.make_folder(os.path.dirname(path))
                descriptor = folder.open_lock(path)
                stack.callback(os.close, descriptor)
                lock(descriptor, wait=False)
        except Locked:
            raise StoreError(refusal, fix="wait for it to end, then try again") from None
        yield


class SharedLease:
    """The lease that all runs of this process on a store share; `began_ns` is None without a run."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._holders = 0
        self._mutex = threading.Lock()
        self._held = contextlib.ExitStack()
        self._descriptor = -1
        self.began_ns: int | None = None

    def follow_clock(self, now_ns: int) -> None:
        """Move the lease to an earlier time after the clock was set back: only later uses count."""
        with self._mutex:
            if self.began_ns is not None and now_ns < self.began_ns:
                with contextlib.suppress(OSError):
                    os.utime(self._descriptor, ns=(now_ns, now_ns))
                self.began_ns = now_ns

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the lease while the block runs; yields when it began (ns)."""
        with self._mutex:
            if not self._holders:
                self._held, self._descriptor = self._acquire()
                self.began_ns = os.fstat(self._descriptor).st_mtime_ns
            self._holders += 1
            began_ns = self.began_ns or 0
        try:
            yield began_ns
        finally:
            with self._mutex:
                self._holders -= 1
                if not self._holders:
                    self.began_ns = None
                    self._held.close()

    def _acquire(self) -> tuple[contextlib.ExitStack, int]:
        root = self._folder.root
        with contextlib.ExitStack() as stack:
            with disk_errors(root):
                descriptor = self._folder.open_lock(f"{root}/run.lock")
            stack.callback(os.close, descriptor)
            # The first of several runs sweeps leftovers.
            with contextlib.suppress(Locked):
                lock(descriptor, wait=False)
                self._folder.sweep()
            lock(descriptor, shared=True)
            with disk_errors(root):
                self._folder.make_folder(f"{root}/runs")
                descriptor = stack.enter_context(hold_lease(root))
            return stack.pop_all(), descriptor


# ---------------------------------------------------------------- claims
# A claim is the lock on a key while a process makes its result, and the key's work folder.


class Claim:
    """A claimed key and its folders.

    `out`, initially empty, receives the outputs; `work` keeps files from earlier attempts to resume from.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.out = f"{folder}/out"
        self.work = f"{folder}/work"

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the name (with slashes) and the path of every output file."""
        for parent, _, names in os.walk(self.out):
            for name in names:
                path = f"{parent}/{name}"
                yield os.path.relpath(path, self.out), path


@contextlib.contextmanager
def claim(folder: StoreFolder, key: str) -> Iterator[Claim]:
    """Wait until no other process works on a key, then hold its claim while the block runs."""
    claimed = Claim(f"{folder.root}/work/{key}")
    with disk_errors(folder.root):
        descriptor = _lock_folder(folder, claimed.folder)
        remove_tree(claimed.out)
        folder.make_folder(claimed.out)
        folder.make_folder(claimed.work)
    try:
        yield claimed
    finally:
        os.close(descriptor)


def release(folder: StoreFolder, claimed: Claim) -> None:
    """Remove the work folder of a claim after its result was stored."""
    # Rename it first, because the next process that waits for this key may create the same folder at once.
    removed = folder.temporary_path()
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed.folder, removed)
    remove_tree(removed)


def _lock_folder(store: StoreFolder, folder: str) -> int:
    """Lock a work folder, which may be removed while waiting; return the descriptor of the lock."""
    while True:
        try:
            store.make_folder(folder)
            descriptor = store.open_lock(f"{folder}/claim")
        except (FileNotFoundError, FileExistsError):
            # The lock's last holder has removed the folder.
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            lock(descriptor, subject="a result that another run is making")
            if is_current(descriptor, f"{folder}/claim"):
                stack.pop_all()
                return descriptor
